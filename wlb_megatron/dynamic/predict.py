"""Predicted time of a plan with every group sharded as its executor will: what decides between plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import Group, StepPlan, finish_times
from wlb_megatron.sharding.alignment import padded
from wlb_megatron.sharding.predict import predict_all
from wlb_megatron.sharding.select import shard_all

IntArray = npt.NDArray[np.int64]


def predicted_time(
    plan: StepPlan, tokens: Sequence[int], cost: GroupCost, sharding: str = "adaptive", pipeline: int = 1
) -> int:
    """Nanoseconds of a layer until the last rank is done. tokens: of each document. pipeline: stages, which fill and
    drain at the pace of the largest micro-step."""
    times = group_times([group for groups in plan.micro_steps for group in groups], tokens, cost, sharding)
    flat = iter(times)
    by_step = [[next(flat) for _ in groups] for groups in plan.micro_steps]
    return int(finish_times(plan, by_step, cost.step_ns).max()) + (pipeline - 1) * max(times, default=0)


def group_times(
    groups: Sequence[Group], tokens: Sequence[int], cost: GroupCost, sharding: str = "adaptive"
) -> list[int]:
    """Nanoseconds of each group's micro-step: its slowest rank's attention, its tokens, and what any takes."""
    times = [0] * len(groups)
    for size, table in zip(cost.sizes, cost.tables, strict=True):
        chosen = [at for at, group in enumerate(groups) if group.size == size]
        if not chosen:
            continue
        lengths = [[tokens[d] for d in groups[at].documents] for at in chosen]
        plans = shard_all([padded(row, size) for row in lengths], size, sharding, table)
        attention = predict_all(plans, table).max(axis=1).tolist()
        for at, plan, ns in zip(chosen, plans, attention, strict=True):
            times[at] = ns + round(cost.token_ns * plan.tokens / size) + cost.step_ns
    return times
