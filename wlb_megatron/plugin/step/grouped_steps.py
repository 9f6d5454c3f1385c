"""Steps whose backwards run last first inside groups of micro-batches, by Megatron's own schedules.

Over several stages `pipeline.orders.grouped_orders` is Megatron's 1F1B with a longer warm-up and its backwards in
another order. So Megatron's loop runs as it is. The communicator counts more stages, by as many as more forwards run
ahead. Each backward gets the tensors of the micro-batch whose turn it is, not those of the oldest one. On one stage
Megatron runs a backward right after its forward; here it waits for the last forward of its group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wlb_megatron.attention.key_cache import clear_caches
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.step.recompute_scales import put_scales, take_scales


class GroupedStep:
    """What a step in groups keeps: the tensors of each micro-batch between its forward and its backward."""

    def __init__(self, sizes: Sequence[int], stages: int) -> None:
        self.ahead = max(sizes) - 1 if stages > 1 else 0
        self._alone = stages == 1
        self._backwards = [step.micro_batch for step in grouped_orders(stages, sizes)[0] if step.backward]
        self._kept: dict[int, tuple[Any, Any, Any]] = {}
        self._forwards = self._done = 0

    def keep(self, input_tensor: Any, output_tensor: Any) -> None:
        """Tensors of the forward that has just run, and the scales for its recomputation."""
        self._kept[self._forwards] = input_tensor, output_tensor, take_scales()
        self._forwards += 1

    def backward(self, call: Callable[..., Any], gradient: Any, rest: tuple[Any, ...]) -> Any:
        """Run the backward whose turn it is, or on one stage all that can run now; gradients to its inputs."""
        if not self._alone:
            return self._next(call, gradient, rest)
        config = rest[-1]
        while self._done < len(self._backwards) and self._ready():
            last = self._done == len(self._backwards) - 1
            # Megatron has ended its no_sync when it calls the last backward, but others may still be waiting.
            quiet = contextlib.nullcontext if last or config.no_sync_func is None else config.no_sync_func
            with quiet():
                self._next(call, gradient, rest)
        return None

    def _ready(self) -> bool:
        return self._backwards[self._done] in self._kept

    def _next(self, call: Callable[..., Any], gradient: Any, rest: tuple[Any, ...]) -> Any:
        inputs, outputs, scales = self._kept.pop(self._backwards[self._done])
        put_scales(scales)
        self._done += 1
        result = call(inputs, outputs, gradient, *rest)
        # Megatron's own lists hold both until the turn of the oldest has come: free what they are not needed for.
        for held in (inputs, outputs):
            if isinstance(held, list):
                held.clear()
        return result


@dataclass(slots=True)
class Running:
    """step: the one in groups that runs, None in a step of Megatron's own order."""

    step: GroupedStep | None = None


@contextlib.contextmanager
def running(sizes: Sequence[int], micro_batches: int, chunks: int = 1) -> Iterator[None]:
    """Run one step of Megatron's schedule in groups of these sizes. Whatever ends it, nothing of it is left behind.

    sizes: of the groups, in order, of all the step's micro-batches; empty: the step is Megatron's own. chunks: model
    chunks of a stage. Raises RuntimeError where the step is of another number of micro-batches, or interleaved.
    """
    from megatron.core import parallel_state

    if not sizes:
        yield
        return
    if chunks > 1 or sum(sizes) != micro_batches:
        raise RuntimeError(
            f"groups of {list(sizes)} for {micro_batches} micro-batches on {chunks} model chunks a stage"
        )
    clear_caches()
    part(Running).step = GroupedStep(sizes, parallel_state.get_pipeline_model_parallel_world_size())
    try:
        yield
    finally:
        part(Running).step = None
        clear_caches()  # of a step that has failed; after a whole one nothing is left


def wrap_forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's forward of one micro-batch, whose tensors a step in groups keeps."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        step = part(Running).step
        if step is not None:
            step.keep(args[4] if len(args) > 4 else kwargs["input_tensor"], result[0])
        return result

    return forward_step


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's backward of the oldest micro-batch: in a step in groups, of the one whose turn it is."""

    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, *rest: Any) -> Any:
        step = part(Running).step
        if step is None:
            return original(input_tensor, output_tensor, output_tensor_grad, *rest)
        return step.backward(original, output_tensor_grad, rest)

    return backward_step


def wrap_total_stages(original: Callable[..., Any]) -> Callable[..., Any]:
    """P2PCommunicator.total_stages, from which 1F1B takes how many forwards run ahead."""

    def total_stages(self: Any) -> int:
        step = part(Running).step
        return original(self) + (0 if step is None else step.ahead)

    return total_stages
