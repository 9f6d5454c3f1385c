"""Which keys and values travel between context-parallel ranks, and where each rank stores them.

For each piece, a rank needs the keys before its last segment. Its diagonals read its own keys. A piece that one rank
holds whole sends nothing, because no other rank needs its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in the exchange of one micro-batch.

    * rank: which rank. send_rows: int64[s], the rows that it sends, as indices into the rows that it holds
      (ShardPlan.held_keys), ordered by receiver.
    * send_counts, recv_counts: rows to and from each rank; 0 for the rank itself.
    * place: int64[n], the source of row i of the key buffer. If place[i] >= 0, it is that row of those that the rank
      holds; else it is row ~place[i] (-1 - place[i]) of all that arrives, ordered by sender.
    * remote: whether any rank sends anything to another. If not, no rank communicates.
    """

    rank: int
    send_rows: IntArray
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    place: IntArray
    remote: bool


def exchange_plan(plan: ShardPlan, rank: int, reaches: Sequence[IntArray], buffer: IntArray) -> ExchangePlan:
    """The part of `rank` in the exchange.

    reaches: for each rank, int64[pieces], how many first keys of each piece it needs. buffer: int64[n], the keys that
    `rank` needs, numbered as in ShardPlan.key_index, in the order in which it wants them.

    Example: pieces [4]; rank 0 holds (0, 0, 1) (0, 3, 4), rank 1 (0, 1, 3); rank 0 needs 3 tokens, rank 1 needs 1.
    Rank 0 sends row 0 to rank 1. Rank 1 sends rows 0, 1 to rank 0, whose buffer is its own row 0, then both.
    """
    held_rows = [plan.held_keys(holder) for holder in range(plan.cp_size)]
    sent_rows = [_rows_within(held_rows[rank], reach) for reach in reaches]
    arrived = [_keys_within(plan, rows, reaches[rank]) for rows in held_rows]
    comes_from = np.empty(plan.key_starts[-1], dtype=np.int64)
    comes_from[arrived[rank]] = sent_rows[rank]
    sent_rows[rank] = arrived[rank] = sent_rows[rank][:0]
    remote_index = np.concatenate(arrived)
    comes_from[remote_index] = ~np.arange(len(remote_index))
    needed_keys = sum(int(reach.sum()) for reach in reaches)
    at_home = sum(int(_inside(rows, reach).sum()) for rows, reach in zip(held_rows, reaches, strict=True))
    return _part(rank, sent_rows, map(len, arrived), comes_from[buffer], needed_keys > at_home)


def _inside(rows: IntArray, reach: IntArray) -> IntArray:
    """int64[k]: how many first tokens of each segment are among its piece's first reach[piece] tokens."""
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
    """The part of `rank` if each rank wants any keys, in any order and any number of times.

    `buffers` has for each rank, int64[n], the keys it wants, numbered as in ShardPlan.key_index. The layers' `window`
    decides which ranks hold keys of prefixes.

    Example: tokens [0, 1] on rank 0 and [2, 3] on rank 1; rank 0 wants 1 2 1. Rank 1 sends it row 0. Rank 0's buffer
    is its own row 1, the row that arrived, and row 1 again.
    """
    owner, local = np.empty((2, plan.key_starts[-1]), dtype=np.int64)
    for holder in range(plan.cp_size):
        index = plan.key_index(plan.held_keys(holder, window))
        owner[index], local[index] = holder, np.arange(len(index))
    owners = [owner[tokens] for tokens in buffers]
    elsewhere = [holders != wanting for wanting, holders in enumerate(owners)]
    place = local[buffers[rank]]
    arriving = np.flatnonzero(elsewhere[rank])
    place[arriving[np.argsort(owners[rank][arriving], kind="stable")]] = ~np.arange(len(arriving))
    sent_rows = [
        local[tokens[(holders == rank) & away]]
        for tokens, holders, away in zip(buffers, owners, elsewhere, strict=True)
    ]
    received = np.bincount(owners[rank][arriving], minlength=plan.cp_size).tolist()
    return _part(rank, sent_rows, received, place, any(bool(away.any()) for away in elsewhere))


def _part(
    rank: int, sent_rows: Sequence[IntArray], received: Iterable[int], place: IntArray, remote: bool
) -> ExchangePlan:
    return ExchangePlan(
        rank, np.concatenate(sent_rows), tuple(map(len, sent_rows)), tuple(received), place, remote
    )
