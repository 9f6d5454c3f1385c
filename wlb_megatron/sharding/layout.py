"""What a rank's attention executor needs of a shard plan: queries, keys by offset, indices.

Every rank lays the keys it needs in document order once; each segment then reads its document's keys [0, end)
in place. A segment's queries are the last of those keys, so its mask is causal, aligned bottom-right. A call
never holds two segments of one document: no two of its segments share keys, so dK and dV are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.segments import IntArray, ShardPlan

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class CallLayout:
    """One attention call over b segments of b different pieces.

    q_index: the local rows of its queries, as (start, stop) where they are contiguous (a slice, no copy),
        else int64[cu_seqlens_q[-1]].
    cu_seqlens_q: int32[b + 1], bounds of the segments in those rows.
    cu_seqlens_kv: int32[b + 1], running sum of the keys each segment sees, which is the segment's end.
    kv_starts: int32[b + 1], row of each piece's first key in the key buffer; the last entry is the buffer's
        rows. (Transformer Engine's cu_seqlens_kv_padded.) Not always ascending: a piece too short for the
        first of the rank's slots comes after all that have one there.
    max_q, max_kv: largest segment and largest number of keys, in tokens.
    """

    q_index: tuple[int, int] | IntArray
    cu_seqlens_q: Int32Array
    cu_seqlens_kv: Int32Array
    kv_starts: Int32Array
    max_q: int
    max_kv: int


@dataclass(frozen=True)
class RankLayout:
    """One rank's share of a micro-batch.

    calls: as many as the largest number of segments one piece has on this rank.
    positions: int64[t], position inside its piece of each local token (for rotary embeddings).
    packed_index: int64[t], index of each local token in the packed sequence (for tokens, labels, masks).
    gather_order: int64[T]: row p of the key buffer, which is packed token p, is row gather_order[p] of all
        ranks' keys end to end, rank 0's first, each in its local order.
    tokens_per_rank: t of every rank.
    """

    calls: tuple[CallLayout, ...]
    positions: IntArray
    packed_index: IntArray
    gather_order: IntArray
    tokens_per_rank: tuple[int, ...]


def rank_layout(plan: ShardPlan, rank: int) -> RankLayout:
    """The layout of `rank`, 0 <= rank < plan.cp_size. Pure: the same on every rank that asks.

    Lengths [24, 8], CP=4, per-document, rank 0 holds (0, 0, 3) (1, 0, 1) (0, 21, 24) (1, 7, 8): two calls, of
    rows (0, 4) with keys 3 and 1, and of rows (4, 8) with keys 24 and 8; both with kv_starts [0, 24, 32].
    Raises ValueError where the micro-batch's tokens do not fit the kernels' int32 offsets.
    """
    if plan.tokens > np.iinfo(np.int32).max:
        raise ValueError(
            f"a micro-batch of {plan.tokens} tokens exceeds the kernels' int32 offsets: lower max_tokens"
        )
    rows = plan.ranks[rank]
    row_starts = np.concatenate(([0], np.cumsum(rows[:, 2] - rows[:, 1])))
    call_of = calls_of(rows[:, 0])
    calls = tuple(
        _call(plan, rows, row_starts, np.flatnonzero(call_of == c))
        for c in range(int(call_of.max(initial=-1)) + 1)
    )
    packed = [plan.packed_index(r) for r in range(plan.cp_size)]
    gather_order = np.empty(plan.tokens, dtype=np.int64)
    gather_order[np.concatenate(packed)] = np.arange(plan.tokens)
    return RankLayout(calls, plan.positions(rank), packed[rank], gather_order, plan.tokens_per_rank)


def calls_of(pieces: IntArray) -> IntArray:
    """int64[k]: the call of each of a rank's segments, given the piece of each.

    Cutting the segments, in local order, wherever a piece comes again keeps every call's rows contiguous:
    pieces 0 1 | 0 2 make calls 0 0 1 1. Where that takes more calls than the largest number of segments of
    one piece, call c takes the c-th segment of every piece instead: pieces 0 1 | 1 2 | 2 (three calls, but
    two suffice) make 0 0 1 0 1.
    """
    count = len(pieces)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(pieces, kind="stable")
    repeats = pieces[order][1:] == pieces[order][:-1]
    # Ordinal of each segment among its piece's: distance, in sorted order, from where the piece begins.
    begins = np.flatnonzero(np.concatenate(([True], ~repeats)))
    sizes = np.diff(np.append(begins, count))
    nth = np.empty(count, dtype=np.int64)
    nth[order] = np.arange(count) - np.repeat(begins, sizes)
    earlier = np.full(count, -1, dtype=np.int64)
    earlier[order[1:][repeats]] = order[:-1][repeats]

    bounds = [0]
    for at in np.flatnonzero(earlier >= 0).tolist():
        if earlier[at] >= bounds[-1]:
            bounds.append(at)
    if len(bounds) > nth.max() + 1:
        return nth
    return np.repeat(np.arange(len(bounds)), np.diff([*bounds, count]))


def _call(plan: ShardPlan, rows: IntArray, row_starts: IntArray, chosen: IntArray) -> CallLayout:
    segments = rows[chosen]
    sizes, ends = segments[:, 2] - segments[:, 1], segments[:, 2]
    first, last = int(chosen[0]), int(chosen[-1])
    q_index: tuple[int, int] | IntArray
    if last - first + 1 == len(chosen):
        q_index = (int(row_starts[first]), int(row_starts[last + 1]))
    else:
        cu = np.cumsum(sizes) - sizes
        q_index = np.arange(int(sizes.sum())) + np.repeat(row_starts[chosen] - cu, sizes)
    kv_starts = np.append(plan.piece_starts[segments[:, 0]], plan.tokens).astype(np.int32)
    return CallLayout(q_index, _bounds(sizes), _bounds(ends), kv_starts, int(sizes.max()), int(ends.max()))


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
