"""Whether a micro-batch's segments are served by one kernel call on each rank instead of two.

Two calls (attention_calls.py) run the faster kernels: causal squares and rectangles without mask, the first while keys
travel. One bottom-right call (window_call.py) also computes what it masks in backward, and waits for its keys; but it
launches half as much, and no query is gathered and no output merged. So it is for short pieces cut over ranks: by the
H100's table, of 25 mixes of documents cut by hybrid it is faster, by 6 to 14 % in the middle, at windows of 8K to 16K
and, over 8 ranks, of 32K; from 64K on never (scripts/bench_calls.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wlb_megatron.sharding.predict import predict_all
from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable

MOST_ROWS, MOST_KEYS = 8192, 32768
"""Of a rank: where it has more, one call is never faster, and kernel graphs for such sizes need not be built."""


def in_fewest_calls(plans: Sequence[ShardPlan], table: KernelTable) -> list[ShardPlan]:
    """The plans, of one CP size, with `one_call` where that is predicted faster: the same on all ranks."""
    small = [at for at, plan in enumerate(plans) if _fits(plan)]
    found = list(plans)
    if small:
        chosen = [plans[at] for at in small]
        two = predict_all(chosen, table).max(axis=1)
        for at, plan, ns in zip(small, chosen, two.tolist(), strict=True):
            if int(predict_one_call(plan, table).max()) < ns:
                found[at] = replace(plan, one_call=True)
    return found


def predict_one_call(plan: ShardPlan, table: KernelTable) -> IntArray:
    """int64[cp]: nanoseconds, forward + backward, of one layer's attention and its exchange, all of it exposed."""
    return np.array([_rank_ns(rows, table) for rows in plan.ranks], dtype=np.int64)


def _rank_ns(rows: IntArray, table: KernelTable) -> int:
    end, size = rows[:, 2], rows[:, 2] - rows[:, 1]
    ns = table.call + float(table.bottom_right_ns(size, end).sum()) + table.moved_key * float(end.sum())
    remote = int(end.sum()) - _at_home(rows)
    return round(ns + (table.exchange + table.exchange_row * remote if remote else 0.0))


def _at_home(rows: IntArray) -> int:
    """Of the keys that a rank's segments see, how many it holds: (0, 0, 2) (0, 6, 8) see 2 and 8, hold 2 and 4."""
    held = 0
    for piece in np.unique(rows[:, 0]).tolist():
        size = np.sort(rows[rows[:, 0] == piece], axis=0)
        held += int(np.cumsum(size[:, 2] - size[:, 1]).sum())
    return held


def _fits(plan: ShardPlan) -> bool:
    """Whether any rank sees earlier keys, and none has many rows or keys."""
    return any(bool((rows[:, 1] > 0).any()) for rows in plan.ranks) and all(
        tokens <= MOST_ROWS and int(rows[:, 2].sum()) <= MOST_KEYS
        for tokens, rows in zip(plan.tokens_per_rank, plan.ranks, strict=True)
    )
