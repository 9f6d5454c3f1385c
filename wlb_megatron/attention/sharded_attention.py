"""Attention of one rank's tokens to their documents' keys on all ranks: the one executor of all plans.

One autograd function around both kernel calls of a layer. Forward: keys begin to travel, the diagonals run on
local keys, then the rectangles on the exchanged ones, merged by log-sum-exp. Backward: each call's exact share
of the gradient, from the merged output and log-sum-exp; the gradients of exchanged keys travel back while the
diagonals run, where the plan has ranks in step, else after them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall, DeviceLayout
from wlb_megatron.attention.kv_exchange import start_gather, start_return
from wlb_megatron.attention.row_sums import add_rows, merge_rows


class Kernels(Protocol):
    """What a backend provides: plain variable-length attention, all rows covered.

    q, out, dout: [rows, heads, dim]; kv: [keys, 2, kv heads, dim]; lse: [rows, heads], log of the softmax
    denominator. All contiguous.
    """

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """dq and dkv through these keys, given out and lse of the softmax over all keys."""


def sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: DeviceLayout,
    group: Any,
    kernels: Kernels,
    scale: float,
    keep_keys: bool = True,
) -> Tensor:
    """[t, heads, dim] from q [t, heads, dim] and k, v [t, kv heads, dim], the rank's own tokens.

    group: the context-parallel process group. keep_keys: save the exchanged keys for backward, else exchange
    them again there. Raises ValueError where shapes do not fit the layout.
    """
    if q.shape[0] != layout.tokens or k.shape[0] != layout.tokens:
        raise ValueError(
            f"attention was given {q.shape[0]} queries and {k.shape[0]} keys, but the micro-batch's plan gives "
            f"this rank {layout.tokens} tokens: plan and data do not belong together"
        )
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must have one head dim"
        )
    return _ShardedAttention.apply(q, k, v, layout, group, kernels, scale, keep_keys)


class _ShardedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: DeviceLayout,
        group: Any,
        kernels: Kernels,
        scale: float,
        keep_keys: bool,
    ) -> Tensor:
        q = q.contiguous()
        kv = torch.stack((k, v), dim=1)  # one copy, whatever the strides: rows then travel as they are
        finish = start_gather(layout.exchange, kv, group) if layout.exchange else None
        out, lse = kernels.forward(layout.diagonals, q, kv, scale)
        earlier = finish() if finish else None
        if layout.rectangles and layout.queries:
            assert earlier is not None
            part = kernels.forward(layout.rectangles, q.index_select(0, layout.queries.owner), earlier, scale)
            merge_rows(out, lse, *part, layout.queries)
        ctx.save_for_backward(q, kv, earlier if keep_keys else None, out, lse)
        ctx.layout, ctx.group, ctx.kernels, ctx.scale = layout, group, kernels, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, earlier, out, lse = ctx.saved_tensors
        layout, group, kernels, scale = ctx.layout, ctx.group, ctx.kernels, ctx.scale
        dout = dout.contiguous()

        def diagonals() -> tuple[Tensor, Tensor]:
            return kernels.backward(layout.diagonals, q, kv, out, lse, dout, scale)

        if layout.exchange is None:
            dq, dkv = diagonals()
            return dq, dkv[:, 0], dkv[:, 1], None, None, None, None, None
        own = None
        if earlier is None:  # keys travel again, under the diagonals
            finish = start_gather(layout.exchange, kv, group)
            own = diagonals()
            earlier = finish()
        dq_part, dearlier = None, earlier
        if layout.rectangles:
            rows = layout.queries.owner
            picked = (x.index_select(0, rows) for x in (out, lse, dout))
            dq_part, dearlier = kernels.backward(
                layout.rectangles, q.index_select(0, rows), earlier, *picked, scale
            )
        if own is None and not layout.hide_return:
            own = diagonals()
        give_back = start_return(layout.exchange, dearlier, group)
        dq, dkv = own or diagonals()
        if dq_part is not None:
            add_rows(dq.flatten(1), dq_part.flatten(1), layout.queries)
        give_back(dkv)
        return dq, dkv[:, 0], dkv[:, 1], None, None, None, None, None
