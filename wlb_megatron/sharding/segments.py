"""The shard plan of one micro-batch: for each context-parallel rank, the segments it holds, in order.

A segment is tokens [start, end) of one of the micro-batch's pieces; it attends to that piece's keys [0, end)
with a causal mask. Any way of cutting is a way of making segments, and one executor runs them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardPlan:
    """Segments of one micro-batch by rank.

    lengths: int64[n], tokens of each piece in packed order, the padding piece (if any) last.
    ranks: one int64[k, 3] per CP rank, rows (piece index, start, end), in the order in which the rank
        holds its tokens. No two rows of a rank touch (see `merge_touching`).
    one_call: whether one kernel call serves all segments of a rank (one_call.py), instead of two.
    kind: how it was cut, where that was chosen for this micro-batch; for reports alone.
    """

    lengths: IntArray
    ranks: tuple[IntArray, ...]
    one_call: bool = False
    kind: str = field(default="", compare=False)

    @property
    def cp_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def piece_starts(self) -> IntArray:
        """int64[n + 1]: where each piece starts in the packed sequence; the last entry is the total."""
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return int(self.piece_starts[-1])

    @cached_property
    def tokens_per_rank(self) -> tuple[int, ...]:
        return tuple(int((rows[:, 2] - rows[:, 1]).sum()) for rows in self.ranks)

    def positions(self, rank: int) -> IntArray:
        """int64[t]: position inside its piece of each token the rank holds, in the order it holds them.

        Segments (0, 0, 2), (1, 3, 6) give [0, 1, 3, 4, 5].
        """
        rows = self.ranks[rank]
        return _ranges(rows[:, 1], rows[:, 2])

    def packed_index(self, rank: int) -> IntArray:
        """int64[t]: index in the packed sequence of each token the rank holds, in the order it holds them.

        With pieces of 4 and 6 tokens, segments (0, 0, 2), (1, 3, 6) give [0, 1, 7, 8, 9].
        """
        rows = self.ranks[rank]
        starts = self.piece_starts[rows[:, 0]]
        return _ranges(starts + rows[:, 1], starts + rows[:, 2])


def merge_touching(rows: IntArray) -> IntArray:
    """Rows in the given order, each merged into an earlier row of its piece that it continues (or precedes).

    [(0, 0, 2), (1, 0, 1), (0, 2, 4)] becomes [(0, 0, 4), (1, 0, 1)]. Empty rows are dropped.
    """
    rows = rows[rows[:, 1] < rows[:, 2]]
    if len(rows) < 2:
        return rows
    # Side by side by (piece, start), a row opens a group unless it begins where the row before it ends;
    # the group stands where its earliest row stood.
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    ordered = rows[order]
    opens = np.ones(len(rows), dtype=bool)
    opens[1:] = (ordered[1:, 0] != ordered[:-1, 0]) | (ordered[1:, 1] != ordered[:-1, 2])
    heads = np.flatnonzero(opens)
    tails = np.append(heads[1:], len(rows)) - 1
    merged = np.column_stack((ordered[heads, 0], ordered[heads, 1], ordered[tails, 2]))
    return merged[np.argsort(np.minimum.reduceat(order, heads))]


def validate(plan: ShardPlan) -> None:
    """Raise ValueError unless every token of every piece is on exactly one rank, once, and no rows touch."""
    pieces = len(plan.lengths)
    for rank, rows in enumerate(plan.ranks):
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise ValueError(
                f"rank {rank}: segments must be rows (piece, start, end), got shape {rows.shape}"
            )
        if not ((rows[:, 0] >= 0) & (rows[:, 0] < pieces)).all():
            raise ValueError(f"rank {rank}: a segment names a piece outside 0..{pieces - 1}")
        inside = (rows[:, 1] >= 0) & (rows[:, 1] < rows[:, 2]) & (rows[:, 2] <= plan.lengths[rows[:, 0]])
        if not inside.all():
            piece, start, end = rows[np.argmin(inside)]
            raise ValueError(f"rank {rank}: segment [{start}, {end}) is empty or outside piece {piece}")
        if len(merge_touching(rows)) != len(rows):
            raise ValueError(f"rank {rank}: segments of one piece touch; merge them with merge_touching")
    rows = np.concatenate(plan.ranks)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    # In order, the segments must lay the packed sequence end to end: each begins where the one before ends.
    begins = plan.piece_starts[rows[:, 0]] + rows[:, 1]
    expected = np.concatenate(([0], np.cumsum(rows[:, 2] - rows[:, 1])))
    if (begins != expected[:-1]).any():
        at = int(np.argmax(begins != expected[:-1]))
        what = "twice" if begins[at] < expected[at] else "not at all"
        token = min(int(begins[at]), int(expected[at]))
        raise ValueError(f"packed token {token} is held {what}; each must be on one rank, once")
    if expected[-1] != plan.tokens:
        raise ValueError(
            f"packed token {int(expected[-1])} is held not at all; each must be on one rank, once"
        )


def _ranges(starts: IntArray, ends: IntArray) -> IntArray:
    """Concatenation of range(start, end): starts [0, 3], ends [2, 6] give [0, 1, 3, 4, 5]."""
    sizes = ends - starts
    total = int(sizes.sum())
    before = np.cumsum(sizes) - sizes
    return np.arange(total, dtype=np.int64) + np.repeat(starts - before, sizes)
