"""An attention layout on a device: index tensors built once per micro-batch and shared by all its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wlb_megatron.sharding.attention_calls import AttentionLayout
from wlb_megatron.sharding.exchange import ExchangePlan
from wlb_megatron.sharding.varlen_call import AttentionCall
from wlb_megatron.sharding.window_call import WindowLayout


@dataclass(frozen=True)
class DeviceCall:
    """sharding.varlen_call.AttentionCall with int32 tensors, and its mask.

    causal: queries are the last of their sequence's keys, and none sees a later one. window: keys before itself that
    a query sees, None for all. q_rows, kv_rows: of all sequences; the buffers that the call is given may have more
    (sharded_attention.Kernels.room). sizes: (queries, keys) of each sequence, on the host, for backends that go one by
    one. equal: AttentionCall.equal. Queries and keys are one and the same where cu_seqlens_q is
    cu_seqlens_kv.
    """

    causal: bool
    window: int | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_q: int
    max_kv: int
    q_rows: int
    kv_rows: int
    sizes: tuple[tuple[int, int], ...]
    equal: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Bags:
    """Which rows of a source belong to which row of a target.

    owner: int32[n], target row of each source row. The same grouped: target row targets[i] owns source rows
    members[bounds[i] : bounds[i + 1]], in order; targets own at least one.
    """

    owner: Tensor
    targets: Tensor
    bounds: Tensor
    members: Tensor


@dataclass(frozen=True)
class DeviceExchange:
    """sharding.exchange.ExchangePlan with int32 tensors, and its inverse for the way back.

    unplace: arriving row j is buffer row unplace[j]. returns: of local rows, the rows that come back.
    """

    send_rows: Tensor
    place: Tensor
    unplace: Tensor
    returns: Bags
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    remote: bool


@dataclass(frozen=True)
class DeviceWindow:
    """sharding.window_call.WindowLayout on a device. exchange: None where the keys are the rank's own, in order."""

    call: DeviceCall
    exchange: DeviceExchange | None


@dataclass(frozen=True)
class DeviceLayout:
    """sharding.attention_calls.AttentionLayout on a device.

    positions: int32[t]. queries: of local rows, the query rows of the rectangles. exchange: None where no rank
    needs earlier keys. window: for windowed layers. single: for the others, where one call serves them instead.
    """

    tokens: int
    positions: Tensor
    diagonals: DeviceCall
    rectangles: DeviceCall | None
    queries: Bags | None
    exchange: DeviceExchange | None
    hide_return: bool
    window: DeviceWindow | None = None
    single: DeviceWindow | None = None


def device_layout(layout: AttentionLayout, device: torch.device | str) -> DeviceLayout:
    """Copy a layout to `device`: one asynchronous copy from pinned memory on a GPU."""
    exchange, rectangles = layout.exchange, layout.rectangles
    arrays: list[np.ndarray] = [layout.positions, layout.diagonals.cu_seqlens_q]
    if rectangles:
        arrays += [rectangles.cu_seqlens_q, rectangles.cu_seqlens_kv]
        arrays += _bags(layout.query_rows, layout.tokens)
    needed = rectangles is not None or exchange.remote
    if needed:
        arrays += _moves(exchange, layout.tokens)
    for near in filter(None, (layout.window, layout.single)):
        arrays += _near(near, layout.tokens)
    shipped = _ship(arrays, torch.device(device))

    positions, own = next(shipped), next(shipped)
    diagonals, others, queries = _call(layout.diagonals, (own, own)), None, None
    if rectangles:
        others = _call(rectangles, (next(shipped), next(shipped)), causal=False)
        queries = _take_bags(shipped)
    moves = _take_moves(exchange, shipped) if needed else None
    one = [None if near is None else _take_near(near, shipped) for near in (layout.window, layout.single)]
    return DeviceLayout(layout.tokens, positions, diagonals, others, queries, moves, layout.hide_return, *one)


def _near(near: WindowLayout, rows: int) -> list[np.ndarray]:
    """Where nothing is remote all pieces lie whole on a rank: their keys are the rank's own, in order."""
    bounds = [near.call.cu_seqlens_q]
    return (
        [*bounds, near.call.cu_seqlens_kv, *_moves(near.exchange, rows)] if near.exchange.remote else bounds
    )


def _take_near(near: WindowLayout, shipped: Iterator[Tensor]) -> DeviceWindow:
    bounds = next(shipped)
    if not near.exchange.remote:
        return DeviceWindow(_call(near.call, (bounds, bounds), near.size), None)
    call = _call(near.call, (bounds, next(shipped)), near.size)
    return DeviceWindow(call, _take_moves(near.exchange, shipped))


def _call(
    call: AttentionCall, cu_seqlens: tuple[Tensor, Tensor], window: int | None = None, causal: bool = True
) -> DeviceCall:
    sizes = zip(np.diff(call.cu_seqlens_q).tolist(), np.diff(call.cu_seqlens_kv).tolist(), strict=True)
    return DeviceCall(
        causal,
        window,
        *cu_seqlens,
        call.max_q,
        call.max_kv,
        int(call.cu_seqlens_q[-1]),
        int(call.cu_seqlens_kv[-1]),
        tuple(sizes),
        call.equal,
    )


def _moves(exchange: ExchangePlan, rows: int) -> list[np.ndarray]:
    """Place, unplace and the bags of the way back. Place [1, 0, 2] is undone by [1, 0, 2], [1, 2, 0] by [2, 0, 1]."""
    unplace = np.empty_like(exchange.place)
    unplace[exchange.place] = np.arange(len(unplace))
    return [exchange.place, unplace, *_bags(exchange.send_rows, rows)]


def _take_moves(exchange: ExchangePlan, shipped: Iterator[Tensor]) -> DeviceExchange:
    place, back, returns = next(shipped), next(shipped), _take_bags(shipped)
    counts = exchange.send_counts, exchange.recv_counts
    return DeviceExchange(returns.owner, place, back, returns, *counts, exchange.remote)


def _take_bags(shipped: Iterator[Tensor]) -> Bags:
    return Bags(next(shipped), next(shipped), next(shipped), next(shipped))


def _bags(owner: npt.NDArray[np.int64], rows: int) -> list[np.ndarray]:
    """Owner, targets, bounds, members of Bags. Owners [3, 0, 3] of 4 rows: targets 0 3, members 1 | 0 2."""
    counts = np.bincount(owner, minlength=rows)
    targets = np.flatnonzero(counts)
    bounds = np.concatenate(([0], np.cumsum(counts[targets])))
    return [owner, targets, bounds, np.argsort(owner, kind="stable")]


def _ship(arrays: Sequence[np.ndarray], device: torch.device) -> Iterator[Tensor]:
    """int32 views of one copy of all arrays on the device. Each begins at a multiple of 16 bytes, four numbers: Triton
    compiles a kernel anew for pointers that do not."""
    sizes = [len(array) for array in arrays]
    begins = np.concatenate(([0], np.cumsum([-(-size // 4) * 4 for size in sizes]))).tolist()
    pinned = device.type != "cpu"
    flat = torch.empty(begins[-1], dtype=torch.int32, pin_memory=pinned)
    for array, begin, size in zip(arrays, begins, sizes, strict=False):
        np.copyto(flat.numpy()[begin : begin + size], array, casting="same_kind")
    if pinned:
        flat = flat.to(device, non_blocking=True)
    return iter([flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)])
