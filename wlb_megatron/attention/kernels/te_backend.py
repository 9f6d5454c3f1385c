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

from wlb_megatron.attention.kernels.before_training import buffer_rows, sequences_like
from wlb_megatron.attention.kernels.row_sums import apart, side_by_side
from wlb_megatron.errors import WlbError
from wlb_megatron.sharding.attention_calls import AttentionCall

_BACKEND = FusedAttnBackend["F16_arbitrary_seqlen"]
# A token's keys and values side by side, [t, 2, kv heads, dim]. Not possible with two different head dims.
_PAIRED, _SINGLE = {"thd": "thd_t2hd", "bshd": "bshd_bs2hd"}, {"thd": "thd_thd_thd", "bshd": "bshd_bshd_bshd"}
_expected: set[tuple[Any, ...]] = set()
"""Batches of equal sequences for which this process has kernels; see `expect`."""


def refuse_unfit(dim: int, capability: tuple[int, int] | None) -> None:
    """Raises WlbError for head dims or a compute capability (None: no GPU) that these kernels do not support."""
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
    """The state of FP8 with delayed scaling for every tensor, by module and direction.

    Scales (fp32[n]) and histories of largest values (fp32[length, n]). These are the live tensors: FP8 continues with
    changes made in place.
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

    separate = False

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._rng: Tensor | None = None

    def takes(self, dim: int, v_dim: int) -> bool:
        """cuDNN 9.19 on Hopper takes any head dims up to 128, and DeepSeek's 192 / 128."""
        return v_dim % 8 == 0 and (dim <= 128 or (dim, v_dim) == (192, 128))

    def buffer_rows(self, call: AttentionCall) -> tuple[int, int]:
        return buffer_rows(call)

    def forward(self, call: AttentionCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        form, (q, k, v) = self._form(call, q, kv)
        inputs = q, k, v, q.dtype, _BACKEND
        out, (stats, self._rng, *_) = fused_attn_fwd(
            True, call.max_q, call.max_kv, *form.bounds, *inputs, attn_scale=scale, **form.options
        )
        # The log-sum-exp is a natural logarithm, [t, heads, 1], of a batch [sequences, heads, queries, 1].
        if form.packed:
            return out, stats.squeeze(-1)
        return out.flatten(0, 1), stats.squeeze(-1).transpose(1, 2).flatten(0, 1).contiguous()

    def backward(
        self, call: AttentionCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        form, (q, k, v) = self._form(call, q, kv)
        stats = lse.unsqueeze(-1)
        if self._rng is None:  # dropout's state, which the kernels require even without dropout
            self._rng = torch.zeros(2, dtype=torch.int64, device=q.device)
        if not form.packed:
            assert call.equal is not None
            out, dout, stats = (_batch(x, *call.equal[:2]) for x in (out, dout, stats))
            stats = stats.transpose(1, 2).contiguous()
        inputs = q, k, v, out, dout, q.dtype, [stats, self._rng], _BACKEND
        formats = {"do_format": form.options["o_format"], "dqkv_layout": form.options["qkv_layout"]}
        try:
            dq, dk, dv, *_ = fused_attn_bwd(
                *(call.max_q, call.max_kv, *form.bounds, *inputs),
                attn_scale=scale,
                deterministic=self.deterministic,
                **formats,
                **form.options,
            )
        except torch.OutOfMemoryError as error:
            if not self.deterministic:
                raise
            # Hopper, cuDNN before 9.25: 16 heads and 32 sequences of up to 16K tokens take 256 GiB.
            raise WlbError(
                "cuDNN's deterministic backward takes 2 bytes for each head, each document and each pair of tokens of "
                "the longest one: use flash-attn-4 (--wlb-kernels fa4), or drop --deterministic-mode and "
                f"NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 ({'. '.join(str(error).split('. ')[:2])})"
            ) from None
        if not form.packed:
            dq, dk, dv = (x.flatten(0, 1) for x in (dq, dk, dv))
        # With this layout, dk and dv of the same dim are the two halves of one [t, 2, kv heads, dim] buffer.
        _, heads, dim = dk.shape
        if (
            kv.dim() != 4
            or dv.data_ptr() - dk.data_ptr() != heads * dim * dk.element_size()
            or dk.stride(0) != 2 * heads * dim
        ):
            return dq, side_by_side(dk, dv)
        shape, stride = (len(dk), 2, heads, dim), (2 * heads * dim, heads * dim, dim, 1)
        return dq, dk.as_strided(shape, stride, dk.storage_offset())

    def expect(self, call: AttentionCall, q: Tensor, kv: Tensor) -> None:
        """Sends such calls to the kernels for a batch of equal sequences from now on, so their graph must be worth
        building.
        """
        _expected.add(self._key(call, q, kv))

    def _key(self, call: AttentionCall, q: Tensor, kv: Tensor) -> tuple[Any, ...]:
        shapes = self.deterministic, q.shape[1:], kv.shape[1:]
        return call.equal, *_mask(call), *shapes

    def _form(
        self, call: AttentionCall, q: Tensor, kv: Tensor
    ) -> tuple[_Form, tuple[Tensor, Tensor, Tensor]]:
        """The form in which the call is made, with its queries, keys and values in that form."""
        k, v = apart(kv, q.shape[-1])
        layouts = _PAIRED if kv.dim() == 4 else _SINGLE
        if kv.dim() != 4:
            k, v = k.contiguous(), v.contiguous()
        mask, window = _mask(call)
        if call.equal is None or self._key(call, q, kv) not in _expected:
            bounds = _rounded(call.cu_seqlens_q), _rounded(call.cu_seqlens_kv)
            # The same bounds again: with other tensors it would assume padding.
            same = {"cu_seqlens_q_padded": bounds[0], "cu_seqlens_kv_padded": bounds[1]}
            options = {"attn_mask_type": mask, "window_size": window, "o_format": "thd", **same}
            return _Form(True, bounds, options | {"qkv_layout": layouts["thd"]}), (q, k, v)
        count, queries, keys = call.equal
        # Every sequence has the batch's full length.
        mask = "no_mask" if mask == "padding" else mask.removeprefix("padding_")
        options = {"attn_mask_type": mask, "window_size": window, "o_format": "bshd"}
        batch = _batch(q, count, queries), _batch(k, count, keys), _batch(v, count, keys)
        bounds = call.cu_seqlens_q, call.cu_seqlens_kv
        return _Form(False, bounds, options | {"qkv_layout": layouts["bshd"]}), batch


class _Form(NamedTuple):
    """How Transformer Engine is called: for packed sequences, or for a batch of equal ones.

    bounds: cu_seqlens of queries and of keys. options: its names for mask, window and layouts.
    """

    packed: bool
    bounds: tuple[Tensor, Tensor]
    options: dict[str, Any]


_rounded_bounds = WeakTensorKeyDictionary()
"""Rounded bounds by the bounds of a micro-batch, shared by all its layers."""


def _rounded(bounds: Tensor) -> Tensor:
    """cu_seqlens with empty sequences added, up to a number that many micro-batches share.

    With cuDNN 9.24 and later, Transformer Engine caches a forward's graph by the exact number of sequences. Before,
    and for backward, it rounds that number up itself, to the same numbers (before_training.py).
    """
    count = len(bounds) - 1
    missing = sequences_like(count) - count
    if not missing:
        return bounds
    rounded = _rounded_bounds.get(bounds)
    if rounded is None:
        rounded = _rounded_bounds[bounds] = torch.cat((bounds, bounds[-1:].expand(missing)))
    return rounded


def _batch(x: Tensor, count: int, rows: int) -> Tensor:
    """[count, rows, ..] from packed rows, of which there may be more."""
    return x[: count * rows].unflatten(0, (count, rows))


def _mask(call: AttentionCall) -> tuple[str, tuple[int, int]]:
    """Mask and window under Transformer Engine's names; "padding" means that sequences have their own lengths.

    If there are as many queries as keys, the top-left mask equals the bottom-right one, and its backward is faster.
    """
    if not call.causal:
        return "padding", (-1, -1)
    left_window = -1 if call.window is None else call.window
    if call.cu_seqlens_q is call.cu_seqlens_kv:
        return "padding_causal", (left_window, 0)
    return "padding_causal_bottom_right", (left_window, 0)
