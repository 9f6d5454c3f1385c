"""Attention of one rank's tokens to their documents' keys on all ranks: the one executor of all plans.

One autograd function around all kernel calls of a layer. Forward: keys begin to travel, the diagonals run on
local keys, then the calls on exchanged keys; results are merged by log-sum-exp. Backward: each call's exact
share of the gradient from the merged output and log-sum-exp; gradients of exchanged keys travel back while the
diagonals run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall, DeviceLayout
from wlb_megatron.attention.kv_exchange import start_gather, start_return
from wlb_megatron.attention.merge import merge_into


class Kernels(Protocol):
    """What a backend provides. q, out, dout: [rows, heads, dim]; kv: [keys, 2, kv heads, dim]; lse: [rows, heads]."""

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp. Output rows that the call skips are zero; their log-sum-exp is undefined."""

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """dq and dkv of these keys, given the whole softmax's out and lse. Rows not touched are zero."""


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
        gathered = None
        out = lse = None
        for call in layout.calls:
            keys = kv
            if call.gathered:
                if gathered is None:
                    assert finish is not None
                    gathered = finish()
                keys = gathered
            rows = slice(*call.rows)
            part, part_lse = kernels.forward(call, q[rows], keys, scale)
            if call.skipped is not None:
                part_lse.masked_fill_(call.skipped.unsqueeze(-1), float("-inf"))
            if out is None or lse is None:
                if call.rows == (0, layout.tokens):
                    out, lse = part, part_lse
                    continue
                out = torch.zeros_like(q)
                lse = part_lse.new_full(q.shape[:2], float("-inf"))
            if call.fresh:
                out[rows], lse[rows] = part, part_lse
            else:
                merge_into(out[rows], lse[rows], part, part_lse)
        if finish is not None and gathered is None:
            gathered = finish()  # this rank needs no keys, others need its own
        if out is None or lse is None:
            out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2])
        ctx.save_for_backward(q, kv, gathered if keep_keys else None, out, lse)
        ctx.layout, ctx.group, ctx.kernels, ctx.scale = layout, group, kernels, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, gathered, out, lse = ctx.saved_tensors
        layout, group = ctx.layout, ctx.group
        dout = dout.contiguous()
        local = [call for call in layout.calls if not call.gathered]
        remote = [call for call in layout.calls if call.gathered]
        finish = None
        # Keys at hand: rectangles first, so that their gradients travel under the diagonals. Otherwise the
        # keys travel again under the diagonals.
        order = remote + local
        if layout.exchange and gathered is None:
            finish = start_gather(layout.exchange, kv, group)
            order = local + remote
            if not remote:
                finish()
        dq: Tensor | None = None
        dkv: Tensor | None = None
        dgathered: Tensor | None = None
        back = None
        for index, call in enumerate(order):
            if call.gathered and gathered is None:
                assert finish is not None
                gathered = finish()
            rows = slice(*call.rows)
            keys = gathered if call.gathered else kv
            part, dkeys = ctx.kernels.backward(
                call, q[rows], keys, out[rows], lse[rows], dout[rows], ctx.scale
            )
            if dq is None:
                dq = part if call.rows == (0, layout.tokens) else torch.zeros_like(q)
                if dq is not part:
                    dq[rows] = part
            else:
                dq[rows] += part
            if call.gathered:
                dgathered = dkeys if dgathered is None else dgathered.add_(dkeys)
            else:
                dkv = dkeys if dkv is None else dkv.add_(dkeys)
            if remote and index + 1 == (len(remote) if order[0].gathered else len(order)):
                assert dgathered is not None
                back = start_return(layout.exchange, dgathered, group)
        if layout.exchange and back is None:
            back = start_return(layout.exchange, kv.new_empty((0, *kv.shape[1:])), group)
        if back is not None:
            returned = back()
            dkv = returned if dkv is None else dkv.add_(returned)
        if dq is None or dkv is None:
            dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
        return dq, dkv[:, 0], dkv[:, 1], None, None, None, None, None
