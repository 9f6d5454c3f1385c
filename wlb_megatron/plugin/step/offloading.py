"""Fine-grained activation offloading of micro-batches that vary in length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
