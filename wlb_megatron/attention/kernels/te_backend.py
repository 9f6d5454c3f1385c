"""The Transformer Engine backend: its fused attention kernels (cuDNN), called below its modules.

DotProductAttention chooses a backend and makes an autograd node in each call, which takes 1.5 ms of host time forward
and backward. The entry points that it finally calls take a tenth of that. Measured with Transformer Engine 2.20,
cuDNN 9.19, H100.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels import graph_buckets
from wlb_megatron.attention.pairs import apart, side_by_side
from wlb_megatron.errors import WlbError

_BACKEND = FusedAttnBackend["F16_arbitrary_seqlen"]
# Keys and values of a token side by side, [t, 2, kv heads, dim]; it takes no such pair of two head dims.
_PAIRED, _SINGLE = {"thd": "thd_t2hd", "bshd": "bshd_bs2hd"}, {"thd": "thd_thd_thd", "bshd": "bshd_bshd_bshd"}
_expected: set[tuple[Any, ...]] = set()
"""Batches of equal sequences for which this process has kernels, see `expect`."""


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


def delayed_scales() -> list[tuple[Tensor, Tensor]]:
    """What FP8 with delayed scaling has learnt of every tensor that it has met: scales (fp32[n]) and histories of
    largest values (fp32[length, n]), by module and direction. They are its own: changed in place, it goes on with them.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    state = FP8GlobalStateManager.quantization_state
    return [
        pair
        for key, scales in state.global_scale_buffer.items()
        for pair in zip(scales, state.global_amax_history_buffer[key], strict=True)
    ]


class TransformerEngineKernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._rng: Tensor | None = None

    def takes(self, dim: int, v_dim: int) -> bool:
        """cuDNN 9.19 on Hopper: any up to 128, and DeepSeek's 192 / 128."""
        return v_dim % 8 == 0 and (dim <= 128 or (dim, v_dim) == (192, 128))

    def room(self, call: DeviceCall) -> tuple[int, int]:
        return graph_buckets.room(call)

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        form, (q, k, v) = self._form(call, q, kv)
        out, (stats, self._rng, *_) = fused_attn_fwd(
            True,
            call.max_q,
            call.max_kv,
            *form.bounds,
            q,
            k,
            v,
            q.dtype,
            _BACKEND,
            attn_scale=scale,
            qkv_layout=form.layout,
            o_format=form.rows,
            **form.told,
        )
        # The log-sum-exp is a natural logarithm, [t, heads, 1], of a batch [sequences, heads, queries, 1].
        if form.packed:
            return out, stats.squeeze(-1)
        return out.flatten(0, 1), stats.squeeze(-1).transpose(1, 2).flatten(0, 1).contiguous()

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        form, (q, k, v) = self._form(call, q, kv)
        stats = lse.unsqueeze(-1)
        if not form.packed:
            assert call.equal is not None
            out, dout, stats = (_batch(x, *call.equal[:2]) for x in (out, dout, stats))
            stats = stats.transpose(1, 2).contiguous()
        dq, dk, dv, *_ = fused_attn_bwd(
            call.max_q,
            call.max_kv,
            *form.bounds,
            q,
            k,
            v,
            out,
            dout,
            q.dtype,
            [stats, self._rng_state(q.device)],
            _BACKEND,
            attn_scale=scale,
            qkv_layout=form.layout,
            o_format=form.rows,
            do_format=form.rows,
            dqkv_layout=form.layout,
            deterministic=self.deterministic,
            **form.told,
        )
        if not form.packed:
            dq, dk, dv = (x.flatten(0, 1) for x in (dq, dk, dv))
        # By the layout asked for, dk and dv of one dim are the two halves of one [t, 2, kv heads, dim] buffer.
        _, heads, dim = dk.shape
        if (
            kv.dim() != 4
            or dv.data_ptr() - dk.data_ptr() != heads * dim * dk.element_size()
            or dk.stride(0) != 2 * heads * dim
        ):
            return dq, side_by_side(dk, dv)
        shape, stride = (len(dk), 2, heads, dim), (2 * heads * dim, heads * dim, dim, 1)
        return dq, dk.as_strided(shape, stride, dk.storage_offset())

    def expect(self, call: DeviceCall, q: Tensor, kv: Tensor) -> None:
        """From now on such calls go to the kernels for a batch of equal sequences: their graph must be worth it."""
        _expected.add(self._key(call, q, kv))

    def _key(self, call: DeviceCall, q: Tensor, kv: Tensor) -> tuple[Any, ...]:
        own = call.causal and call.cu_seqlens_q is call.cu_seqlens_kv  # as `_mask` asks for it
        return (call.equal, call.causal, call.window, own, self.deterministic, q.shape[1:], kv.shape[1:])

    def _form(self, call: DeviceCall, q: Tensor, kv: Tensor) -> tuple[_Form, tuple[Tensor, Tensor, Tensor]]:
        """How the call is put, and its queries, keys and values in that way."""
        k, v = apart(kv, q.shape[-1])
        layouts = _PAIRED if kv.dim() == 4 else _SINGLE
        if kv.dim() != 4:
            k, v = k.contiguous(), v.contiguous()
        mask, window = _mask(call)
        told: dict[str, Any] = {"attn_mask_type": mask, "window_size": window}
        if call.equal is None or self._key(call, q, kv) not in _expected:
            bounds = _rounded(call.cu_seqlens_q), _rounded(call.cu_seqlens_kv)
            told |= {"cu_seqlens_q_padded": bounds[0], "cu_seqlens_kv_padded": bounds[1]}
            return _Form("thd", layouts["thd"], bounds, told), (q, k, v)
        count, queries, keys = call.equal
        told["attn_mask_type"] = _UNPADDED[mask]
        batch = _batch(q, count, queries), _batch(k, count, keys), _batch(v, count, keys)
        return _Form("bshd", layouts["bshd"], (call.cu_seqlens_q, call.cu_seqlens_kv), told), batch

    def _rng_state(self, device: torch.device) -> Tensor:
        """Dropout's state, which the kernels want though there is none."""
        if self._rng is None:
            self._rng = torch.zeros(2, dtype=torch.int64, device=device)
        return self._rng


class _Form(NamedTuple):
    """rows: Transformer Engine's name for packed sequences, or for a batch of equal ones; layout: of all three.

    bounds: cu_seqlens of queries and of keys. told: mask and window, and of packed sequences the bounds once more: told
    by other tensors than these it takes padding for granted.
    """

    rows: str
    layout: str
    bounds: tuple[Tensor, Tensor]
    told: dict[str, Any]

    @property
    def packed(self) -> bool:
        return self.rows == "thd"


_UNPADDED = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}
"""Masks where all sequences are as long as the batch has room for."""


_rounded_bounds = WeakTensorKeyDictionary()
"""By the bounds of a micro-batch: all its layers share them."""


def _rounded(bounds: Tensor) -> Tensor:
    """cu_seqlens with empty sequences up to a number that many micro-batches have.

    With cuDNN 9.24 and later Transformer Engine keeps a forward's graph by the very number of sequences it is told;
    before, and for backward, it rounds that up itself, to the same numbers (graph_buckets.py).
    """
    count = len(bounds) - 1
    missing = graph_buckets.sequences_like(count) - count
    if not missing:
        return bounds
    found = _rounded_bounds.get(bounds)
    if found is None:
        found = _rounded_bounds[bounds] = torch.cat((bounds, bounds[-1:].expand(missing)))
    return found


def _batch(x: Tensor, count: int, rows: int) -> Tensor:
    """[count, rows, ..] of packed rows, of which there may be more."""
    return x[: count * rows].unflatten(0, (count, rows))


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
