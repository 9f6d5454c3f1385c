"""The FlashAttention-4 backend (CuTe DSL), called below its autograd function.

Its kernels compile at the first call of a kind (mask, heads, window or none, up to 256 sequences or more), in some
seconds, for all sizes. So this backend prebuilds no graphs, keeps no spare rows and has no form for equal lengths.

Transformer Engine's own entry points do not work here. Its module makes an autograd node that does not accept a
log-sum-exp of all keys, so it cannot use the merged one. Below that module, 2.18 and 2.19 have only FlashAttention's
functions with such a node. 2.20 has these two, wrapped, in a private module. So this file calls FlashAttention-4
itself.

Its functions check and look up for longer than a launch takes. What they find depends on the kind of call alone (see
`_kind`). So the first call of a kind notes the compiled kernels that run and their constant arguments; later ones call
these kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
from flash_attn.cute import interface
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.kernel_choice import narrow_values
from wlb_megatron.attention.kernels.row_sums import apart

LEAST_LONGEST = 512
"""The kernels are given at least this as the longest sequence. If all sequences fit into one tile, they would compile
once more."""


class FlashAttention4Kernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._compiled: dict[tuple[Any, ...], list[_Launch]] = {}

    def takes(self, dim: int, v_dim: int) -> bool:
        return narrow_values(dim, v_dim)

    def buffer_rows(self, call: DeviceCall) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: DeviceCall, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k, v = apart(kv, q.shape[-1])
        kind, usual = _kind("forward", call, scale, q, kv), _usual(call, q, kv)
        if launches := self._compiled.get(kind) if usual else None:
            (run,) = launches
            out = q.new_empty((*q.shape[:2], v.shape[-1]))
            lse = q.new_empty((q.shape[1], len(q)), dtype=torch.promote_types(q.dtype, torch.float32))
            bounds = call.cu_seqlens_q, call.cu_seqlens_kv
            run.kernel(q.detach(), k, v, out, lse, scale, *bounds, *run.arguments[8:])
            return out, lse.t()
        with _noted() as launches:
            out, lse, *_ = interface._flash_attn_fwd(
                q, k, v, softmax_scale=scale, return_lse=True, **_bounds_and_mask(call)
            )
        if usual and len(launches) == 1:
            self._compiled[kind] = [launch.without_tensors() for launch in launches]
        return out, lse.t()  # lse is by heads, [heads, rows]

    def backward(
        self, call: DeviceCall, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (k, v), dkv, lse = apart(kv, q.shape[-1]), torch.empty_like(kv), lse.t().contiguous()
        dk, dv = apart(dkv, q.shape[-1])
        kind = _kind("backward", call, scale, q, kv, dout)
        usual = _usual(call, q, kv, dout) and not self.deterministic  # else with zeroed semaphores
        if launches := self._compiled.get(kind) if usual else None:
            dq = torch.empty_like(q)
            _run_backward(launches, call, (q, k, v, out, dout, lse), (dq, dk, dv), scale)
            return dq, dkv
        with _noted() as launches:
            dq, *_ = interface._flash_attn_bwd(
                q,
                k,
                v,
                out,
                dout,
                lse,
                softmax_scale=scale,
                deterministic=self.deterministic,
                dk=dk,
                dv=dv,
                **_bounds_and_mask(call),
            )
        if usual and len(launches) == (5 if q.shape[1] > k.shape[1] else 3):
            self._compiled[kind] = [launch.without_tensors() for launch in launches]
        return dq, dkv


class _Launch(NamedTuple):
    """A compiled kernel and the arguments that flash-attn called it with."""

    kernel: Any
    arguments: tuple[Any, ...]

    def without_tensors(self) -> _Launch:
        """The same, without the tensors of the call, which would stay in memory."""
        constants = tuple(None if isinstance(x, Tensor) else x for x in self.arguments)
        return _Launch(self.kernel, constants)


class _NotingCache:
    """One of flash-attn's caches of compiled kernels, which notes what is called."""

    def __init__(self, cache: Any, launches: list[_Launch]) -> None:
        self.cache, self.launches = cache, launches

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel

    def __getitem__(self, key: Any) -> Any:
        kernel = self.cache[key]

        def call(*arguments: Any) -> Any:
            self.launches.append(_Launch(kernel, arguments))
            return kernel(*arguments)

        return call


_noting = Lock()
"""flash-attn's caches belong to all threads."""


@contextmanager
def _noted() -> Iterator[list[_Launch]]:
    """The kernels that flash-attn launches meanwhile."""
    launches: list[_Launch] = []
    functions: list[Any] = [
        interface._flash_attn_fwd,
        interface._bwd_preprocess,
        interface._flash_attn_bwd,
        interface._bwd_postprocess_convert,
    ]
    with _noting:
        caches = [function.compile_cache for function in functions]
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = _NotingCache(cache, launches)
        try:
            yield launches
        finally:
            for function, cache in zip(functions, caches, strict=True):
                function.compile_cache = cache


def _kind(direction: str, call: DeviceCall, scale: float, *tensors: Tensor) -> tuple[Any, ...]:
    """What decides the compiled kernels and their constant arguments, as read in flash-attn 4.0.0b36 for Hopper.

    The registry allows no other version. Dtype, heads, channels, mask and window decide kernels and tiles. Keys are
    never split over programs, as num_splits stays 1, so there is no scheduler's metadata. Query heads are packed
    (pack_gqa) wherever they share keys. The longest lengths decide only whether each sequence fits into one tile, of
    at most 192 rows forward and 128 backward. LEAST_LONGEST keeps the answer no. Strides of 0 are compiled in; a
    contiguous tensor may have one where its size is 1, hence strides. `_usual` is about the rest.
    """
    shapes = [(x.shape[1:], x.stride()) for x in tensors]
    return direction, call.causal, call.window, scale, tensors[0].dtype, *shapes


def _usual(call: DeviceCall, *tensors: Tensor) -> bool:
    """Whether the functions launch nothing but the noted kernels, and give them these very tensors.

    With more sequences, a kernel more finds where they begin. Without rows nothing runs. A tensor that does not begin
    at a multiple of 16 bytes would be copied.
    """
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    few_sequences = len(call.cu_seqlens_q) - 1 <= interface.BIN_BATCH_SEARCH_THRESH
    return few_sequences and call.q_rows > 0 and call.kv_rows > 0 and not bits & 15


def _run_backward(
    launches: list[_Launch],
    call: DeviceCall,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> None:
    """Launches what flash-attn's _flash_attn_bwd launches on Hopper, with buffers of the sizes that it makes.

    Args:
        launches: the kernels that prepare, compute, and round dq; if heads are grouped, also dk and dv.
        inputs: q, k, v, out and dout of [rows, heads, dim], lse of fp32[heads, rows].
        gradients: dq, dk and dv, to fill.
    """
    q, k, v, out, dout, lse = inputs
    dq, dk, dv = gradients
    before, main, *after = launches
    bounds = call.cu_seqlens_q, call.cu_seqlens_kv
    tiles = interface._tile_size_bwd_sm90(
        q.shape[-1],
        v.shape[-1],
        call.causal and call.window is None,
        call.window is not None,
    )
    unit = 64 if tiles.dKV_swapAB else 32
    dim, v_dim = (-(-x.shape[-1] // unit) * unit for x in (q, v))

    def room(rows: int, tile: int) -> int:
        """Rows in which each sequence begins at a multiple of `tile`."""
        return (rows + len(bounds[0]) * tile - 1) // tile * tile

    heads, padded = q.shape[1], room(len(q), tiles.m_block_size)
    sums, weights = q.new_empty((2, heads, padded), dtype=lse.dtype)
    dq_sum = q.new_empty((heads, padded * dim), dtype=lse.dtype)
    dk_sum, dv_sum = dk, dv
    if len(after) > 1:  # query heads of a group add to one key head
        kv_heads, padded = k.shape[1], room(len(k), tiles.n_block_size)
        both = q.new_zeros(kv_heads * padded * (dim + v_dim), dtype=lse.dtype)
        dk_sum, dv_sum = (
            part.view(kv_heads, -1)
            for part in both.split((kv_heads * padded * dim, kv_heads * padded * v_dim))
        )
    before.kernel(out, dout, sums, lse, weights, dq_sum, bounds[0], *before.arguments[7:])
    main.kernel(
        q.detach(), k, v, dout, weights, sums, dq_sum, dk_sum, dv_sum, scale, *bounds, *main.arguments[12:]
    )
    rounded = ((dq_sum, dq, bounds[0]), (dk_sum, dk, bounds[1]), (dv_sum, dv, bounds[1]))
    for launch, (total, gradient, ends) in zip(after, rounded, strict=False):
        launch.kernel(total, gradient, launch.arguments[2], ends, *launch.arguments[4:])


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
