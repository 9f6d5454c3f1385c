"""The kernel calls that compute attention for a rank's segments: two, or one if a plan asks for that (WindowLayout).

A segment of tokens [start, end) attends to its piece's keys [0, end): its own diagonal, and all earlier keys.

* diagonals: one causal call over all segments of the rank, on the rank's own keys. It runs while other keys travel.
* rectangles: one call without a mask over the exchanged keys. Let a piece's segments start at s1 < s2 < .. All of
  them attend to keys [0, s1), all but the first to [s1, s2), and so on. Each of these runs of keys is one rectangle,
  with its queries copied side by side. No key is in two rectangles, so dK and dV are exact, and each row of each
  buffer is written once.

Log-sum-exp merges the parts of a query's attention. Both calls are plain variable-length attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.chunks import CachedKeys, cached_keys
from wlb_megatron.sharding.exchange import ExchangePlan, exchange_buffers, exchange_plan
from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionCall:
    """One variable-length call over b sequences; each sequence's queries and keys are contiguous.

    cu_seqlens_q, cu_seqlens_kv: int32[b + 1], in tokens. max_q, max_kv: the longest sequence's queries and keys, in
    tokens.
    """

    cu_seqlens_q: Int32Array
    cu_seqlens_kv: Int32Array
    max_q: int
    max_kv: int

    @property
    def equal(self) -> tuple[int, int, int] | None:
        """(sequences, queries of each, keys of each) if all sequences have the same sizes, else None."""
        queries, keys = np.diff(self.cu_seqlens_q), np.diff(self.cu_seqlens_kv)
        if not len(queries) or (queries != self.max_q).any() or (keys != self.max_kv).any():
            return None
        return len(queries), self.max_q, self.max_kv


def varlen_call(queries: IntArray, keys: IntArray) -> AttentionCall:
    """The call over b sequences. queries, keys: int64[b] each, tokens per sequence."""
    return AttentionCall(
        _bounds(queries), _bounds(keys), int(queries.max(initial=0)), int(keys.max(initial=0))
    )


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


# Two H100s, 8 / 2 heads: at 3,600 pairs a key hiding the return saved 1 ms of 19, at 8,000 it cost 4 to 8 ms of 68.
PAIRS_WORTH_A_KEY = 4096


@dataclass(frozen=True)
class AttentionLayout:
    """What one rank computes for one micro-batch.

    * tokens: t, the rank's token count. longest: tokens of the micro-batch's longest piece, prefix included.
    * positions: int64[t], inside their pieces.
    * diagonals: the causal call on the t local rows.
    * rectangles: the call without a mask, or None if there are no earlier keys. Its queries are the local rows
      query_rows, in which a row appears once per run of earlier keys that it attends to. Its keys are the exchanged
      ones.
    * hide_return: whether gradients of exchanged keys travel back during the backward of the diagonals, the same on
      all ranks. If one rank's rectangles end long before another's, its transfer waits on the device and slows the
      diagonals beside it (two H100s: by 4 to 10 ms of 70). In that case all ranks return gradients last.
    * window: the layout of windowed layers, if the model has any.
    * single: the layout of the other layers, if the plan computes them in one call. Diagonals, rectangles and
      exchange are then unused.
    * cached: keys of earlier chunks for diagonals and rectangles. None if the micro-batch shares no document with
      another.
    """

    tokens: int
    longest: int
    positions: IntArray
    diagonals: AttentionCall
    rectangles: AttentionCall | None
    query_rows: IntArray
    exchange: ExchangePlan
    hide_return: bool
    window: WindowLayout | None = None
    single: WindowLayout | None = None
    cached: CachedKeys | None = None


def attention_layout(plan: ShardPlan, rank: int, window: int | None = None) -> AttentionLayout:
    """The layout of `rank`. window: earlier keys that a query of a windowed layer attends to, or None.

    Example: piece [8], CP=2. Rank 0 holds (0, 0, 2) (0, 6, 8): diagonals of 2 and 2 rows, and one rectangle, rows 2 3
    on keys [0, 6). Rank 1 holds (0, 2, 6) as one segment: a diagonal of 4, and a rectangle of rows 0 1 2 3 on keys
    [0, 2). With (0, 1, 2) (0, 4, 6) instead: rows 0 1 2 on key [0, 1), then rows 1 2 on keys [1, 4).

    Raises ValueError if the tokens do not fit the kernels' int32 offsets.
    """
    if plan.key_starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"a micro-batch of {int(plan.key_starts[-1])} tokens exceeds the kernels' int32 offsets: lower max_tokens"
        )
    rows = plan.ranks[rank]
    size = rows[:, 2] - rows[:, 1]
    first_row = np.cumsum(size) - size

    # Segments with earlier keys, sorted by piece and start. From any i on, chosen[i:last[i]] are of one piece.
    with_earlier = np.flatnonzero(rows[:, 1] > 0)
    with_earlier = with_earlier[np.lexsort((rows[with_earlier, 1], rows[with_earlier, 0]))]
    piece, start = rows[with_earlier, 0], rows[with_earlier, 1]
    count = len(with_earlier)
    last = np.searchsorted(piece, piece, side="right")
    opens = np.ones(count, dtype=bool)
    opens[1:] = piece[1:] != piece[:-1]
    key_start = np.where(opens, 0, np.concatenate(([0], start[:-1]))[:count])
    # Rectangle i: queries of segments i .. last of its piece, keys [key_start, start).
    members = with_earlier[_ranges(np.arange(count), last)]
    query_rows = _ranges(first_row[members], first_row[members] + size[members])
    running = np.concatenate(([0], np.cumsum(size[with_earlier])))
    queries = running[last] - running[:-1]
    buffer = _ranges(plan.key_starts[piece] + key_start, plan.key_starts[piece] + start)
    reaches = [_reach(plan, rank_rows) for rank_rows in plan.ranks]
    return AttentionLayout(
        int(size.sum()),
        int((plan.prefixes + plan.lengths).max()),
        plan.positions(rank),
        varlen_call(size, size),
        varlen_call(queries, start - key_start) if count else None,
        query_rows,
        exchange_plan(plan, rank, reaches, buffer),
        _in_step(plan, reaches),
        None if window is None else window_layout(plan, rank, window),
        window_layout(plan, rank, None) if plan.one_call else None,
        None if plan.one_call else cached_keys(plan, rank),
    )


def _in_step(plan: ShardPlan, reaches: Sequence[IntArray]) -> bool:
    """Whether the ranks' rectangles end so close together that the early rank waits less than hiding the transfer
    saves.

    That is the case if the ranks' rectangles differ by at most 4096 query-key pairs per key, for the keys of the rank
    that fetches most. The answer is the same for all ranks, because a rank that returns early would wait for one that
    returns late.
    """
    pairs = [int((rows[:, 1] * (rows[:, 2] - rows[:, 1])).sum()) for rows in plan.ranks]
    return max(pairs) - min(pairs) <= PAIRS_WORTH_A_KEY * max(int(reach.sum()) for reach in reaches)


def _reach(plan: ShardPlan, rows: IntArray) -> IntArray:
    """int64[pieces]: where the rank's last segment of each piece begins. It needs that many keys of the piece."""
    reach = np.zeros(len(plan.lengths), dtype=np.int64)
    np.maximum.at(reach, rows[:, 0], rows[:, 1])
    return reach


@dataclass(frozen=True)
class WindowLayout:
    """One kernel call for all of a rank's segments, used when few keys precede each segment.

    In a layer with a sliding window, a segment [start, end) attends to keys [max(0, start - window), end) of its piece.
    Few of these are on other ranks. In any layer, a short piece has few keys (cut.in_fewest_calls). The call is causal,
    bottom-right aligned, over a buffer with each segment's keys, so nothing needs merging. Segments of one piece that
    are closer than the window share keys. Each gets its own copy, so dK and dV are exact, and the owner adds them up.

    size: earlier keys that a query attends to, None for all. call: bottom-right causal, the rank's rows on the
    exchanged keys. cached: None if the micro-batch shares no document with another.
    """

    size: int | None
    call: AttentionCall
    exchange: ExchangePlan
    cached: CachedKeys | None = None


def window_layout(plan: ShardPlan, rank: int, size: int | None) -> WindowLayout:
    """The windowed layout of `rank`.

    Piece [8], CP=2, window 1. Rank 0 holds (0, 0, 2) (0, 6, 8): 2 rows on keys 0 1, 2 rows on keys 5 6 7, of which
    5 comes from rank 1. Rank 1 holds (0, 2, 6): 4 rows on keys 1 .. 5.
    """
    rows = plan.ranks[rank]
    return WindowLayout(
        size,
        varlen_call(rows[:, 2] - rows[:, 1], rows[:, 2] - _first_key(rows, size)),
        exchange_buffers(plan, rank, [_buffer(plan, rank_rows, size) for rank_rows in plan.ranks], size),
        cached_keys(plan, rank, size),
    )


def _first_key(rows: IntArray, size: int | None) -> IntArray:
    return np.zeros_like(rows[:, 1]) if size is None else np.maximum(rows[:, 1] - size, 0)


def _buffer(plan: ShardPlan, rows: IntArray, size: int | None) -> IntArray:
    """int64[n]: the keys that a rank's segments attend to, segment by segment, numbered as in ShardPlan.key_index."""
    begins = plan.key_starts[rows[:, 0]]
    return _ranges(begins + _first_key(rows, size), begins + rows[:, 2])
