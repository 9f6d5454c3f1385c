"""fp16: the loss that its scale multiplies is a mean over the global batch's tokens, as without the plugin.

Megatron sums a loss per token and divides the gradients by all tokens at the end. In fp16 a sum brings the largest
scale without overflow down by the number of tokens, and each step down throws an iteration's update away. The plan
knows the number beforehand, so losses are divided by it before their backward, and gradients not at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def mean_losses(config: Any, predicted: int) -> Iterator[None]:
    """A forward_backward call in which losses are divided by `predicted` tokens, all that the global batch predicts.

    config: the model's, which holds Megatron's functions for the loss scale and for reducing gradients. The losses of
    routers and of multi-token prediction take their scale from it, too.
    """
    scale, finalize = config.grad_scale_func, config.finalize_model_grads_func

    def scale_mean(loss: Any) -> Any:
        return (loss if scale is None else scale(loss)) / predicted

    def finalize_undivided(model: Any, num_tokens: Any = None, *rest: Any, **more: Any) -> Any:
        return finalize(model, None, *rest, **more)

    config.grad_scale_func, config.finalize_model_grads_func = scale_mean, finalize_undivided
    try:
        yield
    finally:
        config.grad_scale_func, config.finalize_model_grads_func = scale, finalize
