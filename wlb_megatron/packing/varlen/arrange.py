"""Packs an iteration's documents into the number of micro-batches with the least predicted step.

Micro-batches are assigned to data-parallel ranks, and ordered. A rank's step takes about sum + (pp - 1) x largest:
every micro-batch passes a stage, and the pipeline fills and drains at the pace of the largest (Hydraulis' law). With
vpp model chunks a stage, filling and draining take 1 / vpp of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wlb_megatron.packing.packer import Grid, Ranks
from wlb_megatron.packing.varlen.items import Bins, Filled, Item, Limits
from wlb_megatron.pipeline.step_law import StepLaw, most_held
from wlb_megatron.plan import MicroBatch

IntArray = npt.NDArray[np.int64]


def in_given_order(bins: Sequence[MicroBatch], dp: int) -> Grid:
    """Micro-batch-major, as Megatron's own sampler deals samples: bins 0..3 with dp 2 give [[0, 1], [2, 3]]."""
    return tuple(tuple(bins[begin : begin + dp]) for begin in range(0, len(bins), dp))


Bin = TypeVar("Bin", Filled, MicroBatch)


def assign_ranks(bins: Sequence[Bin], ranks: Ranks) -> tuple[tuple[Bin, ...], ...]:
    """Spreads bins over ranks for the least step by this law. In each rank the work rises to the middle, then falls.

    Example: works 1 2 3 4 5 run as 1 3 5 4 2. In simulated 1F1B schedules this order takes 3 to 8 % less than by
    the law. Falling order takes 1 to 5 % less; the largest in the last place takes 10 to 20 % more. Micro-batches of
    similar size run at the same time if ranks wait for each other (expert parallelism).
    """
    dp, pp, vpp = ranks.dp, ranks.pp, ranks.vpp
    order = sorted(range(len(bins)), key=lambda i: (-bins[i].work, i))
    per_rank = len(bins) // dp
    work = np.array([bins[i].work for i in order], dtype=np.int64)
    place = np.arange(len(order))
    deals = [_deal_snake(len(order), dp), _deal_greedy(work, dp), place // per_rank]
    rank_of = min(deals, key=lambda deal: int(_cost(work, deal, dp, pp, vpp).max())) if dp > 1 else deals[0]
    if dp > 1:
        rank_of = _swap(work, rank_of, dp, pp, vpp)
    grid = []
    for rank in range(dp):
        falling = [bins[order[i]] for i in np.flatnonzero(rank_of == rank).tolist()]
        rising = falling[::-1]
        grid.append(rising[::2] + rising[1::2][::-1])
    return tuple(zip(*grid, strict=True))


def _cost(work: IntArray, rank_of: IntArray, dp: int, pp: int, vpp: int) -> IntArray:
    """int64[dp], vpp times each rank's step; work falls."""
    total = np.zeros(dp, dtype=np.int64)
    largest_work = np.zeros(dp, dtype=np.int64)
    np.add.at(total, rank_of, work)
    np.maximum.at(largest_work, rank_of, work)
    return vpp * total + (pp - 1) * largest_work


def _deal_snake(count: int, dp: int) -> IntArray:
    """Ranks of bins in falling order of work: 0 1 2 2 1 0 0 1 2 ..."""
    place = np.arange(count) % (2 * dp)
    return np.where(place < dp, place, 2 * dp - 1 - place)


def _deal_greedy(work: IntArray, dp: int) -> IntArray:
    """Assigns each bin, largest first, to the rank with the least work that has a free place."""
    heap = [(0, rank, len(work) // dp) for rank in range(dp)]
    rank_of = np.empty(len(work), dtype=np.int64)
    for i, w in enumerate(work.tolist()):
        total, rank, places = heapq.heappop(heap)
        rank_of[i] = rank
        if places > 1:
            heapq.heappush(heap, (total + w, rank, places - 1))
    return rank_of


def _swap(work: IntArray, rank_of: IntArray, dp: int, pp: int, vpp: int, rounds: int = 32) -> IntArray:
    """Swaps micro-batches between the costliest and a cheap rank while that lowers the larger of the two costs.

    Each swap is the best pair, so the step never gets longer.
    """
    rank_of = rank_of.copy()
    for _ in range(rounds):
        cost = _cost(work, rank_of, dp, pp, vpp)
        order = np.argsort(cost, kind="stable")
        if not any(_swap_pair(work, rank_of, int(order[-1]), int(cheap), pp, vpp) for cheap in order[:4]):
            break
    return rank_of


def _swap_pair(work: IntArray, rank_of: IntArray, high: int, low: int, pp: int, vpp: int) -> bool:
    """The best swap between two ranks, made in `rank_of`; False if none lowers the larger of their costs."""
    if high == low:
        return False
    mine, theirs = np.flatnonzero(rank_of == high), np.flatnonzero(rank_of == low)
    a, b = work[mine][:, None], work[theirs][None, :]
    costs = [
        vpp * (rank_works.sum() - out + into)
        + (pp - 1) * np.maximum(into, _largest_without(rank_works, axis))
        for rank_works, out, into, axis in ((work[mine], a, b, 0), (work[theirs], b, a, 1))
    ]
    after = np.maximum(*costs)
    now = max(
        vpp * rank_works.sum() + (pp - 1) * rank_works.max() for rank_works in (work[mine], work[theirs])
    )
    if after.min() >= now:
        return False
    i, j = np.unravel_index(after.argmin(), after.shape)
    rank_of[mine[i]], rank_of[theirs[j]] = low, high
    return True


def _largest_without(work: IntArray, axis: int) -> IntArray:
    """The largest of the others, for each of `work` (falling), along one axis of a matrix: 5 3 2 gives 3 5 5."""
    largest_work = np.full(len(work), work[0])
    largest_work[0] = work[1] if len(work) > 1 else 0
    return np.expand_dims(largest_work, 1 - axis)


_TOKENS = itemgetter(1)  # of items; faster than access by name

TRIED = 3
"""The most numbers of micro-batches that are packed and compared; a rough estimate chooses them."""

Fill = Callable[[int], tuple[Bins, list[Item]]]
"""Returns that many bins with everything that trains, and what did not fit."""


def arrange(
    fill: Fill, counts: Sequence[int], lot: tuple[int, int, int], limits: Limits, ranks: Ranks, law: StepLaw
) -> tuple[Grid, list[Item]]:
    """The grid with the least predicted step, over numbers counts[i] of micro-batches per rank; and what did not fit.

    lot: number of documents, their summed work, and the largest one's work. No micro-batch is empty: there are at
    least as many documents as bins, or the smallest number of bins is taken. A number that leaves documents out, or
    holds more tokens at a time than one micro-batch per window may, is considered only if all numbers do.
    """
    documents, work, largest_work = lot
    windows = limits.bins // ranks.dp
    one_per_window = law.counts(windows, 1)
    fitting_counts = [count for count in counts if count * ranks.dp <= documents] or one_per_window
    rough = [law.estimate(count, work // ranks.dp, largest_work) for count in fitting_counts]
    tried_counts = sorted(sorted(range(len(fitting_counts)), key=lambda i: (rough[i], i))[:TRIED])
    token_limit = min(windows, law.held_at_once) * limits.capacity
    best_try: tuple[tuple[int, int, int], Bins, list[Item]] | None = None
    # The smallest number comes last: it holds no more than allowed, and is packed only if no better number fits.
    for count in sorted((fitting_counts[i] for i in tried_counts), reverse=True):
        bins, left_out = fill(count * ranks.dp)
        # Only totals matter so far, not what each bin holds.
        grid = assign_ranks([Filled([], *size) for size in zip(bins.work, bins.tokens, strict=True)], ranks)
        excess = max(0, most_in_flight(grid, law) - token_limit)
        works, tokens = (
            [[getattr(bin_, name) for bin_ in column] for column in zip(*grid, strict=True)]
            for name in ("work", "tokens")
        )
        price = sum(item.work for item in left_out), excess, law.step(works, None, tokens)
        if best_try is None or price < best_try[0]:
            best_try = price, bins, left_out
    assert best_try is not None
    if best_try[0][1] and fitting_counts != one_per_window:
        return arrange(fill, one_per_window, lot, limits, ranks, law)
    _, bins, left_out = best_try
    contents = bins.contents()
    improve_bins(contents, bins.work, limits.capacity, limits.max_documents)
    sizes = (sum(map(_TOKENS, items)) for items in contents)
    grid = assign_ranks(list(map(Filled, contents, bins.work, sizes)), ranks)
    if most_in_flight(grid, law) > token_limit and fitting_counts != one_per_window:
        return arrange(fill, one_per_window, lot, limits, ranks, law)
    return tuple(tuple(bin_.micro_batch() for bin_ in row) for row in grid), left_out


def most_in_flight(grid: Sequence[Sequence[Filled | MicroBatch]], law: StepLaw) -> int:
    """The most tokens, without padding, of consecutive micro-batches that a rank's first stage holds at once. One that
    is in flight counts in full, whatever of its model chunks is held."""
    whole, ones = StepLaw(pp=law.held_at_once), (1,) * len(grid)
    return max(most_held([of.tokens for of in column], ones, whole) for column in zip(*grid, strict=True))


PARTNERS = 4

_NONE = np.iinfo(np.int64).max


class _Bin:
    """A bin's items as arrays, in the order of filling; `ranked`: their places by (work, tokens, serial)."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        work, tokens, serial, _, _ = zip(*items, strict=True) if items else ((),) * 5
        self.work, self.tokens, by_age = (np.array(of, dtype=np.int64) for of in (work, tokens, serial))
        self.total = int(self.tokens.sum())
        self.ranked = np.lexsort((by_age, self.tokens, self.work))


def improve_bins(
    bins: list[list[Item]], work: list[int], capacity: int, max_documents: int, rounds: int = 16
) -> None:
    """Move a piece from the bin with most work to a light one, or swap two, whichever evens them best, while it
    helps; `bins` and their `work` change in place. None gets more work than the largest had, nor breaks a limit."""
    arrays: dict[int, _Bin] = {}
    for _ in range(rounds):
        order = sorted(range(len(bins)), key=work.__getitem__)
        high = order[-1]
        for low in order[: min(PARTNERS, len(bins) - 1)]:
            for index in (high, low):
                if index not in arrays:
                    arrays[index] = _Bin(bins[index])
            trade = _best_trade(arrays[high], arrays[low], work[high] - work[low], capacity, max_documents)
            if trade is not None:
                break
        else:
            break
        for item, source, target in zip(trade, (high, low), (low, high), strict=False):
            bins[source].remove(item)
            bins[target].append(item)
            work[source] -= item.work
            work[target] += item.work
        del arrays[high], arrays[low]


def _best_trade(high: _Bin, low: _Bin, gap: int, capacity: int, max_documents: int) -> list[Item] | None:
    """The item that goes to `low`, and the one that comes back if any, after which two bins, now `gap` apart, are
    closest; None if nothing brings them closer.

    Each item of `high` may move (column 0), or be swapped for one of the three of `low` around (its work - gap / 2).
    Of equal trades the first item's counts, and of that the first column.
    """
    if not high.items:
        return None
    away = np.full((len(high.items), 4), _NONE)
    if len(high.items) > 1 and len(low.items) < max_documents:
        fits = (high.work < gap) & (low.total + high.tokens <= capacity)
        away[fits, 0] = np.abs(gap - 2 * high.work[fits])
    works, tokens = low.work[low.ranked], low.tokens[low.ranked]
    near = np.searchsorted(works, high.work - gap // 2)[:, None] + np.arange(-1, 2)
    if len(works):
        back = near.clip(0, len(works) - 1)
        grow = high.tokens[:, None] - tokens[back]
        remaining = np.abs(gap - 2 * (high.work[:, None] - works[back]))
        fits = (
            (near == back)
            & (low.total + grow <= capacity)
            & (high.total - grow <= capacity)
            & (remaining < gap)
        )
        away[:, 1:][fits] = remaining[fits]
    row, column = divmod(int(away.argmin()), 4)
    if away[row, column] == _NONE:
        return None
    return [high.items[row], *([low.items[low.ranked[near[row, column - 1]]]] if column else ())]
