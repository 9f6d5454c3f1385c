"""Chooses a layer's attention kernels: the first of the registry that are installed and fit the layer.

It imports neither torch nor flash_attn, because `wlb-megatron doctor` also calls it and may find neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from wlb_megatron.errors import WlbError, install
from wlb_megatron.registry import KERNELS, USUAL_KERNELS, load


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


def label(name: str) -> str:
    """How messages call kernels: cuDNN, FlashAttention-4, torch."""
    return KERNELS[name].label if name in KERNELS else name


def chosen(choice: str, layer: Layer) -> tuple[str, str]:
    """The name of a layer's kernels, and why they are not the preferred ones; "" if there is nothing to say.

    Raises WlbError if kernels are asked for that cannot serve the layer.

    Args:
        choice: auto, or a name in registry.KERNELS.
    """
    if choice != "auto":
        if why := lacks(choice, layer):
            raise WlbError(
                f"--wlb-kernels {choice} cannot be used: {why}; use --wlb-kernels auto, which takes "
                f"{label(USUAL_KERNELS)}'s kernels there"
            )
        return choice, ""
    reasons = []
    for name in KERNELS:
        why = lacks(name, layer)
        if why is None:
            break
        reasons.append(why)
    return name, reasons[0] if reasons else ""


def describe(name: str, why: str) -> str:
    """What `chosen` found, for a log."""
    version = "".join(f" {version}" for version in list(KERNELS[name].packages.values())[:1])
    preferred = label(next(iter(KERNELS)))
    return f"{label(name)}'s kernels{version}" + (f", not {preferred}'s: {why}" if why else "")


def not_installed(name: str) -> str | None:
    """Why these kernels cannot be called here; None if they can, as far as packages tell."""
    for package, tried_version in KERNELS[name].packages.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed ({install(KERNELS[name].extra)})"
        if installed != tried_version:
            return f"{package} is {installed}, tried is {tried_version}"
    return None


def lacks(name: str, layer: Layer) -> str | None:
    """Why these kernels cannot serve this layer here; None if they can."""
    unfit = KERNELS[name].unfit
    return not_installed(name) or (load(unfit)(layer) if unfit else None)


def unfit_for_fa4(layer: Layer) -> str | None:
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


def narrow_values(dim: int, v_dim: int) -> bool:
    """Whether FlashAttention-4 takes values narrower than keys without padding.

    Only DeepSeek's sizes were tested. Other values are padded with zeros.
    """
    return (dim, v_dim) == (192, 128)


def kernels(name: str, deterministic: bool = False) -> Any:
    """The backend of that name, a sharded_attention.Kernels."""
    return KERNELS[name].load()(deterministic)
