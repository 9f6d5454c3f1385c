"""Predicts the same plans under each kind of recomputation: in full, the best static block, planned by step, none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wlb_megatron.analyze.candidates import with_recompute
from wlb_megatron.pipeline.kept_layers import (
    KeptLayers,
    floor_peak,
    joined_loads,
    loads_of,
    recomputed_array,
    stage_orders,
)
from wlb_megatron.plan import IterationPlan
from wlb_megatron.simulator.iteration import simulate
from wlb_megatron.simulator.job import DEFAULT_GIB, Job, Run


@dataclass(frozen=True)
class Recomputed:
    """Tokens a second of one run by kind of recomputation; None: it does not fit. block: layers of a model chunk that
    the best static block recomputes."""

    full: float | None
    static: float | None
    block: int | None
    planned: float | None
    none: float | None


def by_recomputation(job: Job, run: Run) -> Recomputed | None:
    """None with dynamic groups, which are planned otherwise, and where kept layers would change what is computed."""
    if run.shards is None or job.trainer.keeping_changes(run.config.chunks):
        return None
    job = with_recompute(replace(job, gib=job.gib or DEFAULT_GIB, quick=True), "full")
    plans, shards = run.plans[job.warm_up :], run.shards
    orders = job.orders(plans)
    layers = run.kept or job.kept_layers(plans, replace(run.config, recompute="auto"))
    assert layers is not None

    def speed(like: Job, steps: Sequence[Sequence[Sequence[KeptLayers]]] | None = None) -> float:
        repeats = None if steps is None else [recomputed_array(step) for step in steps]
        return 1e9 / simulate(shards, like.model, orders=orders, recomputed=repeats).ns_per_token

    stages = [stage for step in layers for rank in step for stage in rank]
    fits = all(stage.fits for stage in stages)
    count = max(job.model.layers_of(0, chunk) for chunk in range(job.model.layout.virtual))
    block = _least_block(job, plans, count) if fits else None
    nothing = fits and not any(sum(map(sum, stage.recomputed)) for stage in stages)
    return Recomputed(
        full=speed(job) if fits else None,
        static=None if block is None else speed(with_recompute(job, "full", block)),
        block=block,
        planned=speed(job, layers) if fits else None,
        none=speed(with_recompute(job, "none")) if nothing else None,
    )


def _least_block(job: Job, plans: Sequence[IterationPlan], layers: int) -> int | None:
    """The fewest layers of a model chunk whose recomputation lets all these steps fit; None where not even all do."""
    low, high = 1, layers
    if not _all_fit(with_recompute(job, "full", layers), plans):
        return None
    while low < high:
        middle = (low + high) // 2
        if _all_fit(with_recompute(job, "full", middle), plans):
            high = middle
        else:
            low = middle + 1
    return low


def _all_fit(job: Job, plans: Sequence[IterationPlan]) -> bool:
    gpu, layout = job.gpu, job.model.layout
    for plan, groups in zip(plans, job.orders(plans), strict=True):
        columns = list(zip(*plan.micro_batches, strict=True))
        rank = max(range(len(columns)), key=lambda number: sum(m.tokens for m in columns[number]))
        ranks = columns if job.trainer.in_step else columns[rank : rank + 1]
        loads = joined_loads([loads_of(column, job.alignment, layout.context) for column in ranks])
        stages = stage_orders(layout.pipeline, len(loads), layout.virtual, groups[rank])
        if any(
            floor_peak(order, loads, gpu.stage(stage)) > gpu.available(stage)
            for stage, order in enumerate(stages)
        ):
            return False
    return True
