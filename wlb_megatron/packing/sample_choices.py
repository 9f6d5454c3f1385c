"""What a job learns from a sample of its corpus, unless flags give it: whether long documents train in chunks, and the
lengths from which documents wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.limits import holds_whole, settings_refused
from wlb_megatron.packing.packer import ONE_RANK, Packer, PackingJob, Ranks, Times, per_window_of
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.items import Limits, OutlierQueues
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.plan import IterationPlan
from wlb_megatron.workload.cost_model import CostModel

PAYS = 0.98
"""Chunks are used if their step, by the packer's law, takes at most this share of the step with whole documents."""

ALIKE = 1.01
"""The same by simulated times, or by the law where it knows which layers a step keeps. With chunks no document waits
and steps are alike, which is worth a hundredth. On two H200s, 16 layers of 4096, both were predicted alike and chunks
trained 1.8 % more tokens (docs/measured.md)."""

SETTLE, LOOKED, AT_ONCE = 16, (8, 48), 1024
"""What is simulated for a choice: iterations that only fill the queues, the fewest and most iterations that are timed,
and about how many documents one has. Of more, fewer data-parallel ranks are looked at."""


class ChunkChoice(NamedTuple):
    """Whether documents train in chunks, and why. ratio: the step in chunks over that with whole documents."""

    chunks: bool
    why: str
    ratio: float = 1.0


Whole = Callable[[Limits, Ranks], Packer]
"""Makes the packer without chunks, for limits.bins windows on ranks."""


def choose_chunks(job: PackingJob, limits: Limits, make_whole: Whole) -> ChunkChoice:
    """Whether documents train in chunks, and why.

    WlbError if chunks are asked for, by --wlb-chunks or by --wlb-overlong, and refused. A delay that is given acts:
    if chunks may be left out, they are.

    Args:
        limits: those of the plan with chunks.
    """
    config, ranks = job.config, job.ranks
    longest_tokens = job.longest or job.window
    fits_whole = holds_whole(config, job.window, job.alignment)
    off = [("--wlb-chunks off", "leave it out")] if config.chunks == "off" else []
    refusals = [*off, *job.no_chunks, *settings_refused(config)]
    asking_flag = _asked_for(config)
    if refusals:
        flag, cure = refusals[0]
        if asking_flag is not None:
            raise WlbError(f"{asking_flag[0]} cannot be combined with {flag}: {cure}, or {asking_flag[1]}")
        if off:
            return ChunkChoice(False, flag)
        lost = ""
        if (
            ranks.pp > 1
            and job.sample
            and longest_tokens <= limits.window
            and fits_whole
            and config.cp_mode == "fixed"
        ):
            prediction = _predicted(job, job.sample, limits, make_whole)
            lost = f"; chunks would shorten the predicted step by {1 - prediction.ratio:.0%}"
            lost = lost if prediction.chunks else "; chunks would bring nothing"
        return ChunkChoice(False, f"not with {flag}{lost}")
    if config.chunks == "on":
        return ChunkChoice(True, "--wlb-chunks on")
    if longest_tokens > limits.window:
        return ChunkChoice(True, f"documents of up to {longest_tokens:,} tokens train whole")
    if not fits_whole:
        return ChunkChoice(True, f"micro-batches of {config.max_tokens:,} tokens do not hold whole documents")
    if ranks.pp == 1:
        return ChunkChoice(False, "there is no pipeline to fill")
    if not job.sample:
        return ChunkChoice(False, "no documents to predict from")
    return _predicted(job, job.sample, limits, make_whole)


def _predicted(job: PackingJob, sample: Sequence[int], limits: Limits, make_whole: Whole) -> ChunkChoice:
    """See choose_chunks."""
    cost, ranks, times = job.cost, job.ranks, job.times or _by_law
    lengths = sampled(sample)
    mean = int(lengths.sum()) / len(lengths)
    fill = max(1, int(AT_ONCE * mean) // limits.window)  # so many windows
    windows = min(limits.bins // ranks.dp, fill)
    # The packer's own law is of one rank: others would cost each rank seconds at start.
    dp = 1 if job.times is None else min(ranks.dp, max(1, fill // windows))
    few_limits, few_ranks = replace(limits, bins=windows * dp), ranks._replace(dp=dp)
    packers = (
        ChunkPacker(cost, few_limits, few_ranks, per_window=per_window_of(job.config)),
        make_whole(few_limits, few_ranks),
    )
    tokens = few_limits.bins * limits.window
    looked = min(LOOKED[1], max(LOOKED[0], int(LOOKED[0] * AT_ONCE * mean) // tokens))
    cut_time, uncut_time = (_per_work(lengths, tokens, packer, looked, times) for packer in packers)
    speed = f"{uncut_time / cut_time:.3f} times as fast as whole documents"
    limit = PAYS if job.times is None and ranks.rooms is None else ALIKE
    return ChunkChoice(cut_time <= limit * uncut_time, f"predicted: {speed}", cut_time / uncut_time)


def _by_law(plans: Sequence[IterationPlan]) -> npt.NDArray[np.float64]:
    """Times of plans, in the cost model's units, where nothing simulates them."""
    return np.array([plan.predicted for plan in plans], dtype=np.float64)


def _per_work(lengths: np.ndarray, tokens: int, packer: Packer, looked: int, times: Times) -> float:
    """Time of a unit of work. A token's would depend on which documents come first."""
    planner = repeating_planner(lengths, packer, tokens)
    plans = list(islice(iter(planner.next_iteration, None), SETTLE + looked))[SETTLE:]
    return float(times(plans).sum()) / max(1, sum(plan.ideal for plan in plans))


def _asked_for(config: WlbConfig) -> tuple[str, str] | None:
    """The flag that asks for chunks, and what to set instead; None where they may be left out."""
    if config.overlong == "chunk":
        return "--wlb-overlong chunk", "set --wlb-overlong split"
    return ("--wlb-chunks on", "set --wlb-chunks auto") if config.chunks == "on" else None


DELAY_BOUND = 0.5
"""The largest accepted mean delay of tokens (iterations). With it the loss follows arrival order's (WLB-LLM, section
7.4)."""

FIRST_LEVELS = (4, 8, 3)
"""Divisors of the window to try for the first level. Any micro-batch can balance a shorter document."""

STEPS = (4, 8, 2)
"""Levels in each doubling of length."""

ITERATIONS, MOST_BINS = 96, 8
"""Iterations, and the most micro-batches, with which each choice is tried."""


class Trial(NamedTuple):
    """What a choice of thresholds did on the sample. slowdown: summed largest over summed mean work (1 is even), or
    summed steps over summed work. delay: mean over tokens (iterations).
    """

    thresholds: tuple[int, ...]
    slowdown: float
    delay: float


def read_thresholds(text: str) -> tuple[int, ...] | None:
    """Thresholds (tokens) of `config.thresholds`: "none" is (), "49152,90112" as it says, "auto" is None."""
    if text in ("none", "auto"):
        return () if text == "none" else None
    try:
        return OutlierQueues([int(part) for part in text.split(",")]).thresholds
    except ValueError:
        raise WlbError(
            f"thresholds {text!r} are not auto, none, or rising token counts: give e.g. 49152,90112"
        ) from None


def spread(window: int, first: int, step: int) -> tuple[int, ...]:
    """Levels from window/first up, `step` to a doubling of length. Window 64, first 4, step 1: 16, 32."""
    count = int(step * np.log2(first))
    return tuple(sorted({max(1, int(window / first * 2 ** (i / step))) for i in range(count)}))


def rule_of_thumb(window: int) -> tuple[int, ...]:
    """Thresholds of a run without a sample."""
    return spread(window, FIRST_LEVELS[0], STEPS[0])


def find_thresholds(
    sample: Sequence[int],
    cost: CostModel,
    limits: Limits,
    ranks: Ranks = ONE_RANK,
    per_window: float | None = 1,
) -> Trial:
    """The thresholds with the least predicted step time on a sample of lengths, among those whose mean delay keeps
    DELAY_BOUND.

    Each choice of a first level and of levels per doubling (and of no waiting at all) packs the sample for ITERATIONS
    iterations, in one seeded order, repeated if it is short. The step time is the sum of each iteration's largest
    micro-batch or, if the number of micro-batches is free, of the predicted steps. Among choices within 0.1 % the
    first wins, which is also what a run without a sample gets.

    Thresholds stay fixed during training, and a checkpoint keeps its own. The price of waiting (DelayPrice, in
    the state) follows lengths that drift. Levels are geometric in the window, so those of one corpus are within 0.4 %
    of the best step time on another. Relearning from recent arrivals changes as little, either way
    (docs/results/packing_drift.csv).
    """
    lengths = sampled(sample)
    # Python's integers: from some 100 million tokens in a global batch on, the product exceeds 64 bits.
    tokens, work = int(lengths.sum()), int(cost.work(lengths).sum())
    share = float(limits.bins * limits.window * work) / max(tokens, 1) / ranks.dp
    law = ranks.law(cost)
    numbers = law.worthwhile(law.counts(limits.bins // ranks.dp, per_window), int(share))
    number_is_free = numbers != law.counts(limits.bins // ranks.dp, 1)
    limits = replace(limits, bins=min(limits.bins // (ranks.dp if number_is_free else 1), MOST_BINS))
    packers = partial(VarlenPacker, cost, limits)
    if number_is_free:
        packers = partial(packers, ranks=ranks._replace(dp=1), per_window=per_window)
    choices = [spread(limits.window, first, step) for first in FIRST_LEVELS for step in STEPS]
    if len(lengths) == 0 or lengths.max() < min(choices[0]):
        return Trial(choices[0], 1.0, 0.0)
    best_trial = None
    for thresholds in [*choices, ()]:
        trial = _try(lengths, limits, packers(thresholds))
        if best_trial is None or _rank(trial) < _rank(best_trial):
            best_trial = trial
    assert best_trial is not None
    return best_trial


def sampled(sample: Sequence[int]) -> npt.NDArray[np.int64]:
    """int64[n]: the sample's lengths in one seeded order."""
    return np.random.default_rng(0).permutation(np.asarray(sample, dtype=np.int64))


def _rank(trial: Trial) -> tuple[bool, int]:
    return trial.delay > DELAY_BOUND, round(trial.slowdown * 1000)


def _try(lengths: npt.NDArray[np.int64], limits: Limits, packer: VarlenPacker) -> Trial:
    planner = repeating_planner(lengths, packer, limits.bins * limits.window)
    slow = total = delayed_tokens = 0
    for _ in range(ITERATIONS):
        plan = planner.next_iteration()
        assert plan is not None
        work = [micro_batch.work for row in plan.micro_batches for micro_batch in row]
        slow += max(work) * len(work) if packer.law.pp == 1 else plan.predicted
        total += sum(work)
        delayed_tokens += sum(piece.tokens for piece in plan.waiting)
    return Trial(packer.thresholds, slow / total, delayed_tokens / planner.taken)


def repeating_planner(lengths: npt.NDArray[np.int64], packer: Packer, global_tokens: int) -> Planner:
    """A planner of documents of these lengths, at least 1 token each, in their order, over and over."""
    stream = DocumentStream.of_lengths(lengths, Rules(int(lengths.max()), endless=True))
    return Planner(stream, packer, global_tokens=global_tokens)
