"""The documents of an iteration in as many micro-batches as give the least predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wlb_megatron.packing.assign import assign_ranks
from wlb_megatron.packing.bins import Bins
from wlb_megatron.packing.delay_bound import Limits
from wlb_megatron.packing.improve import improve
from wlb_megatron.packing.outlier_queues import Item
from wlb_megatron.packing.packer import Grid, Ranks
from wlb_megatron.pipeline.step_law import StepLaw
from wlb_megatron.plan import MicroBatch

TRIED = 3
"""Numbers of micro-batches that are filled and whose steps are worked out; a rough estimate chooses them."""

Fill = Callable[[int], tuple[Bins, list[Item]]]
"""Bins of that number with all that trains, and what found no room."""


class Arranged(NamedTuple):
    grid: Grid
    left: list[Item]


def arrange(
    fill: Fill, counts: Sequence[int], lot: tuple[int, int, int], limits: Limits, ranks: Ranks, law: StepLaw
) -> Arranged:
    """The grid with the least predicted step of those with counts[i] micro-batches a rank.

    lot: documents, their summed work and the largest one's work. No micro-batch is empty: there are at least as
    many documents as bins, or the fewest bins are taken. What finds no room with a number of bins counts as waiting
    for a step of its own, so that a number that leaves nothing is taken where there is one.
    """
    documents, work, largest = lot
    fitting = [count for count in counts if count * ranks.dp <= documents] or [counts[0]]
    rough = [_rough(count, work // ranks.dp, largest, law) for count in fitting]
    tried = sorted(sorted(range(len(fitting)), key=lambda i: (rough[i], i))[:TRIED])
    best: tuple[tuple[int, int], Bins, list[Item]] | None = None
    for count in (fitting[i] for i in tried):
        bins, left = fill(count * ranks.dp)
        if min(bins.documents) == 0 and best is not None:
            continue
        step = step_of(grid_of_works(bins.work, ranks), law)
        price = sum(item.work for item in left), step
        if best is None or price < best[0]:
            best = price, bins, left
    assert best is not None
    _, bins, left = best
    contents = bins.contents()
    improve(contents, bins.work, limits.capacity, limits.max_documents)
    micro_batches = [
        MicroBatch(tuple(item.piece for item in items), w)
        for items, w in zip(contents, bins.work, strict=True)
    ]
    return Arranged(assign_ranks(micro_batches, ranks), left)


def grid_of_works(works: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """Works of each rank's micro-batches, in order, as assign_ranks would deal them."""
    grid = assign_ranks([MicroBatch((), work) for work in works], ranks)
    return [[one.work for one in column] for column in zip(*grid, strict=True)]


def step_of(columns: Sequence[Sequence[int]], law: StepLaw) -> int:
    return law.step(columns)


def _rough(count: int, work: int, largest: int, law: StepLaw) -> int:
    each = law.occupied(work // count)
    return count * each + law.fill(max(law.occupied(largest), each))
