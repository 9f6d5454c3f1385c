"""Calls kernels before training: to build them before a step needs them, and to check that they compute attention.

They are built by an empty call of each kind or size, forward and backward. The calls go through autograd, because
graphs belong to threads: forward in the caller's thread, backward in the engine's. Recomputation also runs forwards in
the engine's thread. They are checked by small calls of each kind that plans make, against plain torch in fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.graph_buckets import Bucket, Equal, Warmable
from wlb_megatron.attention.kernels.row_sums import side_by_side
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import Kernels


def warm_up(
    kernels: Any,
    graphs: Iterable[Warmable],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    scale: float,
    dtype: torch.dtype,
    device: torch.device | str,
    recompute: bool = False,
) -> None:
    """Runs one call of each graph (causal, window, sizes).

    A bucket of sizes gets one token. Equal sequences are run at full size, and the kernels expect them from then on.
    Graphs are cached by what layers on this device have, too.

    Args:
        kernels: sharded_attention.Kernels that run from graphs cached by size, as cuDNN's do.
        heads: Heads of queries and of keys.
        dims: Channels of a head's queries and keys, and of its values.
        scale: The softmax's.
        recompute: The forward also runs in backward.
    """
    dim, v_dim = dims if kernels.takes(*dims) else dims[:1] * 2
    for causal, window, size in graphs:
        call = _warming_call(causal, window, size, device)
        q = torch.zeros(call.q_rows, heads[0], dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (torch.zeros(call.kv_rows, heads[1], d, dtype=dtype, device=device) for d in (dim, v_dim))
        kv = side_by_side(k, v)
        if call.equal:
            kernels.expect(call, q, kv)
        out = _Once.apply(q, kv, call, kernels, scale, recompute)
        torch.autograd.grad(out, q, torch.zeros_like(out))


def _warming_call(
    causal: bool, window: int | None, size: Bucket | Equal, device: torch.device | str
) -> DeviceCall:
    count, queries, keys = size
    if isinstance(size, Equal):
        return device_call([(queries, keys)] * count, device, causal=causal, window=window, equal=size)
    sizes = [(1, 1), *[(0, 0)] * (count - 1)]
    return device_call(sizes, device, causal=causal, window=window, rows=(queries, keys))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, call: DeviceCall, kernels: Kernels, scale: float, recompute: bool
    ) -> Tensor:
        out, lse = kernels.forward(call, q, kv, scale)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.rest = call, kernels, scale, recompute
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        call, kernels, scale, recompute = ctx.rest
        if recompute:
            kernels.forward(call, q, kv, scale)
        dq, _ = kernels.backward(call, q, kv, out, lse, dout, scale)
        return dq, None, None, None, None, None


HEADS, KV_HEADS = 4, 2
TOLERATED = 3e-2
"""Largest accepted error in bf16, relative to the largest entry. bf16's unit roundoff is 2^-8."""


def worst_error(kernels: Any, dtype: torch.dtype, device: torch.device | str, dim: int = 64) -> float:
    """Largest relative error of outputs, log-sum-exps and gradients of `kernels`, a sharded_attention.Kernels.

    dim: channels of a head. Returns NaN if any entry is not a number.
    """
    generator, scale = torch.Generator().manual_seed(0), dim**-0.5
    exact = TorchKernels()
    largest_error = 0.0

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    for call in _calls(device):
        q, dout = draw(call.q_rows, HEADS, dim), draw(call.q_rows, HEADS, dim)
        kv = side_by_side(draw(call.kv_rows, KV_HEADS, dim), draw(call.kv_rows, KV_HEADS, dim))
        if call.equal is not None and hasattr(kernels, "expect"):
            kernels.expect(call, q, kv)
        out, lse = kernels.forward(call, q, kv, scale)
        results = (out, lse, *kernels.backward(call, q, kv, out, lse, dout, scale))
        doubles = [x.double() for x in (q, kv, dout)]
        right_out, right_lse = exact.forward(call, doubles[0], doubles[1], scale)
        expected = (
            right_out,
            right_lse,
            *exact.backward(call, doubles[0], doubles[1], right_out, right_lse, doubles[2], scale),
        )
        for result, exact_result in zip(results, expected, strict=True):
            error = float((result.double() - exact_result).abs().max() / exact_result.abs().max())
            largest_error = error if error != error else max(largest_error, error)
    return largest_error


def _calls(device: torch.device | str) -> Iterator[DeviceCall]:
    """The kinds of call: diagonals, rectangles, one call instead of two, windows, and a batch of equal sequences."""
    whole_sizes, cut_sizes = [(9, 9), (1, 1), (190, 190), (64, 64)], [(64, 128), (5, 300), (70, 70)]
    yield device_call(whole_sizes, device, causal=True)
    yield device_call(cut_sizes, device, causal=False)
    yield device_call(cut_sizes, device, causal=True)
    yield device_call(whole_sizes, device, causal=True, window=20)
    yield device_call(cut_sizes, device, causal=True, window=20)
    yield device_call([(64, 64)] * 3, device, causal=True, equal=(3, 64, 64))
    yield device_call([(64, 128)] * 2, device, causal=False, equal=(2, 64, 128))


def device_call(
    sizes: Sequence[tuple[int, int]],
    device: torch.device | str,
    *,
    causal: bool,
    window: int | None = None,
    equal: tuple[int, int, int] | None = None,
    rows: tuple[int, int] | None = None,
    same_rows: bool = True,
) -> DeviceCall:
    """A call of sequences of these queries and keys. rows: those of all, if buffers have more. same_rows: queries are
    the keys, if they are equally many; the mask depends on it (te_backend.py)."""
    queries, keys = zip(*sizes, strict=True)
    q_rows, kv_rows = rows or (sum(queries), sum(keys))
    bounds_q, bounds_kv = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device) for side in (queries, keys)
    )
    bounds_kv = bounds_q if same_rows and q_rows == kv_rows else bounds_kv
    longest = max(queries), max(keys)
    return DeviceCall(causal, window, bounds_q, bounds_kv, *longest, q_rows, kv_rows, tuple(sizes), equal)
