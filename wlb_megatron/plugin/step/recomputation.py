"""Each step recomputes only the layers that this stage cannot keep, of each micro-batch its own number.

Megatron reads `recompute_num_layers` (method block) in every forward: layers [0, n) of a model chunk are recomputed.
The backward uses what that forward saved. So a number set before a micro-batch's forward holds for it alone. A
micro-batch that keeps no more than the flags say runs the flags, whatever their method.

A recomputed forward repeats the collectives inside its layers. So ranks that meet in one take the same plan: by the
least memory and the most bytes a token among them, exchanged when a step begins.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from wlb_megatron.packing.limits import GpuMemory
from wlb_megatron.pipeline.kept_layers import KeptLayers, plan_kept_layers
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.logs.metrics import Figures
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch
from wlb_megatron.plugin.model.delta_nets import is_delta_net
from wlb_megatron.plugin.model.routing import unwrapped
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.workload.memory import GIB, StageMemory
from wlb_megatron.workload.model import WHOLE, WHOLE_NET

LEAST_SCALE = 800
"""Measured over estimated memory is taken to be at least this many thousandths: another step may hold other things.
With experts of what they hold if all get equally many tokens."""

FORGET = 8
"""A step that needs less than estimated lowers the scale by this part of the difference. One that needs more raises it
by all of it."""

TELLING = 2
"""A step tells something of the estimate if its peak, planned or measured, is at least the budget divided by this. What
a small one holds is mostly of fixed size."""

RETRIED = 1100
"""Thousandths by which the scale grows after a step in which the allocator had to free its cache and try again."""

FRAGMENTS = 7
"""Where the allocator's segments cannot grow, one part in so many is left to fragments. On H200s of 60 GB, the first
full step left 7.8 of 55.8 GiB in pieces too small for its tensors (gpu_memory_cap)."""


@dataclass(slots=True)
class StepMemory:
    """What the step that ran last, or runs, was planned with and took. Bytes above what was allocated when it began.

    Args:
        available: bytes for activations.
        recomputed, by_flags, layers: in all micro-batches together, the layers that are recomputed, that the flags
            would recompute, and all.
    """

    available: int = 0
    planned_peak: int = 0
    measured_peak: int = 0
    recomputed: int = 0
    by_flags: int = 0
    layers: int = 0


@dataclass(slots=True)
class Recomputation:
    """What steps plan by, and what they have learnt.

    Args:
        memory, gpu: this stage's and the job's, by the memory model. None where steps run the flags.
        scale: measured over estimated bytes, in thousandths; it goes no lower than least_scale.
        allocated: bytes when the step began.
        numbers: layers to recompute [micro-batch][model chunk] in the step that runs, None outside of one.
        flags: method and number of each model chunk, as Megatron was given them.
        growing: the allocator's segments grow.
    """

    memory: StageMemory | None = None
    gpu: GpuMemory | None = None
    group: Any = None
    on_gpu: bool = False
    scale: int = 1000
    least_scale: int = LEAST_SCALE
    optimizer: int = 0
    retries: int = 0
    allocated: int = 0
    numbers: tuple[tuple[int, ...], ...] | None = None
    flags: list[tuple[str, int]] = field(default_factory=list)
    last: StepMemory = field(default_factory=StepMemory)
    suspended: bool = False
    growing: bool = True


def begin(gpu: GpuMemory | None, job: TrainingJob, *, registered: bool = False) -> str | None:
    """Plan recomputation from the next step on. Returns a line for the log, of the allocator.

    gpu: None where steps run the flags. registered: NCCL registers buffers (--use-nccl-ub). Called on every rank,
    once Megatron's groups of ranks are made.
    """
    if gpu is None:
        return None
    state = part(Recomputation)
    state.gpu, state.on_gpu = gpu, job.device.on_gpu
    state.group = _meeting_ranks(gpu, job.trainer.in_step)
    part(Figures).of_memory = figures
    if not state.on_gpu:
        return None
    state.growing, line = _grow_segments(registered)
    return line


def _grow_segments(registered: bool) -> tuple[bool, str | None]:
    """Let the segments of torch's allocator grow, if nobody has said how it allocates. Whether they do, and a line.

    Micro-batches differ in length: a fixed segment that held one's tensors has no room for the next one's.
    """
    by_user = any(f"PYTORCH_{device}ALLOC_CONF" in os.environ for device in ("", "CUDA_", "HIP_"))
    with contextlib.suppress(RuntimeError, KeyError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a newer torch renames the setter
        if not by_user and not registered:  # NCCL cannot register segments that grow
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        if torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
            setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            return True, None if by_user else f"sets {setting}: mixed lengths fragment fixed segments"
    cure = "--use-nccl-ub is off" if registered else "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"
    return False, f"leaves 1/{FRAGMENTS} of the memory to fragments: less if {cure}"


def _meeting_ranks(gpu: GpuMemory, in_step: bool) -> Any:
    """The process group of ranks that share collectives inside layers; None for a rank alone."""
    if in_step:
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if gpu.layout.tensor * gpu.layout.context > 1:
        return parallel_state.get_tensor_and_context_parallel_group()
    return None


@contextmanager
def planned(batches: Sequence[PlannedMicroBatch], chunks: Sequence[Any]) -> Iterator[None]:
    """Run one training step with its own recomputation. chunks: the stage's model chunks."""
    state = part(Recomputation)
    decoders = [decoder_of(chunk) for chunk in chunks]
    if not batches[0].loads or any(decoder is None for decoder in decoders):
        yield
        return
    if not state.flags:
        configs = [decoder.config for decoder in decoders]
        state.flags = [(config.recompute_method, config.recompute_num_layers) for config in configs]
    state.numbers = _plan(state, batches, decoders).recomputed
    rehearsed = batches[0].iteration < 0
    try:
        yield
        _measure(state, rehearsed=rehearsed)
    except torch.OutOfMemoryError as error:
        if rehearsed or state.last.recomputed == state.last.by_flags:
            raise  # the rehearsal says what to do, and the flags are not ours
        assert state.gpu is not None
        raise RefusedHere(
            f"memory ran out in a step that was planned to take {state.last.planned_peak / GIB:.1f} of "
            f"{state.last.available / GIB:.1f} GiB beside weights and optimizer: raise --wlb-memory-margin (now "
            f"{state.gpu.margin:g}), or set --wlb-recompute off ({str(error).splitlines()[0]})"
        ) from None
    finally:
        state.numbers = None
        for decoder, flags in zip(decoders, state.flags, strict=True):
            _set(decoder.config, *flags)


@contextmanager
def by_the_flags() -> Iterator[None]:
    """Steps that keep no more than the flags say, and learn what they take."""
    state = part(Recomputation)
    state.suspended = True
    try:
        yield
    finally:
        state.suspended = False


def prepare_forward(model: Any, micro_batch: int) -> None:
    """Set the number of layers that the coming forward of this micro-batch recomputes. model: a model chunk."""
    state = part(Recomputation)
    if state.numbers is None:
        return
    decoder = decoder_of(model)
    chunk = getattr(unwrapped(model), "vp_stage", None) or 0
    number = state.numbers[micro_batch][chunk]
    assert state.memory is not None
    if number == state.memory.chunks[chunk].recomputed:
        _set(decoder.config, *state.flags[chunk])
    else:
        _set(decoder.config, "block", number)


def decoder_of(model: Any) -> Any:
    """The block of transformer layers, None for a model that has none of its own."""
    return getattr(unwrapped(model), "decoder", None)


def layers_of(decoder: Any) -> int | str:
    """How many layers a block has; by their symbols, if some are of other kinds (HybridModel, gated delta nets)."""
    if (hybrid := getattr(decoder, "layer_type_list", None)) is not None:
        return "".join(hybrid)
    nets = [is_delta_net(getattr(layer, "self_attention", None)) for layer in decoder.layers]
    return "".join(WHOLE_NET if net else WHOLE for net in nets) if any(nets) else len(nets)


def _set(config: Any, method: str, number: int) -> None:
    config.recompute_method, config.recompute_num_layers = method, number


def _plan(state: Recomputation, batches: Sequence[PlannedMicroBatch], decoders: Sequence[Any]) -> KeptLayers:
    assert state.gpu is not None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if state.memory is None:
        layers = [layers_of(decoder) for decoder in decoders]
        state.memory = state.gpu.stage(stage, layers)
        if experts := state.gpu.shape.experts:
            even = replace(state.gpu.shape, experts=replace(experts, imbalance=100))
            balanced = replace(state.gpu, shape=even).stage(stage, layers)
            state.least_scale = LEAST_SCALE * balanced.chunks[0].kept // state.memory.chunks[0].kept
        state.optimizer = state.gpu.weights(stage)
    state.allocated, available = _available(state, stage)
    available = _agreed(state, available)
    groups = batches[0].chunk_groups or (1,) * len(batches)
    order = grouped_orders(stages, groups, len(decoders))[stage]
    usable = 0 if state.suspended else available * 1000 // state.scale
    plan = plan_kept_layers(order, batches[0].loads, state.memory, usable)
    numbers = plan.recomputed
    state.last = StepMemory(
        available=available,
        planned_peak=plan.peak * state.scale // 1000,
        recomputed=sum(map(sum, numbers)),
        by_flags=len(numbers) * sum(chunk.recomputed for chunk in state.memory.chunks),
        layers=len(numbers) * sum(chunk.layers for chunk in state.memory.chunks),
    )
    return plan


def _available(state: Recomputation, stage: int) -> tuple[int, int]:
    """Bytes allocated now, and bytes for a step's activations: the GPU's memory less the margin, less what is allocated
    here and held by others. Before the optimizer has made its states, the memory model says what they will take."""
    assert state.gpu is not None
    if not state.on_gpu:
        return 0, state.gpu.available(stage)
    free_bytes, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    other_bytes = total - free_bytes - reserved
    cap = min(_cap_of_torch(total), state.gpu.size)
    share = 1 - state.gpu.margin
    usable = min(int(total * share) - other_bytes, int(cap * share))
    torch.cuda.reset_peak_memory_stats()
    coming = max(0, state.optimizer - allocated)
    remaining = max(0, usable - allocated - coming)
    return allocated, remaining if state.growing else remaining - remaining // FRAGMENTS


def _cap_of_torch(total: int) -> int:
    """Bytes that torch may reserve on this device (torch.cuda.set_per_process_memory_fraction)."""
    fraction: Callable[[], float] | None = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return total if fraction is None else int(total * fraction())


def _agreed(state: Recomputation, available: int) -> int:
    """The least memory among the ranks that meet; their largest scale is kept."""
    if state.group is None:
        return available
    device = "cuda" if state.on_gpu else "cpu"
    figures = torch.tensor([-available, state.scale], dtype=torch.int64, device=device)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=state.group)
    least_bytes, state.scale = figures.tolist()
    return -least_bytes


def figures() -> dict[str, Any]:
    """Where steps plan what they recompute: the share of this stage's layers that the last step recomputed, and its
    peak above what was allocated before the step, planned and measured (GiB; measured 0 without a GPU)."""
    step = part(Recomputation).last
    if not step.layers:
        return {}
    return {
        "recomputed_share": step.recomputed / step.layers,
        "planned_peak_gib": step.planned_peak / GIB,
        "peak_gib": step.measured_peak / GIB,
        "available_gib": step.available / GIB,
    }


def _measure(state: Recomputation, *, rehearsed: bool) -> None:
    """Correct the estimate by the step that has run."""
    if not state.on_gpu:
        return
    state.last.measured_peak = torch.cuda.max_memory_allocated() - state.allocated
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    if not rehearsed:
        state.optimizer = 0  # its states are allocated from the first step's end on
    state.scale = corrected(state.scale, state.last, state.least_scale, retried=retries > state.retries)
    state.retries = retries


def corrected(scale: int, step: StepMemory, least_scale: int = LEAST_SCALE, *, retried: bool = False) -> int:
    """Measured over estimated bytes, in thousandths, after a step: up at once, down slowly.

    Planned 50 with scale 1000 and measured 60 of available 100: 1200. Measured 40 then: 1200 - (1200 - 960) / 8.
    """
    ratio = scale * step.measured_peak // max(1, step.planned_peak)
    if retried:
        return max(ratio, scale * RETRIED // 1000)
    if max(step.planned_peak, step.measured_peak) * TELLING < step.available:
        return scale
    return ratio if ratio > scale else max(least_scale, scale - (scale - ratio) // FORGET)
