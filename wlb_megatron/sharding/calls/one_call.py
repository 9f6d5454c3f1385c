"""Decides whether each rank computes a micro-batch's attention in one kernel call instead of two.

Two calls (attention_calls.py) use the faster kernels: causal squares, and rectangles without a mask. The first runs
while keys travel. One bottom-right call (window_call.py) waits for its keys, and in backward also computes what its
mask hides. But it needs half the launches, and gathers no queries and merges no outputs.

So with cuDNN's kernels, one call is for short pieces cut over ranks. Of 26 mixes that hybrid cuts over 8 ranks it is
faster for 11 at a window of 8K, 9 at 16K, 1 at 32K and none above (predicted from the H100's table;
docs/results/simulated/one_call.csv). FlashAttention-4 skips masked keys in backward, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wlb_megatron.registry import builds_by_size
from wlb_megatron.sharding.predict import in_one_call, in_two_calls
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable

MOST_ROWS, MOST_KEYS = 8192, 32768
"""Limits of one call on a rank, in rows and keys, for cuDNN's kernels only. Above them one call was not faster for
hybrid plans, and the limits avoid building graphs of such sizes."""


def in_fewest_calls(plans: Sequence[ShardPlan], table: KernelTable) -> list[ShardPlan]:
    """The plans (all of one CP size), with `one_call` set where it is predicted faster. The same on all ranks."""
    small = [index for index, plan in enumerate(plans) if _fits(plan, table)]
    fewest = list(plans)
    if small:
        small_plans = [plans[index] for index in small]
        two_calls, one_call = (
            predict(small_plans, table).max(axis=1) for predict in (in_two_calls, in_one_call)
        )
        for index in np.flatnonzero(one_call < two_calls).tolist():
            fewest[small[index]] = replace(small_plans[index], one_call=True)
    return fewest


def _fits(plan: ShardPlan, table: KernelTable) -> bool:
    """Whether any rank attends to earlier keys and, if kernels are built by size, no rank exceeds the limits above."""
    fits = not builds_by_size(table.backend) or (
        max(plan.tokens_per_rank) <= MOST_ROWS
        and max(int(rows[:, 2].sum()) for rows in plan.ranks) <= MOST_KEYS
    )
    return fits and any(bool((rows[:, 1] > 0).any()) for rows in plan.ranks)
