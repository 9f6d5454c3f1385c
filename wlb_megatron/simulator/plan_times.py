"""How long a job's plans take: cut over context ranks, with the layers that each step keeps, and simulated; and
iterations of dynamic groups, in which every rank of a stage runs its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.plan import GroupCost, StepPlan
from wlb_megatron.packing.limits import GpuMemory
from wlb_megatron.pipeline.kept_layers import KeptLayers, loads_of, plan_step_layers, recomputed_array
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.cut import cut_plans, orders_of
from wlb_megatron.simulator.iteration import Orders, Shards, Simulated, by_count, run_steps, simulate
from wlb_megatron.simulator.model import LayerModel, Times

Kept = Sequence[Sequence[Sequence[KeptLayers]]]
"""Kept layers [iteration][dp][stage]."""


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """The law by which commands predict steps, and by which training chooses between chunks and whole documents.

    alignment: a micro-batch's tokens are padded to a multiple of it. in_step: data-parallel ranks run the same groups
    of micro-batches. memory: by which each step keeps layers; None: steps run the flags of recomputation. quick: the
    kept layers of one data-parallel rank, that with most tokens, stand for all.
    """

    model: LayerModel
    alignment: int
    sharding: str
    in_step: bool = False
    memory: GpuMemory | None = None
    quick: bool = False

    def __call__(self, plans: Sequence[IterationPlan]) -> npt.NDArray[np.float64]:
        """float[n]: nanoseconds of each iteration. Its plans may be of fewer data-parallel ranks than the job has.

        What only a rank's environment says does not count, because all ranks must choose alike.
        """
        shape, dp = self.model.shape, len(plans[0].micro_batches[0])
        shape = replace(shape, experts=shape.experts and replace(shape.experts, one_kernel=False))
        model = replace(self.model, shape=shape, layout=replace(self.model.layout, data=dp))
        return replace(self, model=model, quick=True).simulated(plans)[0].steps

    def simulated(self, plans: Sequence[IterationPlan]) -> tuple[Simulated, Shards, Kept | None]:
        """The plans' times, how their micro-batches are cut, and the layers that they keep."""
        shards = cut_plans(plans, self.model.layout.context, self.alignment, self.sharding, self.model.table)
        layers = self.kept_layers(plans)
        repeats = None if layers is None else [recomputed_array(step) for step in layers]
        return simulate(shards, self.model, orders=self.orders(plans), recomputed=repeats), shards, layers

    def orders(self, plans: Sequence[IterationPlan]) -> Orders:
        return orders_of(plans, in_step=self.in_step)

    def kept_layers(self, plans: Sequence[IterationPlan], only_rank: int | None = None) -> Kept | None:
        """None where steps run the flags. only_rank: those of this data-parallel rank alone."""
        memory, layout = self.memory, self.model.layout
        if memory is None:
            return None
        layers = [[self.model.layers_of(p, c) for c in range(layout.virtual)] for p in range(layout.pipeline)]
        stages = [memory.stage(stage, layers[stage]) for stage in range(layout.pipeline)]
        available = [memory.available(stage) for stage in range(layout.pipeline)]
        steps = []
        for plan, groups in zip(plans, self.orders(plans), strict=True):
            columns = list(zip(*plan.micro_batches, strict=True))
            rank = only_rank
            if self.quick:
                rank = max(range(len(columns)), key=lambda rank: sum(m.tokens for m in columns[rank]))
            if rank is not None:
                columns, groups = columns[rank : rank + 1], groups[rank : rank + 1]
            loads = [loads_of(column, self.alignment, layout.context) for column in columns]
            ranks = plan_step_layers(loads, groups, stages, available, in_step=self.in_step)
            steps.append(ranks if only_rank is not None else ranks * (layout.data // len(ranks)))
        return steps


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
