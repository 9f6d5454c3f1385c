"""Checks that kernels compute attention: small calls of each kind that plans make, against plain torch in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.pairs import side_by_side

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
    yield _call(whole_sizes, device, causal=True)
    yield _call(cut_sizes, device, causal=False)
    yield _call(cut_sizes, device, causal=True)
    yield _call(whole_sizes, device, causal=True, window=20)
    yield _call(cut_sizes, device, causal=True, window=20)
    yield _call([(64, 64)] * 3, device, causal=True, equal=(3, 64, 64))
    yield _call([(64, 128)] * 2, device, causal=False, equal=(2, 64, 128))


def _call(
    sizes: Sequence[tuple[int, int]],
    device: torch.device | str,
    *,
    causal: bool,
    window: int | None = None,
    equal: tuple[int, int, int] | None = None,
) -> DeviceCall:
    queries, keys = zip(*sizes, strict=True)
    bounds_q, bounds_kv = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device) for side in (queries, keys)
    )
    if queries == keys:  # queries are the keys if there are equally many
        bounds_kv = bounds_q
    return DeviceCall(
        causal,
        window,
        bounds_q,
        bounds_kv,
        max(queries),
        max(keys),
        sum(queries),
        sum(keys),
        tuple(sizes),
        equal,
    )
