"""Stands in for Transformer Engine's FP8 with delayed scaling on CPUs: its collectives and its queues, no arithmetic.

After transformer_engine.pytorch 2.18 to 2.20: quantization.py (FP8GlobalStateManager), distributed.py (checkpoint).
"""

import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

state = SimpleNamespace(fp8_tensors_recompute_buffer=[])
passes: Counter[str] = Counter()
numbers = itertools.count()
recomputed: list[tuple[dict[Any, int], bool]] = []
"""Of the part of a model that runs to be recomputed: the number of each layer's scale, and whether it runs again."""


def stand_in() -> None:
    quantization = ModuleType("transformer_engine.pytorch.quantization")
    quantization.__dict__["FP8GlobalStateManager"] = SimpleNamespace(quantization_state=state)
    sys.modules[quantization.__name__] = quantization
    TransformerBlock.forward = reduced(TransformerBlock.forward)
    TransformerLayer.forward = scaled(TransformerLayer.forward)
    for name in (
        "megatron.core.recompute",
        "megatron.core.transformer.transformer_block",
    ):  # from 0.19, before
        if name in sys.modules:
            sys.modules[name].__dict__["te_checkpoint"] = checkpoint


def reduce(kind: str) -> None:
    """reduce_and_update_fp8_tensors: all ranks of the group must be in their n-th forward, or backward."""
    passes[kind] += 1
    place = 2 * passes[kind] + (kind == "backward")
    ends = torch.tensor([place, -place])
    group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, group)
    assert ends.tolist() == [place, -place], (
        f"{kind} {passes[kind]} of this rank met another pass of another one"
    )


def reduced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that ends its autocast, and reduces in its backward, too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            reduce("forward")
            output.register_hook(lambda _: reduce("backward"))
        return output

    return run


def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, which takes the next scale, or when it runs again the oldest one in its queue."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for scales, again in recomputed:
            if not hasattr(self, "queue"):
                self.queue = len(state.fp8_tensors_recompute_buffer)
                state.fp8_tensors_recompute_buffer.append(deque())
            queue = state.fp8_tensors_recompute_buffer[self.queue]
            if again:
                scale = queue.popleft()
                assert scale == scales[self], f"scale {scales[self]}, recomputed with {scale}"
            else:
                scales[self] = next(numbers)
                queue.append(scales[self])
        return forward(self, *args, **kwargs)

    return run


def checkpoint(function: Any, distribute: bool, tracker: Any, group: Any, *args: Any) -> Any:
    """te_checkpoint. What it runs again is in an autocast of its own, whose end reduces."""
    scales: dict[Any, int] = {}

    def run(*inputs: Any) -> Any:
        again = torch.is_grad_enabled()
        recomputed.append((scales, again))
        output = function(*inputs)
        recomputed.pop()
        if again:
            reduce("forward")
        return output

    return tensor_parallel.checkpoint(run, distribute, *args)
