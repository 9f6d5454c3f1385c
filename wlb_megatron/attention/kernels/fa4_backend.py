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
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import torch
from flash_attn.cute import interface
from torch import Tensor

from wlb_megatron.attention.kernels.kernel_choice import narrow_values
from wlb_megatron.attention.kernels.row_sums import KV, apart, empty_like
from wlb_megatron.sharding.attention_calls import AttentionCall

LEAST_LONGEST = 512
"""The kernels are given at least this as the longest sequence. If all sequences fit into one tile, they would compile
once more."""


class FlashAttention4Kernels:
    """sharded_attention.Kernels in bf16 or fp16. deterministic: backward sums in a fixed order, slower."""

    separate = True

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._compiled: dict[tuple[Any, ...] | None, list[_Launch]] = {}

    def takes(self, dim: int, v_dim: int) -> bool:
        return narrow_values(dim, v_dim)

    def buffer_rows(self, call: AttentionCall) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: AttentionCall, q: Tensor, kv: KV, scale: float) -> tuple[Tensor, Tensor]:
        k, v = apart(kv, q.shape[-1])
        kind = _kind(call, scale, q, k, v)
        if launches := self._compiled.get(kind):
            (run,), (rows, heads, _) = launches, q.shape
            out = q.new_empty((rows, heads, v.shape[-1]))
            lse = q.new_empty((heads, rows), dtype=torch.promote_types(q.dtype, torch.float32))
            run.kernel(q, k, v, out, lse, scale, call.cu_seqlens_q, call.cu_seqlens_kv, *run.arguments[8:])
            return out, lse.t()
        with _noted() as launches:
            out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **_options(call, scale))
        if kind and len(launches) == 1:
            self._compiled[kind] = [launch.without_tensors() for launch in launches]
        return out, lse.t()  # lse is by heads, [heads, rows]

    def backward(
        self, call: AttentionCall, q: Tensor, kv: KV, out: Tensor, lse: Tensor, dout: Tensor, scale: float
    ) -> tuple[Tensor, KV]:
        (k, v), dkv, lse = apart(kv, q.shape[-1]), empty_like(kv), lse.t().contiguous()
        dk, dv = apart(dkv, q.shape[-1])
        # A deterministic backward needs zeroed semaphores.
        kind = None if self.deterministic else _kind(call, scale, q, k, v, dout)
        if launches := self._compiled.get(kind):
            # What flash-attn launches on Hopper: prepare, compute, round dq and, if heads are grouped, dk and dv.
            before, main, *after = launches
            dq, cu_q, cu_k = torch.empty_like(q), call.cu_seqlens_q, call.cu_seqlens_kv
            zeros, total, places = _buffers(call.causal, call.window, len(call.sizes), q.shape, v.shape)
            space = q.new_empty(total, dtype=lse.dtype)
            sums, weights, dq_sum, *grouped = [space.as_strided(*place) for place in places]
            if grouped:
                space[:zeros].zero_()
            dk_sum, dv_sum = grouped or (dk, dv)
            before.kernel(out, dout, sums, lse, weights, dq_sum, cu_q, *before.arguments[7:])
            results = dq_sum, dk_sum, dv_sum, scale, cu_q, cu_k
            main.kernel(q, k, v, dout, weights, sums, *results, *main.arguments[12:])
            rounded = ((dq_sum, dq, cu_q), (dk_sum, dk, cu_k), (dv_sum, dv, cu_k))
            for launch, (summed, gradient, ends) in zip(after, rounded, strict=False):
                launch.kernel(summed, gradient, launch.arguments[2], ends, *launch.arguments[4:])
            return dq, dkv
        with _noted() as launches:
            inputs, options = (q, k, v, out, dout, lse), _options(call, scale)
            dq, *_ = interface._flash_attn_bwd(
                *inputs, dk=dk, dv=dv, deterministic=self.deterministic, **options
            )
        if kind and len(launches) == (5 if q.shape[1] > k.shape[1] else 3):
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


def _kind(call: AttentionCall, scale: float, *tensors: Tensor) -> tuple[Any, ...] | None:
    """What decides the compiled kernels and their constant arguments, as read in flash-attn 4.0.0b36 for Hopper.

    The registry allows no other version. Dtype, heads, channels, mask and window decide kernels and tiles. Keys are
    never split over programs, as num_splits stays 1, so there is no scheduler's metadata. Query heads are packed
    (pack_gqa) wherever they share keys. The longest lengths decide only whether each sequence fits into one tile, of
    at most 192 rows forward and 128 backward. LEAST_LONGEST keeps the answer no. Strides of 0 are compiled in; a
    contiguous tensor may have one where its size is 1, hence strides.

    None if the functions launch other kernels, or give them other tensors. With more sequences, a kernel more finds
    where they begin. Without rows nothing runs. A tensor that does not begin at a multiple of 16 bytes would be copied.

    tensors: q, k and v, and the gradient of a backward's output.
    """
    bits, strides = 0, list[tuple[int, ...]]()
    for x in tensors:
        bits |= x.data_ptr()
        strides.append(x.stride())
    if bits & 15 or len(call.sizes) > interface.BIN_BATCH_SEARCH_THRESH or not (call.q_rows and call.kv_rows):
        return None
    (_, heads, dim), (_, kv_heads, v_dim) = tensors[0].shape, tensors[2].shape
    return call.causal, call.window, scale, tensors[0].dtype, heads, dim, kv_heads, v_dim, *strides


@lru_cache(maxsize=64)
def _buffers(
    causal: bool, window: int | None, sequences: int, q: torch.Size, v: torch.Size
) -> tuple[int, int, list[tuple[tuple[int, int], tuple[int, int], int]]]:
    """The one buffer of backward's intermediate results, of the sizes that flash-attn makes for each.

    Returns how many elements begin as zeros, how many there are, and shape, stride and offset of the sums of
    out * dout, the scaled log-sum-exps, dq and, if query heads of a group add to one key head, dk and dv.
    """
    tiles = interface._tile_size_bwd_sm90(q[-1], v[-1], causal and window is None, window is not None)
    unit = 64 if tiles.dKV_swapAB else 32
    dim, v_dim = (-(-channels // unit) * unit for channels in (q[-1], v[-1]))
    # Each sequence begins at a multiple of its tile.
    q_rows, k_rows = (
        (rows + (sequences + 1) * tile - 1) // tile * tile
        for rows, tile in ((q[0], tiles.m_block_size), (v[0], tiles.n_block_size))
    )
    shapes = [(q[1], q_rows), (q[1], q_rows), (q[1], q_rows * dim)]
    if q[1] > v[1]:
        shapes = [(v[1], k_rows * dim), (v[1], k_rows * v_dim), *shapes]
    ends = [0, *accumulate(heads * size for heads, size in shapes)]
    places = [((heads, size), (size, 1), begin) for (heads, size), begin in zip(shapes, ends, strict=False)]
    return ends[-4], ends[-1], places[-3:] + places[:-3]


def _options(call: AttentionCall, scale: float) -> dict[str, Any]:
    """Bounds, scale and mask. A causal mask is bottom-right: the last query sees the last key."""
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_kv,
        "max_seqlen_q": max(call.max_q, LEAST_LONGEST),
        "max_seqlen_k": max(call.max_kv, LEAST_LONGEST),
        "softmax_scale": scale,
        "causal": call.causal,
        "window_size_left": call.window,
    }
