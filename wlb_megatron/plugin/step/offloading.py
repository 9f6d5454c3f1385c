"""Fine-grained activation offloading of micro-batches that vary in length and number, and of documents in chunks.

Megatron's manager has a handler for each micro-batch, made in the first step. It takes handlers in the order of the
forwards, reloads the next one's activations while a backward runs, and does not offload what the next backward needs at
once. In a step in groups that order is the planned one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.step.grouped_steps import Running


def wrap_offload_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """OffloadTensorGroup.__init__ whose tensors are not kept in Megatron's pool of pinned memory.

    The pool keeps a tensor for every shape that it has met, for ever: micro-batches of ever new lengths would fill the
    host. Megatron leaves experts' tensors out of it for that reason; here all of them, as every length varies. Pinned
    memory then comes from PyTorch's cache, which rounds sizes up and uses it again.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        original(self, *args, **kwargs)
        if not getattr(get_args(), "wlb_off", True):
            self.use_cpu_pool = False

    return __init__


def begin_step(micro_batches: int) -> None:
    """Prepare Megatron's manager for a step of one model chunk a stage. With more micro-batches than before it begins
    anew, because it would keep the activations of those beyond on the GPU."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    manager, step = PipelineOffloadManager.OFFLOAD_MGR, part(Running).step
    if manager is None or manager._is_warmup:
        return
    if micro_batches > len(manager._cached_chunks_forward):
        PipelineOffloadManager.reset_instance()
    else:
        _order(manager, range(micro_batches) if step is None else step.order)


def _order(manager: Any, backwards: Sequence[int]) -> None:
    """Handlers of these micro-batches, as far as there are any yet."""
    handlers = manager._cached_chunks_forward
    manager._cached_chunks_backward = [handlers[number] for number in backwards if number < len(handlers)]


def wrap_commit_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """ChunkOffloadHandler.on_group_commit_backward: in a step in groups the next handler is that of the backward that
    runs."""

    def on_group_commit_backward(self: Any, name: str) -> Any:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

        manager, step = PipelineOffloadManager.get_instance(), part(Running).step
        if step is not None and manager.cur_backward_chunk() is not self:
            if manager._is_warmup:  # it makes handlers with the forwards
                _order(manager, step.order)
            order = manager._cached_chunks_backward
            manager._cur_backward_chunk = self
            manager._cached_chunks_index_backward = order.index(self) + 1 if self in order else len(order)
        return original(self, name)

    return on_group_commit_backward
