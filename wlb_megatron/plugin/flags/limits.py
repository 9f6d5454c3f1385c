"""Settings that follow from the job: costs from its model and profile, Lmax from the GPU's memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from wlb_megatron.attention.kernels.kernel_choice import narrow_values
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.lengths import Bound
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.limits import GpuMemory, chunk_capacity, with_lmax
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.workload.cost_model import (
    MICRO_BATCH_TOKENS,
    CostModel,
    MicroBatchCost,
    document_cost,
    quadratic_at,
    with_windows,
)
from wlb_megatron.workload.cost_model import micro_batch_cost as costs_of_micro_batch
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.memory import GIB, keys_bytes
from wlb_megatron.workload.model import Model, layer_count


def complete(job: TrainingJob) -> WlbConfig:
    """The settings with what the user left to the model's shape filled in."""
    model, shape, config = job.model, job.model.shape, job.given
    balanced, document = config.quadratic_at, config.document_cost
    if job.costs is not None:
        balanced = job.costs.quadratic_at if balanced is None else balanced
        document = job.costs.per_document if document is None else document
    if balanced is None:
        balanced = quadratic_at(shape.heads * shape.head_dim, model.layer_parameters)
        balanced = with_windows(balanced, model.window or 0, model.whole_layers)
    if document is None:
        table = h100().scaled(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        document = document_cost(table.segment, model.layer_parameters) if job.device.on_gpu else 0.0
    micro_batch = config.micro_batch_cost
    if micro_batch is None:
        micro_batch = micro_batch_cost(job).own
    return replace(config, quadratic_at=balanced, document_cost=document, micro_batch_cost=micro_batch)


def cost_model(job: TrainingJob) -> CostModel:
    """What packing balances by. The job's settings are complete."""
    config = job.config
    assert config.quadratic_at is not None and config.document_cost is not None
    cost = CostModel(
        config.quadratic_at,
        config.document_cost,
        *micro_batch_cost(job),
        backward=2 + job.recomputed_share,
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
        model.shape.heads * model.shape.head_dim / sizes.tensor,
        sizes.context,
        recompute=job.recomputed_share,
        layers=max(1, layer_count(model.shape.layers) // sizes.pipeline) if sizes.pipeline > 1 else None,
    )


def fit_to_memory(job: TrainingJob) -> WlbConfig:
    """The job's settings with Lmax filled in, see packing.limits.with_lmax. The same on every rank of like GPUs, and
    independent of the layout wherever memory suffices."""
    if job.config.max_tokens is not None:
        return job.config
    refusals = job.trainer.chunks_refused(job.config.chunks)
    return with_lmax(job.config, gpu_memory(job), job.batches.joined_window, refusals)


def gpu_memory(job: TrainingJob, *, even_with_experts: bool = False) -> GpuMemory | None:
    """A GPU's memory and what the job keeps in it. None without a GPU, unless a flag names its memory.

    None also with experts, because the number of tokens of one is not known.

    even_with_experts: assume uneven numbers of tokens instead (workload.model.Experts).
    """
    size, model = job.given.gpu_memory, job.model
    if (not job.device.on_gpu and not size) or (model.shape.experts is not None and not even_with_experts):
        return None
    if size is None:
        bytes_here = whole_gib(torch.cuda.get_device_properties(job.device.index).total_memory)
    else:
        bytes_here = int(size * GIB)
    return GpuMemory(
        *(bytes_here, fullest_stage(job), job.sizes),
        *(job.batches.joined_window, job.alignment, job.given.memory_margin),
        layers=model.stage_patterns,
        depths=model.depth_layers,
    )


def recompute_memory(job: TrainingJob) -> GpuMemory | None:
    """The memory by which each step keeps layers; None if steps run the flags of recomputation."""
    config = job.config
    plans_layers = (config.recompute, job.sizes.recompute, config.cp_mode) == ("auto", "full", "fixed")
    if not plans_layers or job.trainer.keeping_changes(config.chunks) is not None:
        return None
    return gpu_memory(job, even_with_experts=True)


def document_memory(job: TrainingJob) -> Bound | None:
    """What memory allows a document that trains whole in chunks. None where memory is not looked at."""
    memory = gpu_memory(job)
    if memory is None:
        return None
    shape, layout = memory.shape, memory.layout
    capacity = chunk_capacity(memory.window, job.config.max_tokens, job.alignment)
    fitting_tokens = memory.longest_document(capacity)
    kib_per_token = keys_bytes(shape, layout) / layout.context / 1024
    return Bound(
        fitting_tokens, f"memory (keys and their gradients take {kib_per_token:,.1f} KiB a token of each GPU)"
    )


def whole_gib(total: int) -> int:
    """Bytes rounded down to a GiB: drivers differ by some MiB in what they keep of a like card, and one Lmax must come
    out on every rank. 84,929,413,120 and 64 MiB less are both 79 GiB."""
    return total >> 30 << 30


def adoptable_tokens(job: TrainingJob) -> int:
    """Up to which a saved run's Lmax may serve this one: 0 where a flag sets it, else what fits."""
    if job.given.max_tokens is not None:
        return 0
    memory = gpu_memory(job)
    if memory is None:
        return sys.maxsize
    try:
        return memory.whole()
    except WlbError:  # whole documents do not fit; with chunks a state brings no Lmax
        return 0


def fullest_stage(job: TrainingJob) -> Model:
    """The model of which a stage holds most layers, in workload.model's terms."""
    model = job.model
    dim, values = model.shape.head_dim, model.value_dim
    return replace(
        model.shape,
        layers=model.stage_layers + model.depth_layers,  # type: ignore[operator]  # both are numbers, or symbols
        head_dim=(dim + values) // 2 if narrow_values(dim, values) else dim,  # others are padded
    )
