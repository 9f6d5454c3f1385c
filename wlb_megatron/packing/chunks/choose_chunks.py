"""Decides whether long documents train in chunks: by the flag, or by what a sample of the corpus predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunks.chunk_packer import ChunkPacker
from wlb_megatron.packing.packer import Packer, Ranks
from wlb_megatron.packing.varlen.delay_bound import Limits
from wlb_megatron.packing.varlen.thresholds import MOST_AT_ONCE, MOST_BINS, sampled, step_over_ideal
from wlb_megatron.workload.cost_model import CostModel

LONGEST = (3, 4)
"""The longest micro-batch of a plan with chunks, in windows. A longer document is cut into chunks."""

PAYS = 0.98
"""Chunks are used if their predicted step takes at most this share of the step with whole documents."""

PAYS_IN_MEMORY = 1.01
"""The same where steps keep the layers that fit. With chunks no document waits and steps are alike, which is worth a
hundredth. On two H200s, 16 layers of 4096, both were predicted alike and chunks trained 1.8 % more tokens
(docs/measured.md)."""


def pays(cut: float, uncut: float, ranks: Ranks) -> bool:
    """Whether chunks are used. cut, uncut: predicted steps over ideal."""
    return cut <= (PAYS if ranks.rooms is None else PAYS_IN_MEMORY) * uncut


def holds_whole(config: WlbConfig, window: int, alignment: int = 1) -> bool:
    """Whether micro-batches can hold uncut documents: Lmax is 1.25 windows or more, or not set."""
    return config.max_tokens is None or config.max_tokens // alignment * alignment * 4 >= window * 5


class ChunkChoice(NamedTuple):
    chunks: bool
    why: str


def with_chunks(limits: Limits, max_tokens: int | None, alignment: int) -> Limits:
    """The limits of a plan with chunks: no delay, shorter micro-batches."""
    return replace(limits, capacity=chunk_capacity(limits.window, max_tokens, alignment), max_delay=0)


def chunk_capacity(window: int, max_tokens: int | None, alignment: int) -> int:
    """Tokens of the longest micro-batch of a plan with chunks. max_tokens: the flag's value; None: the longest
    useful.
    """
    most = window * LONGEST[0] // LONGEST[1]
    return max(alignment, min(most, max_tokens or most) // alignment * alignment)


def choose_chunks(
    config: WlbConfig,
    cost: CostModel,
    limits: Limits,
    ranks: Ranks,
    per_window: float | None,
    sample: Sequence[int] | None,
    longest: int,
    fits_whole: bool,
    refused: Sequence[tuple[str, str]],
    whole: Callable[[Limits, Ranks], Packer],
) -> ChunkChoice:
    """limits: of the plan with chunks. sample: lengths of documents (tokens); longest: of all. fits_whole: see
    holds_whole. refused: (flag, cure) of each setting that chunks cannot be trained with. whole: the packer without
    chunks, for limits.bins windows on ranks.

    WlbError where chunks are asked for, by --wlb-chunks or by --wlb-overlong, and refused. A delay that is given acts:
    where chunks may be left out, they are.
    """
    refused = [*refused, *settings_refused(config)]
    asked = _asked_for(config)
    if asked is not None and config.chunks == "off":
        raise WlbError(f"{asked[0]} cannot be combined with --wlb-chunks off: leave it out, or {asked[1]}")
    if config.chunks == "off":
        return ChunkChoice(False, "--wlb-chunks off")
    if refused:
        flag, cure = refused[0]
        if asked is not None:
            raise WlbError(f"{asked[0]} cannot be combined with {flag}: {cure}, or {asked[1]}")
        predicted = None
        if ranks.pp > 1 and sample and longest <= limits.window and fits_whole and config.cp_mode == "fixed":
            predicted = _predicted(cost, limits, ranks, per_window, sample, whole)
        return ChunkChoice(False, f"not with {flag}{_lost(predicted, ranks)}")
    if config.chunks == "on":
        return ChunkChoice(True, "--wlb-chunks on")
    if longest > limits.window:
        return ChunkChoice(True, f"documents of up to {longest:,} tokens train whole")
    if not fits_whole:
        return ChunkChoice(True, f"micro-batches of {config.max_tokens:,} tokens do not hold whole documents")
    if ranks.pp == 1:
        return ChunkChoice(False, "there is no pipeline to fill")
    if not sample:
        return ChunkChoice(False, "no documents to predict from")
    cut, uncut = _predicted(cost, limits, ranks, per_window, sample, whole)
    return ChunkChoice(
        pays(cut, uncut, ranks), f"predicted step over ideal: {cut:.2f} in chunks, {uncut:.2f} whole"
    )


def _predicted(
    cost: CostModel,
    limits: Limits,
    ranks: Ranks,
    per_window: float | None,
    sample: Sequence[int],
    whole: Callable[[Limits, Ranks], Packer],
) -> tuple[float, float]:
    """Predicted steps over ideal: in chunks, and with whole documents. See choose_chunks."""
    lengths = sampled(sample)
    fill = MOST_AT_ONCE * int(lengths.sum()) // (len(lengths) * limits.window)  # so many windows
    windows = min(limits.bins // ranks.dp, MOST_BINS, max(1, fill))
    few, one_rank = replace(limits, bins=windows), ranks._replace(dp=1)
    cut, uncut = (
        step_over_ideal(lengths, windows * limits.window, packer, cost.per_earlier_key)
        for packer in (ChunkPacker(cost, few, one_rank, per_window=per_window), whole(few, one_rank))
    )
    return cut, uncut


def _lost(predicted: tuple[float, float] | None, ranks: Ranks) -> str:
    """What a setting costs that keeps chunks off, for a message; empty where nothing is predicted."""
    if predicted is None:
        return ""
    cut, uncut = predicted
    if not pays(cut, uncut, ranks):
        return "; chunks would bring nothing"
    return f"; chunks would shorten the predicted step by {1 - cut / uncut:.0%}"


def _asked_for(config: WlbConfig) -> tuple[str, str] | None:
    """The flag that asks for chunks, and what to set instead; None where they may be left out."""
    if config.overlong == "chunk":
        return "--wlb-overlong chunk", "set --wlb-overlong split"
    return ("--wlb-chunks on", "set --wlb-chunks auto") if config.chunks == "on" else None


def settings_refused(config: WlbConfig) -> list[tuple[str, str]]:
    """(flag, cure) of each of the plugin's own settings that cannot be combined with documents in chunks."""
    rows = (
        (
            config.cp_mode == "dynamic",
            "--wlb-cp-mode dynamic",
            "groups take whole documents; use --wlb-cp-mode fixed",
        ),
        (
            config.release == "full",
            "--wlb-release full",
            "it is the paper's release of whole documents; leave it out",
        ),
        (
            bool(config.max_delay),
            f"--wlb-max-delay {config.max_delay}",
            "documents in chunks never wait; leave it out",
        ),
    )
    return [(flag, cure) for applies, flag, cure in rows if applies]
