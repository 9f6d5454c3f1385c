"""Which tokens' keys and values travel between context-parallel ranks, and where they land.

A rank needs, of each piece, the keys before its last segment; its diagonals read its own. Pieces that lie whole on
one rank are needed by nobody else, so they send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in the exchange of one micro-batch.

    send_rows: int64[s], rows it sends of those that it holds (ShardPlan.held_keys), by receiver, rank 0's first (itself
        included: its own earlier rows come the same way). send_counts, recv_counts: rows to and from each rank.
    place: int64[n], row i of the key buffer is row place[i] of all that arrives, rank 0's first.
    remote: whether any rank sends anything to another; where not, no rank communicates, and send_rows are in the key
        buffer's order already.
    """

    send_rows: IntArray
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    place: IntArray
    remote: bool


def exchange_plan(plan: ShardPlan, rank: int, reaches: Sequence[IntArray], buffer: IntArray) -> ExchangePlan:
    """The part of `rank`.

    reaches: for each rank, int64[pieces], how many first keys of each piece it needs. buffer: int64[n], the keys that
    `rank` needs, as ShardPlan.key_index counts them, in the order in which it wants them.

    Pieces [4], rank 0 holds (0, 0, 1) (0, 3, 4), rank 1 (0, 1, 3); rank 0 needs 3 tokens, rank 1 needs 1.
    Rank 0 sends row 0 to itself and to rank 1; rank 1 sends rows 0, 1 to rank 0.
    """
    held = [plan.held_keys(holder) for holder in range(plan.cp_size)]
    sent = [_rows_within(held[rank], reach) for reach in reaches]
    arrived = [_keys_within(plan, rows, reaches[rank]) for rows in held]
    arrival = np.empty(plan.key_starts[-1], dtype=np.int64)
    keys = np.concatenate(arrived)
    arrival[keys] = np.arange(len(keys))
    needed = sum(int(reach.sum()) for reach in reaches)
    at_home = sum(int(_inside(rows, reach).sum()) for rows, reach in zip(held, reaches, strict=True))
    return _in_order(sent, map(len, arrived), arrival[buffer], needed > at_home)


def _inside(rows: IntArray, reach: IntArray) -> IntArray:
    """int64[k]: how many first tokens of each segment lie in its piece's first reach[piece] tokens."""
    return np.clip(reach[rows[:, 0]] - rows[:, 1], 0, rows[:, 2] - rows[:, 1])


def _rows_within(rows: IntArray, reach: IntArray) -> IntArray:
    size = rows[:, 2] - rows[:, 1]
    local = np.cumsum(size) - size
    return _ranges(local, local + _inside(rows, reach))


def _keys_within(plan: ShardPlan, rows: IntArray, reach: IntArray) -> IntArray:
    first = plan.key_starts[rows[:, 0]] + rows[:, 1]
    return _ranges(first, first + _inside(rows, reach))


def exchange_buffers(
    plan: ShardPlan, rank: int, buffers: Sequence[IntArray], window: int | None = None
) -> ExchangePlan:
    """The part of `rank` where each rank wants any keys, in any order and as often as it likes.

    buffers: for each rank, int64[n], the keys it wants, as ShardPlan.key_index counts them. window: of the layers, by
    which ranks hold keys of prefixes. Tokens [0, 1] on rank 0 and [2, 3] on rank 1; rank 0 wants 1 2 1: it sends rows
    1 1 to itself, rank 1 sends it row 0, and buffer rows 0 1 2 are arrivals 0 2 1.
    """
    owner, local = np.empty((2, plan.key_starts[-1]), dtype=np.int64)
    for holder in range(plan.cp_size):
        index = plan.key_index(plan.held_keys(holder, window))
        owner[index], local[index] = holder, np.arange(len(index))
    owners = [owner[tokens] for tokens in buffers]
    place = np.empty(len(buffers[rank]), dtype=np.int64)
    place[np.argsort(owners[rank], kind="stable")] = np.arange(len(place))
    sent = [local[tokens[held == rank]] for tokens, held in zip(buffers, owners, strict=True)]
    received = np.bincount(owners[rank], minlength=plan.cp_size).tolist()
    remote = any(bool((held != wanting).any()) for wanting, held in enumerate(owners))
    return _in_order(sent, received, place, remote)


def _in_order(
    sent: Sequence[IntArray], received: Iterable[int], place: IntArray, remote: bool
) -> ExchangePlan:
    rows = np.concatenate(sent)
    if not remote:
        rows, place = rows[place], np.arange(len(place))
    return ExchangePlan(rows, tuple(map(len, sent)), tuple(received), place, remote)
