"""Chooses the lengths from which documents wait: given by a flag, or found on a sample of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import ONE_RANK, Packer, Ranks
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.outlier_queues import Limits, OutlierQueues
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.pipeline.orders import groups
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

DELAY_BOUND = 0.5
"""The largest accepted mean delay of tokens (iterations). With it the loss follows arrival order's (WLB-LLM, section
7.4)."""

FIRST_LEVELS = (4, 8, 3)
"""Divisors of the window to try for the first level. Any micro-batch can balance a shorter document."""

STEPS = (4, 8, 2)
"""Levels in each doubling of length."""

ITERATIONS, MOST_BINS = 96, 8
"""Iterations, and the most micro-batches, with which each choice is tried."""


MOST_AT_ONCE, MOST_PIECES, FEWEST = 8192, 200_000, 8
"""For tiny documents, chunks are tried with about MOST_AT_ONCE pieces in an iteration, and for fewer iterations, of
MOST_PIECES pieces in all, but for at least FEWEST."""


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


def sampled(sample: Sequence[int]) -> np.ndarray:
    """int64[n]: the sample's lengths in one seeded order."""
    return np.random.default_rng(0).permutation(np.asarray(sample, dtype=np.int64))


def step_over_ideal(
    lengths: np.ndarray, global_tokens: int, packer: Packer, per_earlier_key: float = 0.0
) -> float:
    """Predicted steps over the same work without bubble and waiting, over at most ITERATIONS iterations of the
    sample. per_earlier_key: see CostModel; it lengthens steps, and is no part of the work."""
    planner = Planner(Repeated(lengths), packer, global_tokens=global_tokens)
    predicted_work = ideal = pieces = 0
    for iteration in range(ITERATIONS):
        if pieces > MOST_PIECES and iteration >= FEWEST:
            break
        plan = planner.next_iteration()
        assert plan is not None
        predicted_work += plan.predicted if not per_earlier_key else _with_keys(plan, packer, per_earlier_key)
        ideal += plan.ideal
        pieces += len(plan.arrived)
    return predicted_work / max(ideal, 1)


def _with_keys(plan: IterationPlan, packer: Packer, per_earlier_key: float) -> int:
    """The plan's predicted step with its earlier chunks' keys exchanged."""
    columns = list(zip(*plan.micro_batches, strict=True))
    works = [
        [
            micro_batch.work
            + round(UNITS_PER_TOKEN * per_earlier_key * sum(piece.prefix for piece in micro_batch.pieces))
            for micro_batch in column
        ]
        for column in columns
    ]
    return packer.law.step(
        works,
        [groups([micro_batch.pieces for micro_batch in column]) for column in columns],
        [[micro_batch.tokens for micro_batch in column] for column in columns],
    )


def _rank(trial: Trial) -> tuple[bool, int]:
    return trial.delay > DELAY_BOUND, round(trial.slowdown * 1000)


def _try(lengths: np.ndarray, limits: Limits, packer: VarlenPacker) -> Trial:
    planner = Planner(Repeated(lengths), packer, global_tokens=limits.bins * limits.window)
    slow = total = delayed_tokens = 0
    for _ in range(ITERATIONS):
        plan = planner.next_iteration()
        assert plan is not None
        work = [micro_batch.work for row in plan.micro_batches for micro_batch in row]
        slow += max(work) * len(work) if packer.law.pp == 1 else plan.predicted
        total += sum(work)
        delayed_tokens += sum(piece.tokens for piece in plan.waiting)
    return Trial(packer.thresholds, slow / total, delayed_tokens / planner.taken)


class Repeated:
    """An endless stream of documents of these lengths, in their order, repeated."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths.tolist()
        self._given = 0

    def next(self) -> Piece:
        epoch, document = divmod(self._given, len(self._lengths))
        self._given += 1
        return Piece(epoch, document, 0, self._lengths[document])

    def state(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state(self, state: dict[str, int]) -> None:
        self._given = state["given"]
