"""Which data-parallel rank gets which micro-batch, and in which order.

A rank's step takes about sum + (pp - 1) x largest: every micro-batch passes a stage, and the pipeline fills and
drains at the pace of the largest (Hydraulis' law; exact for a proportionate flow shop, in any order).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb_megatron.packing.packer import Grid
from wlb_megatron.plan import MicroBatch


def in_given_order(bins: Sequence[MicroBatch], dp: int) -> Grid:
    """Micro-batch-major, as Megatron's own sampler deals samples: bins 0..3 with dp 2 give [[0, 1], [2, 3]]."""
    return tuple(tuple(bins[at : at + dp]) for at in range(0, len(bins), dp))


def step_work(grid: Grid, pp: int) -> int:
    """Predicted work on the critical path of one iteration: max over ranks of sum + (pp - 1) x largest."""
    ranks = zip(*grid, strict=True)
    return max(sum(b.work for b in rank) + (pp - 1) * max(b.work for b in rank) for rank in ranks)


def assign_ranks(bins: Sequence[MicroBatch], dp: int, pp: int) -> Grid:
    """Bins spread over ranks for the least `step_work`; each rank's largest first.

    Largest first: memory is at its peak in the first iteration's first micro-batch and does not fragment later,
    and micro-batches of like size run side by side where ranks wait for each other (expert parallelism).
    """
    order = sorted(range(len(bins)), key=lambda i: (-bins[i].work, i))
    if dp == 1:
        return tuple((bins[i],) for i in order)
    per_rank = len(bins) // dp
    work = np.array([bins[i].work for i in order], dtype=np.int64)
    choices = [_deal_snake(len(order), dp), _deal_greedy(work, dp), np.arange(len(order)) // per_rank]
    rank_of = min(choices, key=lambda choice: _cost(work, choice, dp, pp).max())
    rank_of = _swap(work, rank_of, dp, pp)
    ranks = [[bins[order[i]] for i in np.flatnonzero(rank_of == rank)] for rank in range(dp)]
    return tuple(zip(*ranks, strict=True))


def _cost(work: np.ndarray, rank_of: np.ndarray, dp: int, pp: int) -> np.ndarray:
    total = np.zeros(dp, dtype=np.int64)
    largest = np.zeros(dp, dtype=np.int64)
    np.add.at(total, rank_of, work)
    np.maximum.at(largest, rank_of, work)
    return total + (pp - 1) * largest


def _deal_snake(count: int, dp: int) -> np.ndarray:
    """Ranks of bins in falling order of work: 0 1 2 2 1 0 0 1 2 ..."""
    at = np.arange(count) % (2 * dp)
    return np.where(at < dp, at, 2 * dp - 1 - at)


def _deal_greedy(work: np.ndarray, dp: int) -> np.ndarray:
    """Each bin, largest first, to the rank with least work that still has a place."""
    import heapq

    per_rank = len(work) // dp
    heap = [(0, rank, per_rank) for rank in range(dp)]
    rank_of = np.empty(len(work), dtype=np.int64)
    for i, w in enumerate(work.tolist()):
        total, rank, places = heapq.heappop(heap)
        rank_of[i] = rank
        if places > 1:
            heapq.heappush(heap, (total + w, rank, places - 1))
    return rank_of


def _swap(work: np.ndarray, rank_of: np.ndarray, dp: int, pp: int, passes: int = 32) -> np.ndarray:
    """Swap a micro-batch of the costliest rank with one elsewhere while that lowers the cost; never raises it."""
    rank_of = rank_of.copy()
    for _ in range(passes):
        cost = _cost(work, rank_of, dp, pp)
        worst = int(cost.argmax())
        mine, others = np.flatnonzero(rank_of == worst), np.flatnonzero(rank_of != worst)
        # Half of the gap to the mean is what a swap should move; search the difference nearest to it.
        goal = int(cost[worst] - cost.mean()) // 2 + 1
        at = np.searchsorted(-work[others], -(work[mine] - goal)).clip(0, len(others) - 1)
        best: tuple[int, int, int] | None = None
        for a, b in zip(mine.tolist(), others[at].tolist(), strict=True):
            trial = rank_of.copy()
            trial[a], trial[b] = rank_of[b], worst
            now = int(_cost(work, trial, dp, pp).max())
            if best is None or now < best[0]:
                best = (now, a, b)
        if best is None or best[0] >= cost[worst]:
            break
        _, a, b = best
        rank_of[a], rank_of[b] = rank_of[b], worst
    return rank_of
