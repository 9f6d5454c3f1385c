"""Packs an iteration's documents into the number of micro-batches with the least predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from wlb_megatron.packing.chunks.chunked import Filled
from wlb_megatron.packing.packer import Grid, Ranks
from wlb_megatron.packing.varlen.assign import assign_ranks
from wlb_megatron.packing.varlen.bins import Bins, improve_bins
from wlb_megatron.packing.varlen.delay_bound import Limits
from wlb_megatron.packing.varlen.outlier_queues import Item
from wlb_megatron.pipeline.step_law import StepLaw
from wlb_megatron.plan import MicroBatch

_TOKENS = itemgetter(1)  # of items; faster than access by name

TRIED = 3
"""How many numbers of micro-batches are packed and simulated; a rough estimate chooses them."""

Fill = Callable[[int], tuple[Bins, list[Item]]]
"""Returns that many bins with everything that trains, and what did not fit."""


class Arranged(NamedTuple):
    grid: Grid
    left: list[Item]


def arrange(
    fill: Fill, counts: Sequence[int], lot: tuple[int, int, int], limits: Limits, ranks: Ranks, law: StepLaw
) -> Arranged:
    """The grid with the least predicted step, over numbers counts[i] of micro-batches per rank.

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
        excess = max(0, most_held(grid, law) - token_limit)
        price = sum(item.work for item in left_out), excess, law.step(*_works_and_tokens(grid))
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
    if most_held(grid, law) > token_limit and fitting_counts != one_per_window:
        return arrange(fill, one_per_window, lot, limits, ranks, law)
    return Arranged(tuple(tuple(bin_.micro_batch() for bin_ in row) for row in grid), left_out)


def most_held(grid: Sequence[Sequence[Filled | MicroBatch]], law: StepLaw) -> int:
    """The most tokens, without padding, of consecutive micro-batches that a rank's first stage holds at once.

    Example: 2 stages, tokens 5 3 4: 8.
    """
    at_once, peak = law.held_at_once, 0
    for column in zip(*grid, strict=True):
        tokens = [micro_batch.tokens for micro_batch in column]
        peak = max(
            peak,
            *(sum(tokens[begin : begin + at_once]) for begin in range(max(1, len(tokens) - at_once + 1))),
        )
    return peak


def _works_and_tokens(
    grid: Sequence[Sequence[Filled]],
) -> tuple[list[list[int]], None, list[list[int]]]:
    """Of each rank's micro-batches; between them the groups, of which whole documents have none."""
    columns = list(zip(*grid, strict=True))
    return (
        [[bin_.work for bin_ in column] for column in columns],
        None,
        [[bin_.tokens for bin_ in column] for column in columns],
    )
