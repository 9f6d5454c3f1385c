"""Builds the kernels' graphs before a step needs them: an empty call of each size, forward and backward.

Through autograd, since graphs belong to threads: forward in the caller's, backward in the engine's, where
recomputation runs forwards as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.graph_buckets import Bucket
from wlb_megatron.attention.pairs import side_by_side
from wlb_megatron.attention.sharded_attention import Kernels


def warm_up(
    kernels: Kernels,
    buckets: Iterable[tuple[bool, int | None, Bucket]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device | str,
    recompute: bool = False,
) -> int:
    """Run one call of each bucket (causal, window, sizes), one token in it; recompute: forward in backward, too.

    heads, kv_heads, dim, v_dim, scale: of the layers on this device, by which graphs are kept, too. Returns how many.
    """
    done = 0
    if not kernels.takes(dim, v_dim):
        v_dim = dim
    for causal, window, size in buckets:
        bounds = torch.ones(size.sequences + 1, dtype=torch.int32, device=device)
        bounds[0] = 0
        one = ((1, 1), *((0, 0),) * (size.sequences - 1))
        # A window's mask depends on whether queries are the keys (te_backend.py); their counts then are the same.
        others = bounds if size.queries == size.keys else bounds.clone()
        call = DeviceCall(causal, window, bounds, others, 1, 1, size.queries, size.keys, one)
        q = torch.zeros(size.queries, heads, dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (torch.zeros(size.keys, kv_heads, d, dtype=dtype, device=device) for d in (dim, v_dim))
        kv = side_by_side(k, v)
        out = _Once.apply(q, kv, call, kernels, scale, recompute)
        torch.autograd.grad(out, q, torch.zeros_like(out))
        done += 1
    return done


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, call: DeviceCall, kernels: Kernels, scale: float, recompute: bool
    ) -> Tensor:
        out, lse = kernels.forward(call, q, kv, scale)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.rest = call, kernels, scale, recompute
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        call, kernels, scale, recompute = ctx.rest
        if recompute:
            kernels.forward(call, q, kv, scale)
        dq, _ = kernels.backward(call, q, kv, out, lse, dout, scale)
        return dq, None, None, None, None, None
