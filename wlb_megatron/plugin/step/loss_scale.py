"""Losses that are divided by a number of tokens before their backward, in place of gradients at the end.

Megatron sums a loss per token and divides the gradients by all tokens of the step at the end.
fp16: a sum brings the largest scale without overflow down by the number of tokens, and each step down throws an
iteration's update away. The plan knows the number beforehand, so losses are divided by it, and the scale multiplies a
mean, as without the plugin.
--wlb-token-weights equal: steps have more and fewer tokens, so a mean gives a token of a full step less weight. The
number is that of the global batch's windows in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def divided_losses(config: Any, tokens: int) -> Iterator[None]:
    """A forward_backward call in which losses are divided by so many tokens.

    config: the model's, which holds Megatron's functions for the loss scale and for reducing gradients. The losses of
    routers and of multi-token prediction take their scale from it, too.
    """
    import torch
    from megatron.core import parallel_state

    scale, finalize = config.grad_scale_func, config.finalize_model_grads_func

    def scale_divided(loss: Any) -> Any:
        return (loss if scale is None else scale(loss)) / tokens

    def finalize_undivided(model: Any, num_tokens: Any, *rest: Any, **more: Any) -> Any:
        # One token over all ranks. Without a number Megatron would not scale at all, and FSDP2's gradients, which are
        # averages over ranks, would not become sums (torch_fsdp.py).
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return finalize(model, torch.full_like(num_tokens, int(first)), *rest, **more)

    config.grad_scale_func, config.finalize_model_grads_func = scale_divided, finalize_undivided
    try:
        yield
    finally:
        config.grad_scale_func, config.finalize_model_grads_func = scale, finalize
