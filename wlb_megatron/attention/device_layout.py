"""Index tensors of an attention layout on a device, built once per micro-batch and shared by all its layers."""

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
    """Which rows of a source belong to which row of a target, int32 all.

    Target row targets[i] owns source rows members[bounds[i] : bounds[i + 1]], in order; targets own at least one. A
    member j below 0 is row ~j of a second source, of what arrives.
    """

    targets: Tensor
    bounds: Tensor
    members: Tensor


Rows = slice | Tensor
"""Rows of a buffer: a run of them, of which a view serves, or int32 indices."""


@dataclass(frozen=True)
class DeviceExchange:
    """sharding.calls.exchange.ExchangePlan with int32 tensors, and its inverse for the way back.

    sends: the rows that go to others. arrivals: buffer rows of what arrives, in its order: their gradients go back.
    returns: the buffer rows, and below 0 the rows that come back, that belong to each of the rank's rows; then to those
    of each of DeviceCache.takes.
    """

    sends: Rows
    place: Tensor
    arrivals: Rows
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

    positions: int32[t]. query_rows: int32, the local row of each query of the rectangles; queries: the same by local
    row. exchange: None where no rank needs earlier keys. window: for windowed layers. single: for the others,
    where one call serves them instead. cache: None where the micro-batch shares no document with another, or single
    serves.
    """

    tokens: int
    positions: Tensor
    diagonals: DeviceCall
    rectangles: DeviceCall | None
    query_rows: Tensor | None
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
        arrays += [layout.query_rows, *_bags(layout.query_rows, layout.tokens)]
    needed = rectangles is not None or exchange.remote
    if needed:
        arrays += _moves(exchange, _parts(layout.cached, layout.tokens))
    arrays += _keeps(layout.cached, layout.tokens)
    for near in filter(None, (layout.window, layout.single)):
        arrays += _near(near, layout.tokens)
    shipped = _ship(arrays, torch.device(device))

    positions, own = next(shipped), next(shipped)
    diagonals, others, rows, queries = _call(layout.diagonals, (own, own)), None, None, None
    if rectangles:
        others = _call(rectangles, (next(shipped), next(shipped)), causal=False)
        rows, queries = next(shipped), _take_bags(shipped)
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
        rows,
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
    """Place, the rows to send and those that arrive unless they are runs, and the bags of the way back. parts: rows of
    each target of what comes back, which send_rows counts through."""
    place, send_rows = exchange.place, exchange.send_rows
    own, first = np.flatnonzero(place >= 0), sum(exchange.send_counts[: exchange.rank])
    # In rank order, so that a sum does not depend on which of its rows travel.
    back = ~np.arange(len(send_rows))
    owner = np.concatenate((send_rows[:first], place[own], send_rows[first:]))
    source = np.concatenate((back[:first], own, back[first:]))
    chosen = [rows for rows in (send_rows, _arrivals(exchange)) if _run(rows) is None]
    return [place, *chosen, *_bags(owner, *parts, source=source)]


def _take_moves(exchange: ExchangePlan, parts: Sequence[int], shipped: Iterator[Tensor]) -> DeviceExchange:
    place = next(shipped)
    sends, arrivals = (
        next(shipped) if (run := _run(rows)) is None else run
        for rows in (exchange.send_rows, _arrivals(exchange))
    )
    returns = tuple(_take_bags(shipped) for _ in parts)
    counts = exchange.send_counts, exchange.recv_counts
    return DeviceExchange(sends, place, arrivals, returns, *counts, exchange.remote)


def _arrivals(exchange: ExchangePlan) -> npt.NDArray[np.int64]:
    """Buffer row of each row that arrives. Place [~1, 0, ~0]: 2 0."""
    rows = np.flatnonzero(exchange.place < 0)
    return rows[np.argsort(~exchange.place[rows])]


def _run(rows: npt.NDArray[np.int64]) -> slice | None:
    """Rows 3 4 5 as a slice; None where they are not one after the other."""
    if not len(rows):
        return slice(0, 0)
    return slice(int(rows[0]), int(rows[-1]) + 1) if bool((np.diff(rows) == 1).all()) else None


def _take_bags(shipped: Iterator[Tensor]) -> Bags:
    return Bags(next(shipped), next(shipped), next(shipped))


def _bags(
    owner: npt.NDArray[np.int64], *parts: int, source: npt.NDArray[np.int64] | None = None
) -> list[np.ndarray]:
    """Of each part, of so many rows, of what `owner` counts through: targets, bounds, members of Bags.

    source: int64, source row of each owner; None: its place. Owners [3, 0, 3] of 4 rows: targets 0 3, members 1 | 0 2.
    Of 2 and 2 rows: target 0, member 1, then target 1, members 0 2.
    """
    counts, members = np.bincount(owner, minlength=sum(parts)), np.argsort(owner, kind="stable")
    members = members if source is None else source[members]
    arrays, row, taken = [], 0, 0
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
