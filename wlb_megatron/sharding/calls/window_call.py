"""One kernel call for all of a rank's segments, used when few keys precede each segment.

In a layer with a sliding window, a segment [start, end) attends to keys [max(0, start - window), end) of its piece.
Few of these are on other ranks. In any layer, a short piece has few keys (one_call.py). The call is causal,
bottom-right aligned, over a buffer with each segment's keys, so nothing needs merging.

Segments of one piece that are closer than the window share keys. Each gets its own copy, so dK and dV are exact, and
the owner adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wlb_megatron.sharding.calls.exchange import ExchangePlan, exchange_buffers
from wlb_megatron.sharding.calls.varlen_call import AttentionCall, varlen_call
from wlb_megatron.sharding.chunks import CachedKeys, cached_keys
from wlb_megatron.sharding.segments import IntArray, ShardPlan, _ranges


@dataclass(frozen=True)
class WindowLayout:
    """The layout of windowed layers on one rank.

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
