"""Dynamic groups of iterations as rank 0 plans them, without the other ranks, for bench_launches.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import group_cost, token_ns
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, ShardSettings
from wlb_megatron.plugin.plans.dynamic import DynamicSettings, plan_groups
from wlb_megatron.plugin.ranks.plan_process import PlanProcess


def group_plans(
    planner: Planner, settings: ShardSettings, dp: int, quadratic_at: float
) -> Iterator[PlannedIteration]:
    """Iterations over dp x settings.cp_size ranks. The groups come from a child process without a solver."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    longest = planner.packer.max_tokens // settings.alignment * settings.alignment
    stage = Stage.of(settings.cp_size, dp, longest)
    cost = group_cost(settings.table, token_ns(settings.table, quadratic_at), stage.sizes)
    process = PlanProcess(stage, cost, settings.sharding)
    store: Any = _NobodyReads()
    dynamic = DynamicSettings(
        sizes=cost.sizes,
        tables=cost.tables,
        plan=lambda tokens, fixed: process.plan(tokens, fixed, 0.0, budget=1.0),
        stage_rank=0,
        closing=lambda: False,
        store=store,
    )
    yield from plan_groups(planner, settings, dynamic)


class _NobodyReads:
    """Stands for the PlanStore."""

    def leave(self, _: int, make: Callable[[], bytes]) -> bytes:
        return make()
