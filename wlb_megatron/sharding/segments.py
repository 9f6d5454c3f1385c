"""The shard plan of one micro-batch: the segments that each context-parallel rank holds, in order.

A segment is tokens [start, end) of one of the micro-batch's pieces. It attends to that piece's keys [0, end) with a
causal mask. Every sharding produces segments, and one executor runs them all.

A piece with a prefix of p tokens holds tokens [p, p + length) of its document, counted from the prefix's first token.
Its keys [0, p) belong to earlier micro-batches (cut.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunks:
    """What a micro-batch shares with others of its iteration, if documents are in chunks.

    * micro_batch: its index among those of its data-parallel rank.
    * prefixes: int64[n], earlier tokens of its document that each piece attends to.
    * cached: one int64[k, 6] per CP rank, the keys of prefixes that it holds: rows (piece index, start, end,
      micro-batch, piece index there, end of that piece). Rows of one earlier piece are adjacent, in the order in
      which the rank holds them there. Over all ranks, the rows of a piece tile [0, prefix).
    * rests: int64[n], later tokens of its document that attend to each piece.
    """

    micro_batch: int
    prefixes: IntArray
    cached: tuple[IntArray, ...]
    rests: IntArray

    @property
    def continued(self) -> IntArray:
        """int64[c], ascending: pieces to which later micro-batches attend."""
        return np.flatnonzero(self.rests)


@dataclass(frozen=True)
class ShardPlan:
    """Segments of one micro-batch by rank.

    * lengths: int64[n], tokens of each piece in packed order, the padding piece (if any) last, without prefixes.
    * ranks: one int64[k, 3] per CP rank, rows (piece index, start, end), in the order in which the rank holds its
      tokens. No two rows of a rank touch: [0, 2) and [2, 4) of a piece are
      one row.
    * one_call: one kernel call computes all segments of a rank (cut.in_fewest_calls), instead of two.
    * kind: the sharding, if it was chosen for this micro-batch; only for reports.
    * chunks: None if it shares no document with another micro-batch.
    """

    lengths: IntArray
    ranks: tuple[IntArray, ...]
    one_call: bool = False
    kind: str = field(default="", compare=False)
    chunks: Chunks | None = None

    @property
    def cp_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def prefixes(self) -> IntArray:
        """int64[n]: earlier tokens of its document that each piece attends to."""
        return np.zeros_like(self.lengths) if self.chunks is None else self.chunks.prefixes

    @cached_property
    def rests(self) -> IntArray:
        """int64[n]: later tokens of its document that attend to each piece."""
        return np.zeros_like(self.lengths) if self.chunks is None else self.chunks.rests

    @cached_property
    def piece_starts(self) -> IntArray:
        """int64[n + 1]: where each piece starts in the packed sequence; the last entry is the total."""
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)

    @cached_property
    def key_starts(self) -> IntArray:
        """int64[n + 1]: where each piece's keys start if all keys are laid end to end, prefixes included; last the
        total.
        """
        return np.concatenate(([0], np.cumsum(self.prefixes + self.lengths))).astype(np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return int(self.piece_starts[-1])

    @cached_property
    def tokens_per_rank(self) -> tuple[int, ...]:
        return tuple(int((rows[:, 2] - rows[:, 1]).sum()) for rows in self.ranks)

    def positions(self, rank: int) -> IntArray:
        """int64[t]: the position of each token that the rank holds, in the rank's order.

        A position counts from the first token of the piece's prefix. Example: segments (0, 0, 2), (1, 3, 6) give [0,
        1, 3, 4, 5].
        """
        rows = self.ranks[rank]
        return _ranges(rows[:, 1], rows[:, 2])

    def packed_index(self, rank: int) -> IntArray:
        """int64[t]: the index in the packed sequence of each token that the rank holds, in the rank's order.

        Example: with pieces of 4 and 6 tokens, segments (0, 0, 2), (1, 3, 6) give [0, 1, 7, 8, 9].
        """
        rows = self.ranks[rank]
        starts = (self.piece_starts[:-1] - self.prefixes)[rows[:, 0]]
        return _ranges(starts + rows[:, 1], starts + rows[:, 2])

    def cached(self, rank: int, window: int | None = None) -> IntArray:
        """int64[k, 6]: the rows of Chunks.cached whose keys are needed by layers with this window (None: without
        one).
        """
        if self.chunks is None:
            return np.empty((0, 6), dtype=np.int64)
        rows = self.chunks.cached[rank]
        if window is None:
            return rows
        rows = rows[rows[:, 5] > self.prefixes[rows[:, 0]] - window]
        # The first query that may attend to kept keys is the one after the end of the piece.
        rows[:, 1] = np.maximum(rows[:, 1], rows[:, 5] - window)
        return rows[rows[:, 1] < rows[:, 2]]

    def held_keys(self, rank: int, window: int | None = None) -> IntArray:
        """int64[k, 3]: rows (piece index, start, end) of all keys that the rank holds: of its tokens, then cached
        ones.
        """
        return np.concatenate((self.ranks[rank], self.cached(rank, window)[:, :3]))

    def key_index(self, rows: IntArray) -> IntArray:
        """int64[k]: the index of the keys of rows (piece index, start, end, ..) if all keys are laid end to end."""
        starts = self.key_starts[rows[:, 0]]
        return _ranges(starts + rows[:, 1], starts + rows[:, 2])


def _ranges(starts: IntArray, ends: IntArray) -> IntArray:
    """Concatenation of range(start, end): starts [0, 3], ends [2, 6] give [0, 1, 3, 4, 5]."""
    sizes = ends - starts
    total = int(sizes.sum())
    before = np.cumsum(sizes) - sizes
    return np.arange(total, dtype=np.int64) + np.repeat(starts - before, sizes)
