"""A token's keys and values side by side in one row, so that they are gathered, sent and added as one."""

from __future__ import annotations

import torch
from torch import Tensor


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """[keys, 2, kv heads, dim], or [keys, kv heads, dim + v dim] where values are narrower: one copy, any strides."""
    return torch.stack((k, v), dim=1) if k.shape == v.shape else torch.cat((k, v), dim=-1)


def apart(kv: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys, [keys, kv heads, dim], and of the values."""
    return (kv[:, 0], kv[:, 1]) if kv.dim() == 4 else (kv[..., :dim], kv[..., dim:])
