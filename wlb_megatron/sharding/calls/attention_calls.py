"""The two kernel calls that compute attention for a rank's segments. (A plan may ask for one call: one_call.py.)

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

from wlb_megatron.sharding.calls.exchange import ExchangePlan, exchange_plan
from wlb_megatron.sharding.calls.varlen_call import AttentionCall, varlen_call
from wlb_megatron.sharding.calls.window_call import WindowLayout, window_layout
from wlb_megatron.sharding.chunks import CachedKeys, cached_keys
from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges

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
