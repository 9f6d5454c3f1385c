"""Builds the packer that the settings name, and the planner of a job, for training and for every command.

It warns if a sample predicts that fewer tokens will train than asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from wlb_megatron.config import COUNT, WlbConfig
from wlb_megatron.documents.corpus import Lengths, Rules, blocks
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.limits import GpuMemory, chunk_capacity, describe_memory, no_memory_for_chunks
from wlb_megatron.packing.packer import (
    MOST_PER_WINDOW,
    Packer,
    PackingJob,
    Ranks,
    most_per_window,
    number_in,
    per_window_of,
    read_per_window,
)
from wlb_megatron.packing.planner import BatchSchedule, Planner
from wlb_megatron.packing.sample_choices import (
    MOST_BINS,
    choose_chunks,
    find_thresholds,
    read_thresholds,
    repeating_planner,
    rule_of_thumb,
    sampled,
)
from wlb_megatron.packing.varlen.items import Limits
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker, lmax
from wlb_megatron.registry import packer_entry

MAX_DELAY = 16
"""Default limit of a document's wait, in iterations."""

BATCH_SPREAD = 150
"""Default most tokens of a step, in percent of a global batch's."""


def read_spread(text: str) -> int | None:
    """Percent of a global batch's tokens from `config.batch_spread`; None for none."""
    if text in ("auto", "none"):
        return BATCH_SPREAD if text == "auto" else None
    message = f"--wlb-batch-spread {text!r} is neither auto, none, nor a number from 1"
    return round(100 * number_in(text, COUNT, message))


def make_packer(job: PackingJob) -> Packer:
    """The packer that `job.config.packing` names. Raises ValueError on settings that cannot work."""
    config, entry = job.config, packer_entry(job.config.packing)
    if job.window % job.alignment:
        raise WlbError(
            f"window of {job.window} tokens is not a multiple of {job.alignment}, to which micro-batches are padded: "
            "choose --seq-length as a multiple of context-parallel x tensor-parallel size"
        )
    per_window = read_per_window(config.micro_batches_per_window)
    if job.sample:
        per_window_limit = most_per_window(job.ranks.law(job.cost), 1 if entry.fixed_windows else per_window)
        if warning := too_many_documents(job.sample, job.window, config.max_documents, per_window_limit):
            job.say(warning)
    if entry.fixed_windows:
        _refuse_with_fixed_windows(job, per_window)
        if job.pp > 1:
            job.say(
                f"documents in chunks: no (not with --wlb-packing {config.packing}; see analyze --packing varlen)"
            )
    packer: Packer = entry.load()(job)
    return packer


def _refuse_with_fixed_windows(job: PackingJob, per_window: float | None) -> None:
    config = job.config
    for is_asked, flag in (
        (config.chunks == "on", "--wlb-chunks on"),
        (config.overlong == "chunk", "--wlb-overlong chunk"),
    ):
        if is_asked:
            raise WlbError(f"{flag} needs --wlb-packing varlen, not {config.packing}: change one of them")
    if per_window not in (None, 1):
        raise WlbError(
            f"--wlb-micro-batches-per-window {config.micro_batches_per_window} needs --wlb-packing varlen: windows of "
            "fixed length are one micro-batch each"
        )


def make_varlen(job: PackingJob) -> Packer:
    """The packer of micro-batches of variable length: with documents in chunks, or whole."""
    config, window, alignment, ranks, say = job.config, job.window, job.alignment, job.ranks, job.say
    max_delay = MAX_DELAY if config.max_delay is None else config.max_delay
    per_window = per_window_of(config)
    thresholds_set = read_thresholds(config.thresholds)
    limits = Limits(
        *(job.bins, window, window, config.max_documents, max_delay),
        read_spread(config.batch_spread),
    )

    def whole(whole_limits: Limits, on: Ranks, thresholds: Sequence[int]) -> VarlenPacker:
        capacity = lmax(config, window, alignment)
        whole_limits = replace(whole_limits, capacity=capacity, max_delay=max_delay)
        return VarlenPacker(
            job.cost,
            whole_limits,
            thresholds,
            on,
            per_window=per_window,
            adopt_thresholds=thresholds_set is None,
            # Lmax need not be a multiple of the alignment; its padded size must fit.
            adopt_capacity=job.adopt_max_tokens // alignment * alignment,
        )

    # With chunks nothing waits, and micro-batches are shorter.
    capacity = chunk_capacity(window, config.max_tokens, alignment)
    chunk_limits = replace(limits, capacity=capacity, max_delay=0)
    usual = rule_of_thumb(window) if thresholds_set is None else thresholds_set
    chunks, why, _ = choose_chunks(job, chunk_limits, partial(whole, thresholds=usual))
    say(f"documents in chunks: {'yes' if chunks else 'no'} ({why})")
    if chunks and chunk_limits.capacity * MOST_PER_WINDOW < window:
        raise WlbError(
            f"--wlb-max-tokens {config.max_tokens} cuts a window into more than {MOST_PER_WINDOW} micro-batches: set "
            f"it to {-(-window // (MOST_PER_WINDOW * alignment)) * alignment} or more"
        )
    if chunks and thresholds_set:
        say(
            f"WARNING: --wlb-thresholds {config.thresholds} is not used: documents in chunks never wait; leave it out, "
            "or set --wlb-chunks off"
        )
    if chunks and config.batch_spread not in ("auto", "none"):
        say(
            f"WARNING: --wlb-batch-spread {config.batch_spread} bounds nothing: documents in chunks never wait, so "
            "steps above it are only counted; leave it out, or add --wlb-chunks off"
        )
    if chunks:
        return ChunkPacker(
            job.cost, chunk_limits, ranks, per_window=per_window, longest_tokens=job.longest or window
        )
    if thresholds_set is None and job.sample is not None:
        limits = replace(limits, capacity=lmax(config, window, alignment))
        usual = find_thresholds(job.sample, job.cost, limits, ranks, per_window).thresholds
    if job.sample and max_delay:
        few_limits = replace(limits, bins=min(limits.bins // ranks.dp, MOST_BINS))
        warning = unpaired(job.sample, window, whole(few_limits, ranks._replace(dp=1), usual))
        if warning:
            say(warning)
    return whole(limits, ranks, usual)


SAMPLE, SAMPLE_EPOCHS = 65536, 16
"""The most pieces, and epochs of a small corpus, from which a job learns thresholds and whether to train in chunks:
the first that train."""


def sample_lengths_of(stream: DocumentStream, documents: int) -> list[int]:
    """Lengths (tokens) of the pieces that a job learns from, in the order and mixture in which they train.

    documents: how many, over all corpora.
    """
    return stream.peek(min(SAMPLE, SAMPLE_EPOCHS * documents))


def plan_job(
    stream: DocumentStream,
    job: PackingJob,
    *,
    schedule: BatchSchedule | None = None,
    memory: GpuMemory | None = None,
) -> Planner:
    """A planner of a stream of documents: one plan per call. Raises ValueError on settings that cannot work.

    Args:
        schedule: given if global batches grow; job.micro_batches is of the largest.
        memory: a GPU's; None: ignore memory.
    """
    config = job.config
    job = replace(job, no_chunks=[*job.no_chunks, *no_memory_for_chunks(config, memory)])
    packer = make_packer(job)
    if memory is not None and most_micro_batches(packer, config, job.micro_batches) > job.micro_batches:
        chunks = isinstance(packer, ChunkPacker)
        job.say(describe_memory(config, memory, job.longest or job.window, chunks=chunks))
    return Planner(stream, packer, global_tokens=job.bins * job.window, schedule=schedule)


def most_micro_batches(packer: Packer, config: WlbConfig, windows: int) -> int:
    """The most micro-batches into which a rank's windows are packed."""
    if config.fixed_windows or config.cp_mode == "dynamic":
        return windows
    return packer.law.counts(windows, per_window_of(config), always=isinstance(packer, ChunkPacker))[-1]


def arrival_order(config: WlbConfig) -> WlbConfig:
    """What Megatron does with these documents except for the mask: windows in arrival order, sharded per sequence."""
    plain = replace(config, packing="original", sharding="per-sequence", micro_batches_per_window="1")
    return without_chunks(replace(plain, cp_mode="fixed"))


def without_chunks(config: WlbConfig) -> WlbConfig:
    """The same settings without chunks: documents longer than the window are split at it."""
    return replace(config, chunks="off", overlong="split" if config.overlong == "chunk" else config.overlong)


LEAST = 0.95
"""Warn if an iteration would train less than this share of the windows asked for, in mean."""

SETTLE, COUNTED = 20, 20
"""Iterations until as many documents wait as ever will, and those that are counted."""


def nothing_predicted(lengths: Lengths, rules: Rules) -> str | None:
    """Why training refuses documents of these lengths (tokens): none has a second token. None if one has."""
    if rules.predict(lengths):
        return None
    return (
        "nothing to train: no document has a second token, which the first would predict; correct the corpus"
    )


MOST_EPOCHS = 100
"""Commands refuse to plan a step of more passes over the corpus than this: a corpus of a few tokens would take
minutes."""


def too_small(lengths: Lengths, step_tokens: int) -> str | None:
    """Why a command refuses steps of this many tokens over documents of these lengths; None if it accepts them."""
    tokens = sum(int(np.asarray(block).sum()) for block in blocks(lengths))
    if step_tokens <= MOST_EPOCHS * tokens:
        return None
    return (
        f"a step of {step_tokens:,} tokens is {step_tokens // max(tokens, 1):,} times all documents ({tokens:,} "
        "tokens): give the lengths of a larger corpus, or a shorter --window"
    )


def too_many_documents(
    sample: Sequence[int], window: int, max_documents: int, per_window: float
) -> str | None:
    """A warning if documents are so short that the limit on documents leaves micro-batches nearly empty, else None.

    sample: lengths of documents (tokens). max_documents: documents per micro-batch. per_window: the most micro-batches
    per window. Example: documents of 2 tokens, windows of 100 and 10 documents per micro-batch: 20 % of the tokens
    asked for.
    """
    mean = float(np.mean(np.asarray(sample)))
    share = mean * max_documents * per_window / window
    if share >= LEAST:
        return None
    enough = int(window / mean) + 1
    return (
        f"WARNING: at most {share:.1%} of the tokens asked for train in a step: documents have {mean:.1f} tokens in "
        f"mean, and a micro-batch holds {max_documents:,} of them; set --wlb-max-documents to {enough:,}, or shorten "
        "--seq-length"
    )


def unpaired(sample: Sequence[int], window: int, packer: VarlenPacker) -> str | None:
    """A warning if documents longer than half of Lmax waste so much space that fewer tokens train than asked for,
    else None.

    sample: lengths of documents (tokens). packer: a new one of a few windows, which is used up. It is not run if such
    documents hold few of the tokens.
    """
    lengths = sampled(sample)
    large = lengths[2 * lengths > packer.max_tokens]
    if large.sum() < (1 - LEAST) * lengths.sum():
        return None
    planner = repeating_planner(lengths, packer, packer.bins * window)
    trained_tokens = []
    for _ in range(SETTLE + COUNTED):
        planner.next_iteration()
        trained_tokens.append(planner.trained)
    share = (trained_tokens[-1] - trained_tokens[-1 - COUNTED]) / (COUNTED * planner.global_tokens)
    if share >= LEAST:
        return None
    return (
        f"WARNING: about {share:.0%} of the tokens asked for will train in a step: two documents above half of Lmax "
        f"({packer.max_tokens // 2:,} tokens) do not fit in one micro-batch; set --wlb-max-tokens to "
        f"{2 * int(np.quantile(large, 0.9)):,} if memory allows, or --wlb-micro-batches-per-window to 1.5"
    )
