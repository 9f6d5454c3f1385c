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

    tokens: t, the rank's. longest: tokens of the micro-batch's longest piece, prefix included. positions: int64[t],
        inside their pieces.
    diagonals: causal, on the t local rows. rectangles: no mask, queries are the local rows query_rows (a row
    comes as often as it sees runs of earlier keys), keys the exchanged ones; None where there are no earlier keys.
    hide_return: whether gradients of exchanged keys travel back under the backward of the diagonals, the same on all
        ranks. A rank whose rectangles end long before another's would wait with the transfer on the device, and its
        diagonals beside it slow down for as long (two H100s: 4 to 10 ms of 70); then all return them last.
    window: the layout of windowed layers, where the model has any. single: of the others, where the plan wants them
        in one call; diagonals, rectangles and exchange then serve nobody.
    cached: of the diagonals and rectangles; None where the micro-batch shares no document with another.
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
    """The layout of `rank`. window: earlier keys that a query of a windowed layer sees, where the model has such.

    Piece [8], CP=2. Rank 0 holds (0, 0, 2) (0, 6, 8): diagonals of 2 and 2 rows; one rectangle, rows 2 3 on
    keys [0, 6). Rank 1 holds (0, 2, 6) as one segment: a diagonal of 4, a rectangle of rows 0 1 2 3 on keys
    [0, 2). With (0, 1, 2) (0, 4, 6) instead: rows 0 1 2 on key [0, 1), then rows 1 2 on keys [1, 4).

    Raises ValueError where the tokens do not fit the kernels' int32 offsets.
    """
    if plan.key_starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"a micro-batch of {int(plan.key_starts[-1])} tokens exceeds the kernels' int32 offsets: lower max_tokens"
        )
    rows = plan.ranks[rank]
    size = rows[:, 2] - rows[:, 1]
    first_row = np.cumsum(size) - size

    # Segments with earlier keys, by piece and in its order; those of one piece are chosen[i:last[i]] from any i on.
    chosen = np.flatnonzero(rows[:, 1] > 0)
    chosen = chosen[np.lexsort((rows[chosen, 1], rows[chosen, 0]))]
    piece, start = rows[chosen, 0], rows[chosen, 1]
    count = len(chosen)
    last = np.searchsorted(piece, piece, side="right")
    opens = np.ones(count, dtype=bool)
    opens[1:] = piece[1:] != piece[:-1]
    key_start = np.where(opens, 0, np.concatenate(([0], start[:-1]))[:count])
    # Rectangle i: queries of segments i .. last of its piece, keys [key_start, start).
    members = chosen[_ranges(np.arange(count), last)]
    query_rows = _ranges(first_row[members], first_row[members] + size[members])
    running = np.concatenate(([0], np.cumsum(size[chosen])))
    queries = running[last] - running[:-1]
    buffer = _ranges(plan.key_starts[piece] + key_start, plan.key_starts[piece] + start)
    reaches = [_reach(plan, held) for held in plan.ranks]
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
    """Whether the rectangles of the ranks end so close that the first waits less than the transfer is worth.

    Pairs of queries and keys that the ranks' rectangles differ by, at most 4096 for each key that the neediest rank
    fetches. One for all ranks: a rank that returns early while another returns late would wait for it, too.
    """
    pairs = [int((rows[:, 1] * (rows[:, 2] - rows[:, 1])).sum()) for rows in plan.ranks]
    return max(pairs) - min(pairs) <= PAIRS_WORTH_A_KEY * max(int(reach.sum()) for reach in reaches)


def _reach(plan: ShardPlan, rows: IntArray) -> IntArray:
    """int64[pieces]: where a rank's last segment of each piece begins, which is how many keys it needs of it."""
    reach = np.zeros(len(plan.lengths), dtype=np.int64)
    np.maximum.at(reach, rows[:, 0], rows[:, 1])
    return reach
