"""Steps whose backwards run last first inside groups of micro-batches, by Megatron's own schedules.

Over several stages `pipeline.orders.grouped_orders` is Megatron's 1F1B with a longer warm-up and its backwards in
another order. So Megatron's loop runs as it is. The communicator counts more stages, by as many as more forwards run
ahead. Each backward gets the tensors of the micro-batch whose turn it is, not those of the oldest one. On one stage
Megatron runs a backward right after its forward; here it waits for the last forward of its group.

The interleaved schedule takes its warm-up and its table of forwards from two functions of Megatron's, which answer as
planned. Its backwards follow the same table, so their number tells the model chunk and the micro-batch.

FP8 with delayed scaling: in a forward that will be recomputed, each module of Transformer Engine appends its scale to a
queue, and the recomputation takes the oldest one (copy_forward_fp8_meta_tensors_for_recompute and
get_old_fp8_meta_tensors_for_recompute in its quantization.py). In groups backwards come last first: after forwards
0 1 2, the backward of 2 would get the scale of 0. So what a forward appends is kept with its micro-batch, and put back
right before its backward.

Fine-grained activation offloading: Megatron's manager has a handler for each micro-batch, made in the first step. It
takes handlers in the order of the forwards, reloads the next one's activations while a backward runs, and does not
offload what the next backward needs at once. In a step in groups that order is the planned one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from wlb_megatron.attention.kv_exchange import clear_caches
from wlb_megatron.pipeline.orders import grouped_orders, running_order
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.model import routing

_OUT_OF_TURN = (
    "out of turn: this Megatron's schedule is not one that wlb_megatron was tried with; set --wlb-chunks off"
)


class GroupedStep:
    """What a step in groups keeps: the tensors of each micro-batch and model chunk between forward and backward."""

    def __init__(self, sizes: Sequence[int], stages: int, chunks: int = 1) -> None:
        """chunks: model chunks of a stage."""
        self.ahead = max(sizes) - 1 if stages > 1 else 0
        self.running = running_order(stages, tuple(sizes), chunks)
        self._alone = stages == 1
        steps = grouped_orders(stages, sizes, chunks)[0]
        self._backwards = [(step.micro_batch, step.chunk) for step in steps if step.backward]
        self._kept: dict[tuple[int, int], tuple[Any, Any, Any, Any]] = {}
        self._forwards: Counter[int] = Counter()
        self._done = 0

    @property
    def order(self) -> list[int]:
        """Micro-batches in the order of their backwards, in every model chunk."""
        return [micro_batch for micro_batch, chunk in self._backwards if chunk == 0]

    def keep(self, chunk: int, input_tensor: Any, output_tensor: Any) -> None:
        """Tensors of the forward that has just run, through this model chunk, and what its recomputation needs."""
        forward = self._forwards[chunk], chunk
        if forward != self.running.table[self._forwards.total()]:
            raise RuntimeError(f"forward of micro-batch {forward[0]} in model chunk {chunk} {_OUT_OF_TURN}")
        self._kept[forward] = input_tensor, output_tensor, _take_scales(), part(routing.Routed).documents
        self._forwards[chunk] += 1

    def backward(self, call: Callable[..., Any], gradient: Any, args: tuple[Any, ...]) -> Any:
        """Run the backward whose turn it is, or on one stage all that can run now; gradients to its inputs."""
        if not self._alone:
            return self._next(call, gradient, args)
        config = args[-1]
        while self._done < len(self._backwards) and self._ready():
            last = self._done == len(self._backwards) - 1
            # Megatron has ended its no_sync when it calls the last backward, but others may still be waiting.
            quiet = contextlib.nullcontext if last or config.no_sync_func is None else config.no_sync_func
            with quiet():
                self._next(call, gradient, args)
        return None

    def _ready(self) -> bool:
        return self._backwards[self._done] in self._kept

    def _next(self, call: Callable[..., Any], gradient: Any, args: tuple[Any, ...]) -> Any:
        micro_batch, chunk = self._backwards[self._done]
        if not self._ready():
            raise RuntimeError(f"backward of micro-batch {micro_batch} in model chunk {chunk} {_OUT_OF_TURN}")
        inputs, outputs, scales, documents = self._kept.pop((micro_batch, chunk))
        _put_scales(scales)
        routing.begin(documents, in_backward=True)
        self._done += 1
        result = call(inputs, outputs, gradient, *args)
        # Megatron's own lists hold both until the turn of the oldest has come: free what they are not needed for.
        for tensors in (inputs, outputs):
            if isinstance(tensors, list):
                tensors.clear()
        if isinstance(inputs, torch.Tensor):  # the interleaved schedule passes them without a list
            inputs.grad = None
            inputs.data = inputs.new_empty(1)
        return result


@dataclass(slots=True)
class Running:
    """Of the planned step that runs. step: None in a step of Megatron's own order. shapes: see pipeline_shapes.py."""

    step: GroupedStep | None = None
    shapes: Any = None


@contextlib.contextmanager
def running(sizes: Sequence[int], chunks: int = 1) -> Iterator[None]:
    """Run one step of Megatron's schedule in groups of these sizes. Whatever ends it, nothing of it is left behind.

    sizes: micro-batches of each group, in order; empty if the step is Megatron's own. chunks: model chunks of a stage.
    """
    state, routed_chunks = part(Running), part(routing.Routed).chunked
    clear_caches()
    routed_chunks.clear()
    if sizes:
        state.step = GroupedStep(sizes, parallel_state.get_pipeline_model_parallel_world_size(), chunks)
    try:
        yield
    finally:
        state.step = state.shapes = None
        clear_caches()  # of a step that has failed; after a whole one nothing is left
        routed_chunks.clear()


def wrap_forward_step(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A schedule's forward of one micro-batch, whose tensors a step in groups keeps."""
    result = original(*args, **kwargs)
    step = part(Running).step
    if step is not None:
        inputs = args[4] if len(args) > 4 else kwargs["input_tensor"]
        step.keep(kwargs.get("vp_stage") or 0, inputs, result[0])
    return result


def wrap_backward_step(
    original: Original, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, *args: Any
) -> Any:
    """A schedule's backward of the oldest micro-batch: in a step in groups, of the one whose turn it is."""
    step = part(Running).step
    if step is None:
        return original(input_tensor, output_tensor, output_tensor_grad, *args)
    return step.backward(original, output_tensor_grad, args)


def wrap_total_stages(original: Original, self: Any) -> int:
    """P2PCommunicator.total_stages, by which 1F1B runs forwards ahead: more in a step with documents in chunks."""
    step = part(Running).step
    return original(self) + (0 if step is None else step.ahead)


def wrap_get_pp_rank_microbatches(original: Original, *args: Any, **kwargs: Any) -> Any:
    """get_pp_rank_microbatches as planned: how many forwards the interleaved schedule runs, whether all of them ahead,
    how many ahead, and how many not."""
    step, counts = part(Running).step, original(*args, **kwargs)
    if step is None:
        return counts
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    warm_up = step.running.ahead(stages, stage)
    return counts[0], warm_up == counts[0], warm_up, counts[0] - warm_up


def wrap_get_schedule_table(original: Original, *args: Any, **kwargs: Any) -> Any:
    """get_schedule_table as planned: (micro-batch, model chunk) of each forward of the interleaved schedule."""
    step = part(Running).step
    if step is None:
        return original(*args, **kwargs)
    return list(step.running.table)


def _take_scales() -> list[list[Any]]:
    """What the forward that has just run appended, by module. Nothing stays in the queues."""
    queues = _queues()
    scales = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    return scales


def _put_scales(scales: Sequence[Sequence[Any]]) -> None:
    """Append to the queues what _take_scales returned."""
    # Modules that ran later have queues behind these.
    for queue, of_module in zip(_queues(), scales, strict=False):
        queue.extend(of_module)


def _queues() -> Sequence[deque[Any]]:
    """By module. None where nothing has loaded Transformer Engine, so it is looked up and not imported."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None:
        return ()
    state = quantization.FP8GlobalStateManager.quantization_state
    queues: list[deque[Any]] = state.fp8_tensors_recompute_buffer
    return queues


def wrap_offload_group(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """OffloadTensorGroup.__init__ whose tensors are not kept in Megatron's pool of pinned memory.

    The pool keeps a tensor for every shape that it has met, for ever: micro-batches of ever new lengths would fill the
    host. Megatron leaves experts' tensors out of it for that reason; here all of them, as every length varies. Pinned
    memory then comes from PyTorch's cache, which rounds sizes up and uses it again.
    """
    original(self, *args, **kwargs)
    self.use_cpu_pool = False


def prepare_offloading(micro_batches: int) -> None:
    """Prepare Megatron's manager of offloading for a step of one model chunk a stage. With more micro-batches than
    before it begins anew, because it would keep the activations of those beyond on the GPU."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    manager, step = PipelineOffloadManager.OFFLOAD_MGR, part(Running).step
    if manager is None or manager._is_warmup:
        return
    if micro_batches > len(manager._cached_chunks_forward):
        PipelineOffloadManager.reset_instance()
    else:
        _order_handlers(manager, range(micro_batches) if step is None else step.order)


def _order_handlers(manager: Any, backwards: Sequence[int]) -> None:
    """Handlers of these micro-batches, as far as there are any yet."""
    handlers = manager._cached_chunks_forward
    manager._cached_chunks_backward = [handlers[number] for number in backwards if number < len(handlers)]


def wrap_commit_backward(original: Original, self: Any, name: str) -> Any:
    """ChunkOffloadHandler.on_group_commit_backward: in a step in groups the next handler is that of the backward that
    runs."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    manager, step = PipelineOffloadManager.get_instance(), part(Running).step
    if step is not None and manager.cur_backward_chunk() is not self:
        if manager._is_warmup:  # it makes handlers with the forwards
            _order_handlers(manager, step.order)
        order = manager._cached_chunks_backward
        manager._cur_backward_chunk = self
        manager._cached_chunks_index_backward = order.index(self) + 1 if self in order else len(order)
    return original(self, name)
