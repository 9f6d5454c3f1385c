"""Losses of a step: divided by tokens before their backward, and checked together.

Megatron sums a loss per token and divides the gradients by all tokens of the step at the end. Two kinds of steps divide
losses before their backward instead.
fp16: a sum brings the largest scale without overflow down by the number of tokens, and each step down throws an
iteration's update away. The plan knows the number beforehand, so losses are divided by it, and the scale multiplies a
mean, as without the plugin.
--wlb-token-weights equal: steps have more and fewer tokens, so a mean gives a token of a full step less weight. The
number is that of the global batch's windows in every step.

Megatron checks losses for NaN and infinity in each micro-batch. Each check waits for the device, and the host has then
launched nothing ahead. A sum of losses is NaN or infinite if one of them is, and no weight changes before the end of a
step. So the last micro-batch's check is of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wlb_megatron.plugin.job_state import part


@contextmanager
def divided_losses(config: Any, tokens: int) -> Iterator[None]:
    """A forward_backward call in which losses are divided by so many tokens.

    config: the model's, which holds Megatron's functions for the loss scale and for reducing gradients. The losses of
    routers and of multi-token prediction take their scale from it, too.
    """
    from megatron.core import parallel_state

    scale, finalize = config.grad_scale_func, config.finalize_model_grads_func

    def scale_divided(loss: Any) -> Any:
        return (loss if scale is None else scale(loss)) / tokens

    def finalize_undivided(model: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        # One token over all ranks. Without a number Megatron would not scale at all, and FSDP2's gradients, which are
        # averages over ranks, would not become sums (wrap_scale_gradients).
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return finalize(model, torch.full_like(num_tokens, int(first)), *args, **kwargs)

    config.grad_scale_func, config.finalize_model_grads_func = scale_divided, finalize_undivided
    try:
        yield
    finally:
        config.grad_scale_func, config.finalize_model_grads_func = scale, finalize


def wrap_scale_gradients(_: Callable[..., Any]) -> Callable[..., Any]:
    """TorchFullyShardedDataParallel.scale_gradients that divides by tokens, where Megatron does nothing.

    FSDP2 averages gradients over the data- and context-parallel ranks, whatever their tokens. Losses are sums over
    tokens here: 4 ranks' average, times 4, over all tokens is the gradient of the mean over tokens.
    """

    def scale_gradients(self: Any, scaling_factor: Any) -> None:
        factor = scaling_factor * self.process_group.size()
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                local.mul_(factor)

    return scale_gradients


@dataclass(slots=True)
class StepLosses:
    """remaining: how many losses of the step are not yet there. total: the sum of the others."""

    remaining: int = 0
    total: torch.Tensor | None = None


def check_together(micro_batches: int) -> None:
    """The losses of so many micro-batches are checked together."""
    part(StepLosses).remaining, part(StepLosses).total = micro_batches, None


def to_check(loss: torch.Tensor) -> torch.Tensor | None:
    """What to check now that `loss` is there: the step's sum with its last one, before that nothing."""
    step = part(StepLosses)
    step.total = loss.detach() if step.total is None else step.total + loss.detach()
    step.remaining -= 1
    if step.remaining > 0:
        return None
    total, step.total = step.total, None
    return total


@contextmanager
def unchecked() -> Iterator[None]:
    """In a `with` block Megatron's rerun state machine validates nothing, so it counts no call and learns no size.

    After a NaN it compares the n-th call of a step with the n-th of its rerun, which a second job makes on another GPU.
    If that job rehearsed in the step, rehearsed calls would come first: the machine would compare one of them with the
    NaN, and accuse the first job's GPU.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    machine.validate_result = lambda *_, **__: (
        None
    )  # its mode `disabled` still ends a job, at a NaN that nobody uses
    try:
        yield
    finally:
        del machine.validate_result
