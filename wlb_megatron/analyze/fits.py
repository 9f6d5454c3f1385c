"""What fits a GPU's memory, counted as training counts it: micro-batches, windows, and the same plans under each kind
of recomputation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wlb_megatron.analyze.search import with_recompute
from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.limits import MARGIN, GpuMemory
from wlb_megatron.pipeline.kept_layers import (
    KeptLayers,
    floor_peak,
    joined_loads,
    loads_of,
    recomputed_array,
)
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plan import IterationPlan
from wlb_megatron.simulator.iteration import simulate
from wlb_megatron.simulator.job import DEFAULT_GIB, Job, Run
from wlb_megatron.workload.memory import GIB, LEAST, memory_needed

MOST = 1 << 26
"""The search ends at this many tokens."""


class Fits(NamedTuple):
    """What fits the GPU: tokens of the longest micro-batch and of the longest window; 0: not even the smallest.

    in_chunks: with documents in chunks, else with whole ones, which need 1.25 windows.
    """

    micro_batch: int
    window: int
    gib: float
    in_chunks: bool


def fits(memory: GpuMemory, *, in_chunks: bool) -> Fits:
    room = int(memory.size * (1 - MARGIN))
    gib = memory.size / GIB
    if in_chunks:
        plain = WlbConfig()
        window = _most(1024, lambda w: replace(memory, window=w).needed(plain, w)[0] <= room)
        return Fits(memory.in_chunks(), window, gib, True)
    limit = _most(memory.alignment, lambda tokens: memory_needed(memory.shape, memory.layout, tokens) <= room)
    return Fits(limit, limit * LEAST[1] // LEAST[0] // 1024 * 1024, gib, False)


def _most(step: int, fit: Callable[[int], bool]) -> int:
    """The largest multiple of `step` that fits, if the need grows with it."""
    return bisect_left(range(step, MOST + 1, step), True, key=lambda tokens: not fit(tokens)) * step


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
    plans, shards = run.timed_plans, run.shards
    orders = job.orders(plans)
    layers = run.kept or job.times(replace(run.config, recompute="auto")).kept_layers(plans)
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
    blocks = range(1, layers + 1)
    place = bisect_left(blocks, True, key=lambda block: _all_fit(with_recompute(job, "full", block), plans))
    return blocks[place] if place < layers else None


def _all_fit(job: Job, plans: Sequence[IterationPlan]) -> bool:
    gpu, layout = job.gpu, job.model.layout
    for plan, groups in zip(plans, job.orders(plans), strict=True):
        columns = list(zip(*plan.micro_batches, strict=True))
        rank = max(range(len(columns)), key=lambda number: sum(m.tokens for m in columns[number]))
        ranks = columns if job.trainer.in_step else columns[rank : rank + 1]
        loads = joined_loads([loads_of(column, job.alignment, layout.context) for column in ranks])
        stages = grouped_orders(layout.pipeline, groups[rank] or (1,) * len(loads), layout.virtual)
        if any(
            floor_peak(order, loads, gpu.stage(stage)) > gpu.available(stage)
            for stage, order in enumerate(stages)
        ):
            return False
    return True
