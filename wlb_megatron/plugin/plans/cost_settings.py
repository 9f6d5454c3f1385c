"""Costs by the job's model and profile: settings that the user left to them, and what packing balances by."""

from __future__ import annotations

from dataclasses import replace

from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.workload.cost_model import (
    CostModel,
    backward_over_forward,
    document_cost,
    quadratic_at,
    with_windows,
)
from wlb_megatron.workload.costs import MicroBatchCost
from wlb_megatron.workload.costs import micro_batch_cost as costs_of_micro_batch
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.micro_batch import MICRO_BATCH_TOKENS


def complete(job: TrainingJob) -> WlbConfig:
    """The settings with what the user left to the model's shape filled in."""
    model, config = job.model, job.given
    balanced, document = config.quadratic_at, config.document_cost
    if job.costs is not None:
        balanced = job.costs.quadratic_at if balanced is None else balanced
        document = job.costs.per_document if document is None else document
    if balanced is None:
        balanced = quadratic_at(model.heads * model.head_dim, model.layer_parameters)
        balanced = with_windows(balanced, model.window or 0, model.whole_layers)
    if document is None:
        table = h100().scaled(heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim)
        document = document_cost(table.segment, model.layer_parameters) if job.device.on_gpu else 0.0
    micro_batch = config.micro_batch_cost
    if micro_batch is None:
        micro_batch = micro_batch_cost(job).own
    return replace(config, quadratic_at=balanced, document_cost=document, micro_batch_cost=micro_batch)


def cost_model(job: TrainingJob) -> CostModel:
    """What packing balances by. The job's settings are complete."""
    config, per_micro_batch = job.config, micro_batch_cost(job)
    cost = CostModel(
        _not_none(config.quadratic_at),
        _not_none(config.document_cost),
        per_micro_batch.own,
        per_micro_batch.least,
        per_micro_batch.chunk,
        backward=backward_over_forward(job.recomputed_share),
    )
    return cost.with_micro_batch_cost(config.micro_batch_cost)


def micro_batch_cost(job: TrainingJob) -> MicroBatchCost:
    """What a micro-batch costs by itself, over all context-parallel ranks; little is known of a CPU's."""
    model, sizes = job.model, job.sizes
    if job.profile is None and not job.device.on_gpu:
        return MicroBatchCost(MICRO_BATCH_TOKENS * sizes.context)
    return costs_of_micro_batch(
        job.costs,
        model.layer_parameters / sizes.tensor,
        model.heads * model.head_dim / sizes.tensor,
        sizes.context,
        recompute=job.recomputed_share,
        layers=max(1, model.layers // sizes.pipeline) if sizes.pipeline > 1 else None,
    )


def _not_none(value: float | None) -> float:
    assert value is not None
    return value
