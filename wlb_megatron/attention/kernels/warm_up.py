"""Builds kernels before a step needs them, by an empty call of each kind or size, forward and backward.

The calls go through autograd, because graphs belong to threads: forward in the caller's thread, backward in the
engine's. Recomputation also runs forwards in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.graph_buckets import Bucket, Equal, Warmable
from wlb_megatron.attention.pairs import side_by_side
from wlb_megatron.attention.sharded_attention import Kernels


class GraphKernels(Kernels, Protocol):
    """Kernels that run from graphs cached by size, as cuDNN's do."""

    def expect(self, call: DeviceCall, q: Tensor, kv: Tensor) -> None:
        """Announces that calls of exactly these sizes (`call.equal`) will recur, so that they may get their own
        kernels.
        """


def warm_up(
    kernels: Kernels,
    graphs: Iterable[Warmable],
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
    """Runs one call of each graph (causal, window, sizes), and returns how many.

    A bucket of sizes gets one token. Equal sequences are run at full size, and the kernels expect them from then on.
    With `recompute` the forward also runs in backward. `heads`, `kv_heads`, `dim`, `v_dim` and `scale` are those of
    the layers on this device; graphs are cached by these, too.
    """
    calls = 0
    if not kernels.takes(dim, v_dim):
        v_dim = dim
    for causal, window, size in graphs:
        call = _call(causal, window, size, device)
        q = torch.zeros(call.q_rows, heads, dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (torch.zeros(call.kv_rows, kv_heads, d, dtype=dtype, device=device) for d in (dim, v_dim))
        kv = side_by_side(k, v)
        if call.equal:
            cast(GraphKernels, kernels).expect(call, q, kv)
        out = _Once.apply(q, kv, call, kernels, scale, recompute)
        torch.autograd.grad(out, q, torch.zeros_like(out))
        calls += 1
    return calls


def _call(causal: bool, window: int | None, size: Bucket | Equal, device: torch.device | str) -> DeviceCall:
    count, queries, keys = size
    if isinstance(size, Equal):
        first, further_size, rows = (queries, keys), (queries, keys), (count * queries, count * keys)
    else:
        first, further_size, rows = (1, 1), (0, 0), (queries, keys)
    sizes = (first, *(further_size,) * (count - 1))
    bounds_q, bounds_kv = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device)
        for side in zip(*sizes, strict=True)
    )
    # The mask depends on whether queries are the keys (te_backend.py), which then are equally many.
    bounds_kv = bounds_q if queries == keys else bounds_kv
    return DeviceCall(
        causal, window, bounds_q, bounds_kv, *first, *rows, sizes, size if isinstance(size, Equal) else None
    )


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
