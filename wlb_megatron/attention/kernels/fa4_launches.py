"""Launches FlashAttention-4's compiled kernels, as its own two functions do on Hopper, in less of the host's time.

Those functions check all arguments at each call, and look up kernels by keys of up to 70 entries. That takes longer
than the launches. So only the first call of a kind goes through them, and its launches are noted. If this file would
give the kernels the same arguments, it launches them itself from then on. If not, the functions go on launching them.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from flash_attn.cute.interface import (
    BIN_BATCH_SEARCH_THRESH,
    AuxData,
    _bwd_postprocess_convert,
    _bwd_preprocess,
    _flash_attn_bwd,
    _flash_attn_fwd,
    _tile_size_bwd_sm90,
)
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.fa4_noting import Arguments, Kernel, described, noted, same
from wlb_megatron.attention.pairs import apart

LEAST_LONGEST = 512
"""The kernels are given at least this as the longest sequence. If all sequences fit into one tile, they would compile
once more."""

_FUNCTIONS = _flash_attn_fwd, _flash_attn_bwd, _bwd_preprocess, _bwd_postprocess_convert
_WIDE = torch.float32
_NO_DATA = AuxData(None, None)
_known: dict[tuple[Any, ...], tuple[Kernel, ...]] = {}
"""The compiled kernels of each kind of call, in order. Empty if the kind goes through the library's functions."""


def forward(call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output, [rows, heads, v dim], and log-sum-exp, float32[heads, rows]."""
    k, v = apart(kv, q.shape[-1])
    kind = "forward", *_kind(call, q, kv)
    kernels = _known.get(kind) if _usual(call, q, kv) else ()
    if kernels:
        rows, heads, _ = q.shape
        out, lse = q.new_empty((rows, heads, v.shape[-1])), q.new_empty((heads, rows), dtype=_WIDE)
        _launch(kernels, _forward_launches(call, q, k, v, out, lse, scale))
        return out, lse
    library = partial(
        _flash_attn_fwd, q, k, v, softmax_scale=scale, return_lse=True, **_bounds_and_mask(call)
    )
    if kernels is not None:
        out, lse, *_ = library()
        return out, lse
    (out, lse, *_), launches = noted(library, _FUNCTIONS)
    _remember(kind, launches, _forward_launches(call, q, k, v, out, lse, scale), (q, k, v, out, lse))
    return out, lse


def backward(
    call: DeviceCall,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """dq and dkv. lse: as `forward` returned it, contiguous. deterministic: sums in a fixed order, slower."""
    (k, v), dq, dkv = apart(kv, q.shape[-1]), torch.empty_like(q), torch.empty_like(kv)
    dk, dv = apart(dkv, q.shape[-1])
    tensors = q, k, v, out, dout, lse, dq, dk, dv
    kind = "backward", *_kind(call, q, kv)
    kernels = _known.get(kind) if not deterministic and _usual(call, q, kv, out, dout) else ()
    if kernels:
        _launch(kernels, _backward_launches(call, *tensors, scale))
        return dq, dkv
    library = partial(
        _flash_attn_bwd,
        *(q, k, v, out, dout, lse),
        softmax_scale=scale,
        deterministic=deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
        **_bounds_and_mask(call),
    )
    if kernels is not None:
        library()
    else:
        _, launches = noted(library, _FUNCTIONS)
        _remember(kind, launches, _backward_launches(call, *tensors, scale), tensors)
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


def _kind(call: DeviceCall, q: Tensor, kv: Tensor) -> tuple[Any, ...]:
    """All that decides which kernels the library compiles for a usual call."""
    return q.dtype, q.shape[1:], kv.shape[1:], call.causal, call.window is None


def _usual(call: DeviceCall, *tensors: Tensor) -> bool:
    """Whether the call is none of the library's special cases: no rows, contiguous tensors that do not start at a
    multiple of 16 bytes, or so many sequences that tables help to find them.
    """
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bool(call.q_rows and call.kv_rows) and not bits & 15 and len(call.sizes) <= BIN_BATCH_SEARCH_THRESH


def _forward_launches(
    call: DeviceCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> list[Arguments]:
    bounds = call.cu_seqlens_q, call.cu_seqlens_kv, None, None, None
    return [(q, k, v, out, lse, scale, *bounds, *_window(call), None, None, _NO_DATA, None, None)]


def _backward_launches(
    call: DeviceCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> list[Arguments]:
    """Of the kernels that sum up rows of out * dout, compute gradients (dq in fp32), and round dq. If query heads share
    keys, dk and dv are also summed in fp32, then rounded.
    """
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    tile_q, tile_k, width = _tiles(dim, v.shape[-1], call.causal, call.window is not None)
    cu_q, cu_k, sequences = call.cu_seqlens_q, call.cu_seqlens_kv, len(call.sizes)
    padded = (-(-rows // tile_q) + sequences) * tile_q
    sums, lse_log2 = q.new_empty((2, heads, padded), dtype=_WIDE).unbind()
    wide_dq, wide_dk, wide_dv = q.new_empty((heads, padded * width), dtype=_WIDE), dk, dv
    if heads != kv_heads:
        padded = (-(-len(k) // tile_k) + sequences) * tile_k
        wide_dk, wide_dv = k.new_zeros((2, kv_heads, padded * width), dtype=_WIDE).unbind()
    given = q, k, v, dout, lse_log2, sums, wide_dq, wide_dk, wide_dv, scale, cu_q, cu_k, None, None
    launches: list[Arguments] = [
        (out, dout, sums, lse, lse_log2, wide_dq, cu_q, None, None, None, None, 1.0, None, None),
        (*given, *_window(call), None, None, None, _NO_DATA, None, None),
        (wide_dq, dq, scale, cu_q, None, None, None),
    ]
    if heads != kv_heads:
        launches.append((wide_dk, dk, scale, cu_k, None, None, None))
        launches.append((wide_dv, dv, 1.0, cu_k, None, None, None))
    return launches


def _window(call: DeviceCall) -> tuple[int | None, int | None]:
    """Keys seen before and after the diagonal; None for both without a window, where `causal` is compiled in."""
    return call.window, 0 if call.causal and call.window is not None else None


@cache
def _tiles(dim: int, v_dim: int, causal: bool, local: bool) -> tuple[int, int, int]:
    """Rows of a tile of queries and of keys, and the columns of a row of fp32 gradients."""
    tiles = _tile_size_bwd_sm90(dim, v_dim, causal and not local, local)
    step = 64 if tiles.dKV_swapAB else 32
    return tiles.m_block_size, tiles.n_block_size, -(-dim // step) * step


def _launch(kernels: tuple[Kernel, ...], launches: list[Arguments]) -> None:
    for kernel, arguments in zip(kernels, launches, strict=True):
        kernel(*arguments)


def _remember(
    kind: tuple[Any, ...],
    launches: list[tuple[Kernel, Arguments]],
    ours: list[Arguments],
    given: tuple[Tensor, ...],
) -> None:
    """Keeps the kernels if they got what this file would give them. given: the tensors that both were given."""
    theirs = [arguments for _, arguments in launches]
    alike = same(theirs, [described(arguments) for arguments in ours], given)
    _known[kind] = tuple(kernel for kernel, _ in launches) if alike else ()
