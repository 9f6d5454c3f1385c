"""Pads micro-batches and turns cut points into shard plans, for all micro-batches of an iteration in one pass.

A micro-batch fills 2 * CP slots. Context-parallel rank i holds slots i and 2 * CP - 1 - i, so under a causal mask
every rank has an early and a late share.

Per-sequence and per-document sharding differ only in where they cut each piece into 2 * CP chunks, one per slot. An
iteration of a large job has tens of micro-batches of tens of documents. numpy's cost is per call, so all are planned
together: one list of pieces, and the index at which each micro-batch starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable


def multiple(cp_size: int, tp_size: int = 1, rows: int = 1) -> int:
    """The number of which a micro-batch's tokens must be a multiple: CP x TP x rows.

    A rank's GEMMs need `rows` (1; 16 with FP8, 32 with MXFP8). TP counts because sequence parallelism divides a
    context-parallel rank's tokens once more.
    """
    return cp_size * tp_size * rows


def padding(tokens: int, multiple: int) -> int:
    """Padding tokens that make `tokens` a multiple of `multiple`: 13 to a multiple of 8 needs 3.

    An empty micro-batch gets one whole multiple, so that every rank has a token.
    """
    return multiple if tokens == 0 else -tokens % multiple


def padded(lengths: Sequence[int] | IntArray, multiple: int) -> IntArray:
    """int64[n]: the lengths (tokens), with the padding last if their sum needs any.

    Example: [7, 4] to a multiple of 8 is [7, 4, 5].
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    missing = padding(int(tokens.sum()), multiple)
    return np.append(tokens, missing) if missing else tokens


def slot_bounds(tokens: npt.ArrayLike, cp_size: int) -> IntArray:
    """int64[..., 2 * CP + 1]: where each slot starts in a sequence of `tokens` tokens; the last entry is the end.

    Slot s holds tokens // 2CP, plus one if s < tokens mod 2CP (which is 0 or CP). Example: 12 tokens, CP=4: slots of
    2 2 2 2 1 1 1 1 give [0, 2, 4, 6, 8, 9, 10, 11, 12]; ranks (0, 7), (1, 6), (2, 5), (3, 4) hold 3 each.

    Raises ValueError if tokens is not a positive multiple of CP.
    """
    totals = np.asarray(tokens, dtype=np.int64)
    is_wrong = (totals <= 0) | (totals % cp_size != 0)
    if is_wrong.any():
        bad = int(totals[is_wrong][0])
        raise ValueError(
            f"{bad} tokens cannot be cut evenly over {cp_size} context-parallel ranks: "
            f"add a last piece of {padding(max(bad, 0), cp_size)} padding tokens"
        )
    base, extra = np.divmod(totals[..., None], 2 * cp_size)
    slots = np.arange(2 * cp_size + 1)
    return slots * base + np.minimum(slots, extra)


@dataclass(frozen=True)
class PieceList:
    """Pieces of m micro-batches, end to end: n pieces in all.

    lengths: int64[n], tokens of each piece. prefixes: int64[n], earlier tokens that it attends to. first: int64[m +
    1], index of each micro-batch's first piece; the last entry is n. owner: int64[n], micro-batch of each piece.
    """

    lengths: IntArray
    prefixes: IntArray
    first: IntArray
    owner: IntArray

    @staticmethod
    def of(micro_batches: Sequence[npt.ArrayLike], prefixes: Sequence[IntArray] | None = None) -> PieceList:
        """The list, from the lengths of each micro-batch's pieces and their prefixes (default none), in tokens."""
        arrays = [np.asarray(lengths, dtype=np.int64) for lengths in micro_batches]
        lengths = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
        counts = np.array([len(array) for array in arrays], dtype=np.int64)
        first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        before = np.concatenate(prefixes) if prefixes else np.zeros_like(lengths)
        return PieceList(lengths, before, first, np.repeat(np.arange(len(arrays)), counts))

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(self.first) - 1

    def before(self, values: IntArray) -> IntArray:
        """int64[n]: sum of `values` over the earlier pieces of the same micro-batch."""
        running = np.concatenate(([0], np.cumsum(values)))
        return running[:-1] - running[self.first[:-1]][self.owner]

    def totals(self) -> IntArray:
        """int64[m]: tokens of each micro-batch."""
        running = np.concatenate(([0], np.cumsum(self.lengths)))
        return running[self.first[1:]] - running[self.first[:-1]]


def deal(pieces: PieceList, cuts: IntArray) -> list[ShardPlan]:
    """The plan of each micro-batch, if tokens [cuts[p, s], cuts[p, s + 1]) of piece p go to slot s.

    cuts: int64[n, 2 * CP + 1], counted from the piece's first token. The prefix does not matter: work is even over
    pairs of slots with any prefix. Rank i holds the segments of slot i in piece order, then those of slot 2CP-1-i. If
    a piece's two chunks on a rank touch, they become one segment at the place of the first. That is always so on rank
    CP-1, whose slots are neighbors, and elsewhere if the chunks between them are empty. With one rank, it holds the
    pieces whole, in packed order.
    """
    cp_size = (cuts.shape[1] - 1) // 2
    early, early_end = cuts[:, :cp_size], cuts[:, 1 : cp_size + 1]
    late, late_end = cuts[:, -2 : cp_size - 1 : -1], cuts[:, :cp_size:-1]
    has_early, has_late = early < early_end, late < late_end
    touch = has_early & has_late & (early_end == late)
    # [piece, rank, half]
    starts = np.stack((early, late), axis=2)
    ends = np.stack((np.where(touch, late_end, early_end), late_end), axis=2)
    keep = np.stack((has_early, has_late & ~touch), axis=2)

    piece, rank, half = np.nonzero(keep)
    owner = pieces.owner[piece]
    share = owner * cp_size + rank
    key = share * 2 + (half if cp_size > 1 else 0)
    # numpy sorts 16-bit integers by radix, 20 times as fast as 64-bit ones
    order = np.argsort(key.astype(np.uint16) if key.max(initial=0) < 2**16 else key, kind="stable")
    rows = np.empty((len(order), 3), dtype=np.int64)
    before = pieces.prefixes[piece]
    for column, values in enumerate(
        (piece - pieces.first[owner], before + starts[keep], before + ends[keep])
    ):
        rows[:, column] = values[order]
    count = pieces.count
    bounds = np.concatenate(([0], np.cumsum(np.bincount(share, minlength=count * cp_size)))).tolist()
    shares = [rows[begin:end] for begin, end in pairwise(bounds)]
    first = pieces.first.tolist()
    return [
        ShardPlan(pieces.lengths[first[m] : first[m + 1]], tuple(shares[m * cp_size : (m + 1) * cp_size]))
        for m in range(count)
    ]


def per_document(pieces: PieceList, cp_size: int, table: KernelTable | None = None) -> list[ShardPlan]:
    """The plan of each micro-batch; the table does not matter.

    Example: lengths [5, 3], CP=2: piece 0 lengthens slot 0 (chunks 2 1 1 1), piece 1 slots 1, 2, 3 (chunks 0 1 1 1).
    Raises ValueError if a total is not a positive multiple of cp_size.
    """
    slot_bounds(pieces.totals(), cp_size)  # refuses totals that would leave ranks unequal
    slots = 2 * cp_size
    base, extra = np.divmod(pieces.lengths, slots)
    cursor = (pieces.before(extra) % slots)[:, None]
    base, extra = base[:, None], extra[:, None]
    chunk = np.arange(slots + 1)
    # Longer chunks are slots cursor .. cursor + extra - 1, modulo 2CP: how many of them lie before slot c?
    # With 8 slots, cursor 6, extra 3 (slots 6, 7, 0): before slot 1 one (slot 0, wrapped), before slot 7 two.
    longer_before = np.clip(chunk - cursor, 0, extra)
    wrapped = np.clip(cursor + extra - slots, 0, chunk)
    return deal(pieces, chunk * base + longer_before + wrapped)


def per_sequence(pieces: PieceList, cp_size: int, table: KernelTable | None = None) -> list[ShardPlan]:
    """The plan of each micro-batch; the table does not matter.

    Example: lengths [24, 8], CP=4: slots of 4 tokens; piece 1 is slots 6 and 7, held by ranks 1 and 0. Raises
    ValueError if a total is not a positive multiple of cp_size.
    """
    bounds = slot_bounds(pieces.totals(), cp_size)[pieces.owner]
    starts = pieces.before(pieces.lengths)
    return deal(pieces, np.clip(bounds - starts[:, None], 0, pieces.lengths[:, None]))
