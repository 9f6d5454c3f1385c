"""The FlashAttention-4 backend (CuTe DSL), called below its autograd function.

Its kernels compile at the first call of a kind (mask, heads, window or none, up to 256 sequences or more), in some
seconds, for all sizes. So this backend prebuilds no graphs, keeps no spare rows and has no form for equal lengths.

Transformer Engine's own entry points do not work here. Its module makes an autograd node that does not accept a
log-sum-exp of all keys, so it cannot use the merged one. Below that module, 2.18 and 2.19 have only FlashAttention's
functions with such a node. 2.20 has these two, wrapped, in a private module. So fa4_launches.py calls FlashAttention-4
itself.
"""

from __future__ import annotations

from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels import fa4_launches
from wlb_megatron.attention.kernels.fa4_shapes import narrow_values


class FlashAttention4Kernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def takes(self, dim: int, v_dim: int) -> bool:
        return narrow_values(dim, v_dim)

    def buffer_rows(self, call: DeviceCall) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = fa4_launches.forward(call, q, kv, scale)
        return out, lse.t()  # of [heads, rows]

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        by_heads = lse.t().contiguous()
        return fa4_launches.backward(call, q, kv, out, by_heads, dout, scale, self.deterministic)
