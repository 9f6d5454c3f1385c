"""megatron.core on CPU tensors in a process of its own, on a machine that may have GPUs: for small checks alone."""

from __future__ import annotations

import sys
from typing import Any


def run_without_gpu() -> None:
    """Call before megatron is imported, with CUDA_VISIBLE_DEVICES empty. Does nothing under wlb_megatron/cpu."""
    if "cpu_cuda" in sys.modules:  # of wlb_megatron/cpu
        return
    for package in ("transformer_engine", "apex"):  # Megatron takes their kernels wherever it finds them
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        """torch functions with the CUDA device that Megatron names replaced by the CPU."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if _names_gpu(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.cuda:
                return args[0]
            return func(*args, **kwargs)

    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    OnCpu().__enter__()


class _Stream:
    """On which everything has already happened."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _names_gpu(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")
