"""An attention layout on a device: index tensors built once per micro-batch and shared by all its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wlb_megatron.sharding.calls.attention_calls import AttentionLayout
from wlb_megatron.sharding.calls.exchange import ExchangePlan
from wlb_megatron.sharding.calls.varlen_call import AttentionCall
from wlb_megatron.sharding.calls.window_call import WindowLayout
from wlb_megatron.sharding.chunks import CachedKeys, Kept, Taken


@dataclass(frozen=True)
class DeviceCall:
    """sharding.calls.varlen_call.AttentionCall with int32 tensors, and its mask.

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

    owner: int32[n], target row of each source row; where there are several targets, counted through all of them.
    The same grouped, of one target: its row targets[i] owns source rows members[bounds[i] : bounds[i + 1]], in order;
    targets own at least one.
    """

    owner: Tensor
    targets: Tensor
    bounds: Tensor
    members: Tensor


@dataclass(frozen=True)
class DeviceExchange:
    """sharding.calls.exchange.ExchangePlan with int32 tensors, and its inverse for the way back.

    unplace: arriving row j is buffer row unplace[j]. returns: of local rows, the rows that come back; then of the rows
    of each of DeviceCache.takes.
    """

    send_rows: Tensor
    place: Tensor
    unplace: Tensor
    returns: tuple[Bags, ...]
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    remote: bool


@dataclass(frozen=True)
class DeviceCache:
    """sharding.chunks.CachedKeys on a device. keeps: (piece, int32[k] local rows) each, None for all rows in order."""

    micro_batch: int
    takes: tuple[Taken, ...]
    keeps: tuple[tuple[int, Tensor | None], ...]
    prefixed: bool


@dataclass(frozen=True)
class DeviceWindow:
    """sharding.calls.window_call.WindowLayout on a device. exchange: None where the keys are its own, in order."""

    call: DeviceCall
    exchange: DeviceExchange | None
    cache: DeviceCache | None = None


@dataclass(frozen=True)
class DeviceLayout:
    """sharding.calls.attention_calls.AttentionLayout on a device.

    positions: int32[t]. queries: of local rows, the query rows of the rectangles. exchange: None where no rank
    needs earlier keys. window: for windowed layers. single: for the others, where one call serves them instead.
    cache: None where the micro-batch shares no document with another, or single serves.
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
    cache: DeviceCache | None = None


def device_layout(layout: AttentionLayout, device: torch.device | str) -> DeviceLayout:
    """Copy a layout to `device`: one asynchronous copy from pinned memory on a GPU."""
    exchange, rectangles = layout.exchange, layout.rectangles
    arrays: list[np.ndarray] = [layout.positions, layout.diagonals.cu_seqlens_q]
    if rectangles:
        arrays += [rectangles.cu_seqlens_q, rectangles.cu_seqlens_kv]
        arrays += _bags(layout.query_rows, layout.tokens)
    needed = rectangles is not None or exchange.remote
    if needed:
        arrays += _moves(exchange, _parts(layout.cached, layout.tokens))
    arrays += _keeps(layout.cached, layout.tokens)
    for near in filter(None, (layout.window, layout.single)):
        arrays += _near(near, layout.tokens)
    shipped = _ship(arrays, torch.device(device))

    positions, own = next(shipped), next(shipped)
    diagonals, others, queries = _call(layout.diagonals, (own, own)), None, None
    if rectangles:
        others = _call(rectangles, (next(shipped), next(shipped)), causal=False)
        (queries,) = _take_bags(shipped)
    moves = _take_moves(exchange, _parts(layout.cached, layout.tokens), shipped) if needed else None
    cache = _take_cache(layout.cached, layout.tokens, shipped)
    window, single = (
        None if near is None else _take_near(near, layout.tokens, shipped)
        for near in (layout.window, layout.single)
    )
    return DeviceLayout(
        layout.tokens,
        positions,
        diagonals,
        others,
        queries,
        moves,
        layout.hide_return,
        window,
        single,
        cache,
    )


def _at_home(near: WindowLayout) -> bool:
    """Where nothing is remote or cached all pieces lie whole on a rank: their keys are the rank's own, in order."""
    return not near.exchange.remote and not (near.cached and near.cached.takes)


def _near(near: WindowLayout, rows: int) -> list[np.ndarray]:
    arrays: list[np.ndarray] = [near.call.cu_seqlens_q]
    if not _at_home(near):
        arrays += [near.call.cu_seqlens_kv, *_moves(near.exchange, _parts(near.cached, rows))]
    return arrays + _keeps(near.cached, rows)


def _take_near(near: WindowLayout, rows: int, shipped: Iterator[Tensor]) -> DeviceWindow:
    bounds, moves = next(shipped), None
    seen = bounds
    if not _at_home(near):
        seen, moves = next(shipped), _take_moves(near.exchange, _parts(near.cached, rows), shipped)
    return DeviceWindow(
        _call(near.call, (bounds, seen), near.size), moves, _take_cache(near.cached, rows, shipped)
    )


def _parts(cached: CachedKeys | None, rows: int) -> list[int]:
    """Rows of each part of what a rank holds: its own, then each that it takes from its cache."""
    return [rows, *(take.rows for take in cached.takes)] if cached else [rows]


def _keeps(cached: CachedKeys | None, rows: int) -> list[np.ndarray]:
    return [keep.rows for keep in cached.keeps if not _all(keep, rows)] if cached else []


def _take_cache(cached: CachedKeys | None, rows: int, shipped: Iterator[Tensor]) -> DeviceCache | None:
    if cached is None:
        return None
    keeps = [(keep.piece, None if _all(keep, rows) else next(shipped)) for keep in cached.keeps]
    return DeviceCache(cached.micro_batch, cached.takes, tuple(keeps), cached.prefixed)


def _all(keep: Kept, rows: int) -> bool:
    """Whether all rows are kept, in order: none need be copied."""
    return bool(np.array_equal(keep.rows, np.arange(rows)))


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


def _moves(exchange: ExchangePlan, parts: Sequence[int]) -> list[np.ndarray]:
    """Place, unplace, rows to send and the bags of the way back. Place [1, 0, 2] is undone by [1, 0, 2], [1, 2, 0] by
    [2, 0, 1]. parts: rows of each target of what comes back, which send_rows counts through."""
    unplace = np.empty_like(exchange.place)
    unplace[exchange.place] = np.arange(len(unplace))
    return [exchange.place, unplace, *_bags(exchange.send_rows, *parts)]


def _take_moves(exchange: ExchangePlan, parts: Sequence[int], shipped: Iterator[Tensor]) -> DeviceExchange:
    place, back, returns = next(shipped), next(shipped), _take_bags(shipped, len(parts))
    counts = exchange.send_counts, exchange.recv_counts
    return DeviceExchange(returns[0].owner, place, back, returns, *counts, exchange.remote)


def _take_bags(shipped: Iterator[Tensor], parts: int = 1) -> tuple[Bags, ...]:
    owner = next(shipped)
    return tuple(Bags(owner, next(shipped), next(shipped), next(shipped)) for _ in range(parts))


def _bags(owner: npt.NDArray[np.int64], *parts: int) -> list[np.ndarray]:
    """Owner, and of each part of what it counts, of so many rows: targets, bounds, members of Bags.

    Owners [3, 0, 3] of 4 rows: targets 0 3, members 1 | 0 2. Of 2 and 2 rows: target 0, member 1, then target 1,
    members 0 2.
    """
    counts, members = np.bincount(owner, minlength=sum(parts)), np.argsort(owner, kind="stable")
    arrays, row, taken = [owner], 0, 0
    for rows in parts:
        targets = np.flatnonzero(counts[row : row + rows])
        bounds = np.concatenate(([0], np.cumsum(counts[row + targets])))
        arrays += [targets, bounds, members[taken : taken + bounds[-1]]]
        row, taken = row + rows, taken + bounds[-1]
    return arrays


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
