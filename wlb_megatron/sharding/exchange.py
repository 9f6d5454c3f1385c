"""Which tokens' keys and values travel between context-parallel ranks, and where they land.

A rank needs, of each piece, a prefix: the keys its segments see but its own diagonals do not cover. Pieces that
lie whole on one rank are in nobody's prefix, so they send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in the exchange of one micro-batch.

    send_rows: int64[s], local rows it sends, by receiver, rank 0's first (itself included: its own rows of a
        prefix come the same way). send_counts, recv_counts: rows to and from each rank.
    place: int64[n], row i of the key buffer is row place[i] of all that arrives, rank 0's first.
    key_starts: int64[pieces], row of each piece's first key in the buffer; its prefix lies there in order.
    remote: whether any rank sends anything to another; where not, no rank communicates.
    """

    send_rows: IntArray
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    place: IntArray
    key_starts: IntArray
    remote: bool

    @property
    def buffer_rows(self) -> int:
        return len(self.place)


def exchange_plan(plan: ShardPlan, rank: int, reaches: Sequence[IntArray]) -> ExchangePlan:
    """The part of `rank`. reaches: for each rank, int64[pieces], tokens of each piece's prefix that it needs.

    Pieces [4], rank 0 holds (0, 0, 1) (0, 3, 4), rank 1 (0, 1, 3); rank 0 needs 3 tokens, rank 1 needs 1.
    Rank 0 sends row 0 to itself and to rank 1; rank 1 sends rows 0, 1 to rank 0, whose buffer is then
    [its row 0, rank 1's rows 0, 1].
    """
    buffer_starts = np.cumsum(reaches[rank]) - reaches[rank]
    sent = [_rows_within(plan.ranks[rank], reach)[0] for reach in reaches]
    arrived = []
    for rows in plan.ranks:
        _, pieces, positions = _rows_within(rows, reaches[rank])
        arrived.append(buffer_starts[pieces] + positions)
    lands = np.concatenate(arrived)
    place = np.empty(len(lands), dtype=np.int64)
    place[lands] = np.arange(len(lands))
    return ExchangePlan(
        np.concatenate(sent),
        tuple(map(len, sent)),
        tuple(map(len, arrived)),
        place,
        buffer_starts,
        _anything_travels(plan, reaches),
    )


def _rows_within(rows: IntArray, reach: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Local row, piece and position of each token of `rows` that lies in its piece's first reach[piece] tokens."""
    piece, start, end = rows[:, 0], rows[:, 1], rows[:, 2]
    local = np.cumsum(end - start) - (end - start)
    inside = np.clip(reach[piece] - start, 0, end - start)
    return _ranges(local, local + inside), np.repeat(piece, inside), _ranges(start, start + inside)


def _anything_travels(plan: ShardPlan, reaches: Sequence[IntArray]) -> bool:
    for receiver, reach in enumerate(reaches):
        own = np.zeros(len(plan.lengths), dtype=np.int64)
        piece, start, end = plan.ranks[receiver].T
        np.add.at(own, piece, np.clip(reach[piece] - start, 0, end - start))
        if (own < reach).any():
            return True
    return False
