"""The FlashAttention-4 backend (CuTe DSL), called below its autograd function.

Its kernels compile at the first call of a kind (mask, heads, window or none, up to 256 sequences or more), in some
seconds, for all sizes. So this backend prebuilds no graphs, keeps no spare rows and has no form for equal lengths.

Transformer Engine's own entry points do not work here. Its module makes an autograd node that does not accept a
log-sum-exp of all keys, so it cannot use the merged one. Below that module, 2.18 and 2.19 have only FlashAttention's
functions with such a node. 2.20 has these two, wrapped, in a private module. So this file calls FlashAttention-4
itself.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.fa4_shapes import narrow_values
from wlb_megatron.attention.pairs import apart

LEAST_LONGEST = 512
"""The kernels are given at least this as the longest sequence. If all sequences fit into one tile, they would compile
once more."""


class FlashAttention4Kernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def takes(self, dim: int, v_dim: int) -> bool:
        return narrow_values(dim, v_dim)

    def buffer_rows(self, call: DeviceCall) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k, v = apart(kv, q.shape[-1])
        out, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=scale, return_lse=True, **_bounds_and_mask(call)
        )
        return out, lse.t()  # of [heads, rows]

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (k, v), dkv = apart(kv, q.shape[-1]), torch.empty_like(kv)
        dk, dv = apart(dkv, q.shape[-1])
        dq, *_ = _flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse.t().contiguous(),
            softmax_scale=scale,
            deterministic=self.deterministic,
            dk=dk,
            dv=dv,
            **_bounds_and_mask(call),
        )
        return dq, dkv


def _bounds_and_mask(call: DeviceCall) -> dict[str, Any]:
    """Bounds and mask. A causal mask is bottom-right: the last query sees the last key."""
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_kv,
        "max_seqlen_q": max(call.max_q, LEAST_LONGEST),
        "max_seqlen_k": max(call.max_kv, LEAST_LONGEST),
        "causal": call.causal,
        "window_size_left": call.window,
    }
