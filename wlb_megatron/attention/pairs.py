"""Stores a token's keys and values side by side in one row, to gather, send and add them together."""

from __future__ import annotations

import torch
from torch import Tensor


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """[keys, 2, kv heads, dim], or [keys, kv heads, dim + v dim] if values are narrower: one copy, from any strides."""
    if k.shape != v.shape:
        return torch.cat((k, v), dim=-1)
    if _in_sixteens(k) and _in_sixteens(v):
        # A GPU's strided stack is slow 2 bytes at a time: 0.12 ms for 32K keys of 4 heads of 128, so 0.03 (H200).
        complex_pairs = torch.stack((k.view(torch.complex128), v.view(torch.complex128)), dim=1)
        return complex_pairs.view(k.dtype)
    return torch.stack((k, v), dim=1)


def grads_apart(dkv: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The two halves of side_by_side's gradient, each contiguous if they have the same dim.

    The next operation (a rotation, a concatenation) is slow on strided ones: 0.6 ms for 32K keys of 4 heads.
    """
    if dkv.dim() != 4:
        return apart(dkv, dim)
    in_sixteens = _in_sixteens(dkv)
    halves = (dkv.view(torch.complex128) if in_sixteens else dkv).transpose(0, 1).contiguous()
    dk, dv = halves.view(dkv.dtype) if in_sixteens else halves
    return dk, dv


def _in_sixteens(x: Tensor) -> bool:
    """Whether every row of the last dimension is a multiple of 16 bytes long, and starts at a multiple of 16 bytes."""
    *steps, last = x.stride()
    bits = x.storage_offset() | x.shape[-1]
    for step in steps:
        bits |= step
    # The elements in 16 bytes are a power of two, which divides numbers without any lower bits.
    return last == 1 and not bits & (16 // x.element_size() - 1) and not x.data_ptr() & 15


def apart(kv: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys, [keys, kv heads, dim], and of the values."""
    if kv.dim() != 4:
        return kv[..., :dim], kv[..., dim:]
    k, v = kv.unbind(1)
    return k, v
