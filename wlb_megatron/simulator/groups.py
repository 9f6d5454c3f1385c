"""Times iterations of dynamic groups, in which every rank of a stage runs its own micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.plan import GroupCost, StepPlan
from wlb_megatron.simulator.iteration import Simulated, by_count, run_steps
from wlb_megatron.simulator.model import LayerModel, Times


def simulate_groups(
    plans: Sequence[StepPlan], tokens: Sequence[Sequence[int]], model: LayerModel, cost: GroupCost
) -> Simulated:
    """Simulates iterations of dynamic groups.

    tokens: int[documents] for each iteration. cost: that by which the groups were planned. model: with fixed groups.
    In the result, `dp` counts all ranks of a stage, and `cp` is 1.
    """
    ranks = model.layout.data * model.layout.context
    apart = replace(model, layout=replace(model.layout, context=1, data=ranks))
    loads = [group_loads(plan, plan_tokens, cost) for plan, plan_tokens in zip(plans, tokens, strict=True)]

    def several(places: list[int]) -> Simulated:
        counts = np.stack([loads[place][0] for place in places])
        attention = np.stack([loads[place][1] for place in places])
        ways = Times(*(way[..., None] for way in apart.attention_ways(attention)))
        return run_steps(counts, ways, apart)

    return by_count([len(plan.micro_steps) for plan in plans], several)


def group_loads(
    plan: StepPlan, tokens: Sequence[int], cost: GroupCost
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Tokens and attention (nanoseconds) of each micro-step on each rank of a stage, [m, ranks] each."""
    lengths, prices = np.array(tokens, dtype=np.int64), cost.attention(tokens)
    counts = np.ones((len(plan.micro_steps), plan.ranks), dtype=np.int64)
    attention = np.full(counts.shape, cost.tables[0].call)
    for step, groups in enumerate(plan.micro_steps):
        for group in groups:
            documents, level = list(group.documents), cost.sizes.index(group.size)
            ranks = slice(group.start, group.start + group.size)
            counts[step, ranks] = -(-int(lengths[documents].sum()) // group.size)
            attention[step, ranks] += prices[level, documents].sum() + cost.opening()[level]
    return counts, attention
