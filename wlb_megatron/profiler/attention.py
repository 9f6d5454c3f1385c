"""Prepares attention calls of given shapes, and whole shares of a micro-batch, for timing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from wlb_megatron.attention.device_layout import DeviceCall, device_layout
from wlb_megatron.attention.sharded_attention import Kernels, sharded_attention
from wlb_megatron.profiler.layer import Part
from wlb_megatron.profiler.points import Point
from wlb_megatron.sharding.calls.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.calls.exchange import ExchangePlan
from wlb_megatron.workload.profile import ProfiledModel


class AttentionBench:
    """Steps of one model's attention on one device."""

    def __init__(
        self, model: ProfiledModel, kernels: Kernels, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.kernels, self.device, self.dtype = model, kernels, device, dtype
        self.scale = model.head_dim**-0.5

    def step(self, point: Point) -> Part:
        return self._share(point) if point.plan is not None else self._call(point)

    def _call(self, point: Point) -> Part:
        """One kernel call, causal over diagonals or bottom-right ones, or without mask over rectangles."""
        diagonals, masked = point.sizes["diagonals"], point.sizes.get("bottom_right", [])
        if diagonals:
            sizes = np.array([(q, q) for q, n in diagonals for _ in range(n)])
        else:
            shapes = masked or point.sizes["rectangles"]
            sizes = np.array([(q, k) for q, k, n in shapes for _ in range(n)])
        queries, keyed = (
            torch.from_numpy(np.concatenate(([0], np.cumsum(side))).astype(np.int32)).to(self.device)
            for side in sizes.T
        )
        rows, keys = (int(n) for n in sizes.sum(axis=0))
        call = DeviceCall(
            causal=bool(diagonals or masked),
            window=None,
            cu_seqlens_q=queries,
            cu_seqlens_kv=queries if diagonals else keyed,
            max_q=int(sizes[:, 0].max()),
            max_kv=int(sizes[:, 1].max()),
            q_rows=rows,
            kv_rows=keys,
            sizes=tuple((int(q), int(k)) for q, k in sizes),
        )
        q, dout = self._random(2, rows, self.model.rank_heads)
        (kv,) = self._random(1, keys, 2, self.model.rank_kv_heads)

        def forward() -> tuple[Tensor, Tensor]:
            return self.kernels.forward(call, q, kv, self.scale)

        def backward(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            out, lse = results
            return self.kernels.backward(call, q, kv, out, lse, dout, self.scale)

        return forward, backward

    def _share(self, point: Point) -> Part:
        """A rank's whole attention. Keys that other ranks hold are taken from its own, so nothing travels."""
        assert point.plan is not None
        layout = device_layout(_alone(attention_layout(point.plan, point.rank)), self.device)
        q, dout = (
            x.requires_grad_(number == 0)
            for number, x in enumerate(self._random(2, layout.tokens, self.model.rank_heads))
        )
        k, v = (x.requires_grad_() for x in self._random(2, layout.tokens, self.model.rank_kv_heads))

        def forward() -> Tensor:
            return sharded_attention(q, k, v, layout, None, self.kernels, self.scale)

        return forward, lambda out: torch.autograd.grad(out, (q, k, v), dout)

    def _random(self, count: int, rows: int, *axes: int) -> list[Tensor]:
        shape = (rows, *axes, self.model.head_dim)
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(count)]


def _alone(layout: AttentionLayout) -> AttentionLayout:
    """The layout with an exchange within the rank: all keys that it needs are some of its own."""
    exchange = layout.exchange
    place = np.where(exchange.place < 0, ~exchange.place % layout.tokens, exchange.place)
    inward = ExchangePlan(0, place[:0], (0,), (0,), place, remote=False)
    return replace(layout, exchange=inward)
