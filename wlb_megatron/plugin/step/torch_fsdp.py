"""Gradients of losses summed per token under --use-torch-fsdp2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrap_scale_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """TorchFullyShardedDataParallel.scale_gradients, which Megatron leaves empty.

    FSDP2 averages gradients over the data- and context-parallel ranks, whatever their tokens. Losses are sums over
    tokens here: 4 ranks' average, times 4, over all tokens is the gradient of the mean over tokens.
    """

    def scale_gradients(self: Any, scaling_factor: Any) -> None:
        from megatron.training import get_args

        if getattr(get_args(), "wlb_off", True):
            original(self, scaling_factor)
            return
        factor = scaling_factor * self.process_group.size()
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                local.mul_(factor)

    return scale_gradients
