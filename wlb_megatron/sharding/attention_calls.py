"""The kernel calls that serve a rank's segments, and the keys each call reads.

A segment of tokens [start, end) sees its piece's keys [0, end): its own diagonal, and the rectangle of earlier
keys [0, start). All diagonals of a rank are one call on local keys, which runs while the others travel; the
rectangles read the exchanged keys, and their results are merged by log-sum-exp. A short segment may instead be
one bottom-right causal call over all its keys, which saves a launch and the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wlb_megatron.sharding.exchange import ExchangePlan, exchange_plan
from wlb_megatron.sharding.layout import Int32Array, calls_of
from wlb_megatron.sharding.segments import IntArray, ShardPlan

CAUSAL, FULL, BOTTOM_RIGHT = "causal", "full", "bottom-right"


@dataclass(frozen=True)
class AttentionCall:
    """One kernel call over b segments of b different pieces: no two read the same keys, so dK, dV are exact.

    mask: CAUSAL (keys are the queries' own tokens), FULL (all keys are earlier), BOTTOM_RIGHT (the queries are
        the last of the keys).
    gathered: keys lie in the exchanged buffer, else among the rank's own rows.
    rows: local query rows (start, stop) that the call is given; it may skip some of them.
    q_starts, kv_starts: int32[b + 1], first row of each segment's queries in rows and of its keys; the last
        entry is the number of rows there. (Transformer Engine's cu_seqlens_*_padded; not always ascending.)
    cu_seqlens_q, cu_seqlens_kv: int32[b + 1], running sums of queries and keys.
    max_q, max_kv: the largest of them, in tokens.
    covered: bool[stop - start] where the call skips rows, else None.
    fresh: no earlier call of the layout touches its rows, so its result needs no merge.
    """

    mask: str
    gathered: bool
    rows: tuple[int, int]
    q_starts: Int32Array
    cu_seqlens_q: Int32Array
    kv_starts: Int32Array
    cu_seqlens_kv: Int32Array
    max_q: int
    max_kv: int
    covered: np.ndarray | None
    fresh: bool


@dataclass(frozen=True)
class AttentionLayout:
    """What one rank computes for one micro-batch. Calls on local keys come first.

    tokens: t, the rank's. positions: int64[t] inside their pieces.
    """

    tokens: int
    calls: tuple[AttentionCall, ...]
    exchange: ExchangePlan
    positions: IntArray


def attention_layout(plan: ShardPlan, rank: int, split_from: int = 0) -> AttentionLayout:
    """The layout of `rank`. Segments of at least split_from tokens are split into diagonal and rectangle.

    Piece [8], CP=2, rank 0 holds (0, 0, 2) (0, 6, 8): a causal call of two segments on its own 4 keys, and one
    full call, rows (2, 4) on the 6 exchanged keys. With split_from=3: a causal call on rows (0, 2), and a
    bottom-right one, rows (2, 4) on all 8 keys.
    """
    if plan.tokens > np.iinfo(np.int32).max:
        raise ValueError(
            f"a micro-batch of {plan.tokens} tokens exceeds the kernels' int32 offsets: lower max_tokens"
        )
    exchange = exchange_plan(plan, rank, [_reach(plan, rows, split_from) for rows in plan.ranks])
    piece, start, end = plan.ranks[rank].T
    size = end - start
    local = np.cumsum(size) - size
    tokens = int(size.sum())
    split = _is_split(plan.ranks[rank], split_from)
    whole = (start > 0) & ~split

    touched = np.zeros(tokens, dtype=bool)
    calls = []

    def add(mask: str, gathered: bool, chosen: IntArray) -> None:
        keys = {CAUSAL: size, FULL: start, BOTTOM_RIGHT: end}[mask][chosen]
        key_rows = exchange.key_starts[piece[chosen]] if gathered else local[chosen]
        first = int(local[chosen].min())
        last = int((local + size)[chosen].max())
        covered = np.zeros(last - first, dtype=bool)
        for begin, count in zip(local[chosen] - first, size[chosen], strict=True):
            covered[begin : begin + count] = True
        fresh = not touched[first:last].any()
        touched[first:last] |= covered
        calls.append(
            AttentionCall(
                mask,
                gathered,
                (first, last),
                np.append(local[chosen] - first, last - first).astype(np.int32),
                _bounds(size[chosen]),
                np.append(key_rows, exchange.buffer_rows if gathered else tokens).astype(np.int32),
                _bounds(keys),
                int(size[chosen].max()),
                int(keys.max()),
                None if covered.all() else covered,
                fresh,
            )
        )

    own = np.flatnonzero(~whole)
    if len(own):
        add(CAUSAL, False, own)
    for mask, members in ((FULL, split), (BOTTOM_RIGHT, whole)):
        chosen = np.flatnonzero(members)
        call_of = calls_of(piece[chosen])
        for call in range(int(call_of.max(initial=-1)) + 1):
            add(mask, True, chosen[call_of == call])
    return AttentionLayout(tokens, tuple(calls), exchange, plan.positions(rank))


def _is_split(rows: IntArray, split_from: int) -> np.ndarray:
    return (rows[:, 1] > 0) & (rows[:, 2] - rows[:, 1] >= split_from)


def _reach(plan: ShardPlan, rows: IntArray, split_from: int) -> IntArray:
    """int64[pieces]: how far into each piece the exchanged keys of these rows go."""
    needed = np.where(_is_split(rows, split_from) | (rows[:, 1] == 0), rows[:, 1], rows[:, 2])
    reach = np.zeros(len(plan.lengths), dtype=np.int64)
    np.maximum.at(reach, rows[:, 0], needed)
    return reach


def _bounds(sizes: IntArray) -> Int32Array:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
