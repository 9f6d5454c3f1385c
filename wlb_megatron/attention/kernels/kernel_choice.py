"""Chooses a layer's attention kernels: FlashAttention-4's if they are installed and fit the layer, else cuDNN's.

It imports neither torch nor flash_attn, because `wlb-megatron doctor` also calls it and may find neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from wlb_megatron.attention.kernels.fa4_shapes import narrow_values
from wlb_megatron.errors import WlbError, install

NAMES = {"cudnn": "cuDNN", "fa4": "FlashAttention-4", "torch": "torch"}
TRIED = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}
"""The tested versions; the extra `fa4` installs them. No other version is used, because flash-attn-4 is a beta with
private entry points, and its compiler's version matters as much."""


@dataclass(frozen=True)
class Layer:
    """The properties of a layer that decide which kernels fit it.

    dim, v_dim: channels of a head's queries and keys, and of its values. grouped: several query heads share a key
    head. dtype: torch's name of the dtype. capability: the GPU's compute capability, None without a GPU.
    """

    dim: int
    v_dim: int
    grouped: bool = False
    dtype: str = "bfloat16"
    capability: tuple[int, int] | None = None


def chosen(asked: str, layer: Layer) -> tuple[str, str]:
    """The kernels ("fa4" or "cudnn") and why not the other; the reason is "" if there is nothing to say.

    asked: one of config.KERNELS. Raises WlbError if FlashAttention-4 is asked for and cannot serve the layer.
    """
    if asked == "cudnn":
        return "cudnn", ""
    lacks = not_installed() or unfit(layer)
    if lacks is None:
        return "fa4", ""
    if asked == "fa4":
        raise WlbError(
            f"--wlb-kernels fa4 cannot be used: {lacks}; use --wlb-kernels auto, which takes cuDNN's kernels there"
        )
    return "cudnn", lacks


def describe(name: str, why: str) -> str:
    """What `chosen` found, for a log."""
    version = f" {TRIED['flash-attn-4']}" if name == "fa4" else ""
    return f"{NAMES[name]}'s kernels{version}" + (f", not FlashAttention-4's: {why}" if why else "")


def not_installed() -> str | None:
    """Why FlashAttention-4 cannot be called here; None if it can."""
    for package, tried in TRIED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed ({install('fa4')})"
        if installed != tried:
            return f"{package} is {installed}, tried is {tried}"
    return None


def unfit(layer: Layer) -> str | None:
    """Why FlashAttention-4 cannot serve this layer; None if it can."""
    dim, v_dim = layer.dim, layer.v_dim
    if layer.capability is None:
        return "there is no GPU"
    if layer.capability[0] != 9:
        return f"tested only on Hopper (compute capability 9.0), not on {layer.capability[0]}.{layer.capability[1]}"
    if layer.dtype not in ("bfloat16", "float16"):
        return f"it takes bf16 and fp16, not {layer.dtype}"
    if dim % 8 or dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {dim}"
    if layer.grouped and v_dim != dim and narrow_values(dim, v_dim):
        return f"its backward takes no values of {v_dim} channels beside grouped keys of {dim}"
    return None


def kernels(name: str, deterministic: bool = False) -> Any:
    """The backend of that name, a sharded_attention.Kernels."""
    if name == "fa4":
        from wlb_megatron.attention.kernels.fa4_backend import FlashAttention4Kernels

        return FlashAttention4Kernels(deterministic)
    from wlb_megatron.attention.kernels.te_backend import TransformerEngineKernels

    return TransformerEngineKernels(deterministic)
