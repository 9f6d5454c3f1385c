"""Predicts each rank's attention time under a shard plan, as the executor runs it (attention_calls.py).

All diagonals of a rank are one call on its own keys, while the other keys travel. All its rectangles are another
call. If the plan says so, one call computes everything (cut.in_fewest_calls).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable

ONE_CALL = 0.7
"""Share of the executor's work around a call on earlier keys (KernelTable.second_call) that one call for everything
also needs. It gathers keys and returns their gradients, but merges no output. From 348 shares of windows of 32K on an
H200 with cuDNN, where second_call is 110 us: one call took 75 us longer than predicted without it
(docs/results/1x_h200/fa4)."""


def predict(plan: ShardPlan, table: KernelTable) -> IntArray:
    """int64[cp]: nanoseconds, forward + backward, of one layer's attention and exposed exchange on each rank."""
    return predict_all([plan], table)[0]


def predict_all(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """int64[plans, cp]: the predictions of plans of one CP size, in nanoseconds, in one pass. See `predict`."""
    times = in_two_calls(plans, table)
    one_call = [index for index, plan in enumerate(plans) if plan.one_call]
    if one_call:
        times[one_call] = in_one_call([plans[index] for index in one_call], table)
    return times


def in_two_calls(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """As predict_all, as if no plan used one call."""
    rank, piece, start, end, opens = _segments(plans)
    size, ranks = end - start, sum(plan.cp_size for plan in plans)
    diagonal = _per_rank(rank, table.diagonal_ns(size), ranks) + table.call
    longest_segment = np.zeros(ranks)
    np.maximum.at(longest_segment, rank, size)
    diagonal = np.maximum(diagonal, table.call + table.tile_key * longest_segment)
    cached = _cached(plans, rank, piece)
    exchange = _exchange(rank, start, size, opens, cached, ranks, table)
    exposed = np.maximum(exchange - diagonal, 0.0)
    total = diagonal + exposed + _rectangles(rank, start, size, opens, ranks, table)
    return np.rint(total).astype(np.int64).reshape(len(plans), -1)


def in_one_call(plans: Sequence[ShardPlan], table: KernelTable) -> IntArray:
    """As predict_all, as if one bottom-right call computed each rank's segments, with all of the exchange exposed."""
    rank, piece, start, end, opens = _segments(plans)
    # A segment attends to keys [0, end). The rank holds this segment and the piece's earlier ones: (0, 0, 2) (0, 6, 8)
    # attend to 2 and 8 keys, and hold 2 and 4.
    held_keys = np.cumsum(end - start)
    firsts = np.flatnonzero(opens)
    before = held_keys[firsts] - (end - start)[firsts]
    held_keys -= np.repeat(before, np.diff(np.append(firsts, len(rank)))) - _cached(plans, rank, piece)
    ranks = sum(plan.cp_size for plan in plans)
    remote, keys, kernel_ns = (
        _per_rank(rank, values, ranks)
        for values in (end - held_keys, end, table.bottom_right_ns(end - start, end))
    )
    kernel_ns += table.moved_key * keys
    exchange = np.where(remote > 0, table.exchange + table.exchange_row * remote, 0.0)
    call_ns = table.call + ONE_CALL * table.second_call
    return np.rint(call_ns + kernel_ns + exchange).astype(np.int64).reshape(len(plans), -1)


def _segments(
    plans: Sequence[ShardPlan],
) -> tuple[IntArray, IntArray, IntArray, IntArray, npt.NDArray[np.bool_]]:
    """Of each segment int64[n] rank (counted through all plans), piece, start and end, and whether it is its rank's
    first of the piece. A rank's segments of one piece are adjacent, in the piece's order."""
    counts = [len(rows) for plan in plans for rows in plan.ranks]
    rows = np.concatenate([rows for plan in plans for rows in plan.ranks])
    rank = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((rows[:, 1], rows[:, 0], rank))
    rank, piece, start, end = rank[order], *rows[order].T
    opens = np.ones(len(rank), dtype=bool)
    opens[1:] = (rank[1:] != rank[:-1]) | (piece[1:] != piece[:-1])
    return rank, piece, start, end, opens


def _rectangles(
    rank: IntArray, start: IntArray, size: IntArray, opens: np.ndarray, ranks: int, table: KernelTable
) -> np.ndarray:
    """float64[ranks]: nanoseconds of the call on earlier keys: one rectangle per run of keys between a piece's
    segments.
    """
    with_earlier = np.flatnonzero(start > 0)
    if not len(with_earlier):
        return np.zeros(ranks)
    # A segment at 0 is its piece's first; it has no rectangle, so the next one opens the piece.
    opens = opens[with_earlier] | (start[with_earlier - 1] == 0)
    rank, start, size = rank[with_earlier], start[with_earlier], size[with_earlier]
    keys = start - np.where(opens, 0, np.concatenate(([0], start[:-1])))
    # All segments of the piece from this one on are the queries.
    heads = np.flatnonzero(opens)
    tails = np.repeat(np.append(heads[1:], len(rank)), np.diff(np.append(heads, len(rank))))
    before = np.concatenate(([0], np.cumsum(size)))
    queries = before[tails] - before[:-1]
    kernel_ns = _per_rank(rank, table.rectangle_ns(queries, keys), ranks)
    # A call's forward takes at least its longest tile.
    longest_keys = np.zeros(ranks)
    np.maximum.at(longest_keys, rank, keys)
    waits = np.maximum(table.tile_key * longest_keys - kernel_ns * table.forward_share, 0.0)
    return np.where(longest_keys > 0, kernel_ns + waits + table.earlier_call, 0.0)


def _exchange(
    rank: IntArray,
    start: IntArray,
    size: IntArray,
    opens: np.ndarray,
    cached: IntArray,
    ranks: int,
    table: KernelTable,
) -> np.ndarray:
    """float64[ranks]: nanoseconds to fetch keys from other ranks and return their gradients.

    For each piece, a rank needs the keys before its last segment. It already has its own earlier segments and the
    cached keys. Example: segments [0, 2) and [6, 8) need 6 keys and have 2.
    """
    firsts = np.flatnonzero(opens)
    lasts = np.append(firsts[1:], len(rank)) - 1
    own_keys = np.add.reduceat(size, firsts) - size[lasts] + cached[lasts] if len(firsts) else firsts
    remote = _per_rank(rank[lasts], (start[lasts] - own_keys).astype(np.float64), ranks)
    return np.where(remote > 0, table.exchange + table.exchange_row * remote, 0.0)


def _cached(plans: Sequence[ShardPlan], rank: IntArray, piece: IntArray) -> IntArray:
    """int64[n]: keys of its prefix that the rank of each segment has of the segment's piece.

    rank: the segment's, counted through all plans.
    """
    none = np.zeros_like(rank)
    if all(plan.chunks is None for plan in plans):
        return none
    width = max(len(plan.lengths) for plan in plans)
    held_keys = np.zeros(sum(plan.cp_size for plan in plans) * width, dtype=np.int64)
    first = 0
    for plan in plans:
        for rows in () if plan.chunks is None else plan.chunks.cached:
            np.add.at(held_keys, first * width + rows[:, 0], rows[:, 2] - rows[:, 1])
            first += 1
        first += plan.cp_size if plan.chunks is None else 0
    return held_keys[rank * width + piece]


def _per_rank(rank: IntArray, values: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(rank, weights=values, minlength=ranks)
