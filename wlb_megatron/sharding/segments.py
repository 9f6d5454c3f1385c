"""The shard plan of one micro-batch: for each context-parallel rank, the segments it holds, in order.

A segment is tokens [start, end) of one of the micro-batch's pieces; it attends to that piece's keys [0, end)
with a causal mask. Any way of cutting is a way of making segments, and one executor runs them all.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    lengths: IntArray
    ranks: tuple[IntArray, ...]

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
    raise NotImplementedError


def validate(plan: ShardPlan) -> None:
    """Raise ValueError unless every token of every piece is on exactly one rank, once, and no rows touch."""
    raise NotImplementedError


def _ranges(starts: IntArray, ends: IntArray) -> IntArray:
    """Concatenation of range(start, end): starts [0, 3], ends [2, 6] give [0, 1, 3, 4, 5]."""
    sizes = ends - starts
    total = int(sizes.sum())
    before = np.cumsum(sizes) - sizes
    return np.arange(total, dtype=np.int64) + np.repeat(starts - before, sizes)
