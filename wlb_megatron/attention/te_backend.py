"""Transformer Engine's fused attention kernels (cuDNN), called below its modules.

Its DotProductAttention chooses a backend and makes an autograd node in each call, 1.5 ms of host time forward
and backward; the entry points it calls in the end take a tenth. Seen with Transformer Engine 2.20, cuDNN 9.19, H100.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.pairs import apart, side_by_side
from wlb_megatron.errors import WlbError

_BACKEND = FusedAttnBackend["F16_arbitrary_seqlen"]
# Keys and values of a token side by side, [t, 2, kv heads, dim]; it takes no such pair of two head dims.
_PAIRED, _SINGLE = "thd_t2hd", "thd_thd_thd"


def refuse_unfit(dim: int, capability: tuple[int, int] | None) -> None:
    """Raise WlbError for what these kernels cannot do: head dims, or a GPU's compute capability (None: no GPU)."""
    if dim % 8 or dim > 256:
        raise WlbError(
            f"cuDNN's attention takes head dims that are multiples of 8 up to 256, not {dim}: change --kv-channels"
        )
    if capability is not None and capability < (9, 0):
        raise WlbError(
            f"cuDNN's attention over packed documents needs Hopper or newer (compute capability 9.0), this GPU has "
            f"{capability[0]}.{capability[1]}: train without wlb_megatron there"
        )


class TransformerEngineKernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._rng: Tensor | None = None

    def takes(self, dim: int, v_dim: int) -> bool:
        """cuDNN 9.19 on Hopper: any up to 128, and DeepSeek's 192 / 128."""
        return v_dim % 8 == 0 and (dim <= 128 or (dim, v_dim) == (192, 128))

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        mask, window = _mask(call)
        k, v, layout = _keys_and_values(kv, q.shape[-1])
        out, (stats, self._rng, *_) = fused_attn_fwd(
            True,
            call.max_q,
            call.max_kv,
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            q,
            k,
            v,
            q.dtype,
            _BACKEND,
            cu_seqlens_q_padded=call.cu_seqlens_q,
            cu_seqlens_kv_padded=call.cu_seqlens_kv,
            attn_scale=scale,
            qkv_layout=layout,
            o_format="thd",
            attn_mask_type=mask,
            window_size=window,
        )
        return out, stats.squeeze(-1)  # [t, heads, 1], natural logarithm

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        mask, window = _mask(call)
        k, v, layout = _keys_and_values(kv, q.shape[-1])
        dq, dk, dv, *_ = fused_attn_bwd(
            call.max_q,
            call.max_kv,
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            q,
            k,
            v,
            out,
            dout,
            q.dtype,
            [lse.unsqueeze(-1), self._rng_state(q.device)],
            _BACKEND,
            cu_seqlens_q_padded=call.cu_seqlens_q,
            cu_seqlens_kv_padded=call.cu_seqlens_kv,
            attn_scale=scale,
            qkv_layout=layout,
            o_format="thd",
            do_format="thd",
            dqkv_layout=layout,
            attn_mask_type=mask,
            window_size=window,
            deterministic=self.deterministic,
        )
        # By the layout asked for, dk and dv of one dim are the two halves of one [t, 2, kv heads, dim] buffer.
        _, heads, dim = dk.shape
        if (
            layout != _PAIRED
            or dv.data_ptr() - dk.data_ptr() != heads * dim * dk.element_size()
            or dk.stride(0) != 2 * heads * dim
        ):
            return dq, side_by_side(dk, dv)
        shape, stride = (len(dk), 2, heads, dim), (2 * heads * dim, heads * dim, dim, 1)
        return dq, dk.as_strided(shape, stride, dk.storage_offset())

    def _rng_state(self, device: torch.device) -> Tensor:
        """Dropout's state, which the kernels want though there is none."""
        if self._rng is None:
            self._rng = torch.zeros(2, dtype=torch.int64, device=device)
        return self._rng


def _keys_and_values(kv: Tensor, dim: int) -> tuple[Tensor, Tensor, str]:
    k, v = apart(kv, dim)
    return (k, v, _PAIRED) if kv.dim() == 4 else (k.contiguous(), v.contiguous(), _SINGLE)


def _mask(call: DeviceCall) -> tuple[str, tuple[int, int]]:
    """Mask and window by Transformer Engine's names; "padding" says that sequences have lengths of their own.

    Where queries and keys are as many, the top-left mask is the bottom-right one, and its backward is faster.
    """
    if not call.causal:
        return "padding", (-1, -1)
    left = -1 if call.window is None else call.window
    if call.cu_seqlens_q is call.cu_seqlens_kv:
        return "padding_causal", (left, 0)
    return "padding_causal_bottom_right", (left, 0)
