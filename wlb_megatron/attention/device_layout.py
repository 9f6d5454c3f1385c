"""Index tensors of an attention layout on a device, built once per micro-batch and shared by all its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wlb_megatron.sharding.attention_calls import (
    AttentionCall,
    AttentionLayout,
    CachedKeys,
    ExchangePlan,
    Taken,
    WindowLayout,
)


@dataclass(frozen=True)
class DeviceCall:
    """sharding.attention_calls.AttentionCall with int32 tensors on a device, and its mask.

    * causal: queries are the last of their sequence's keys, and none attends to a later key.
    * window: earlier keys that a query attends to, None for all.
    * q_rows, kv_rows: total queries and keys of all sequences. The call's buffers may have more rows
      (sharded_attention.Kernels.buffer_rows).
    * sizes: (queries, keys) of each sequence, on the host, for backends that loop over sequences.
    * equal: AttentionCall.equal.

    If cu_seqlens_q is cu_seqlens_kv, queries and keys are the same rows.
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
class RowGroups:
    """Which rows of a source belong to which row of a target; all tensors int32.

    Target row targets[i] owns source rows members[bounds[i] : bounds[i + 1]], in order, at least one. A member j
    below 0 is row ~j of a second source, which holds what arrives from other ranks.
    """

    targets: Tensor
    bounds: Tensor
    members: Tensor


Rows = slice | Tensor
"""Rows of a buffer: a slice if they are consecutive (a view suffices), else int32 indices."""


@dataclass(frozen=True)
class DeviceExchange:
    """sharding.attention_calls.ExchangePlan with int32 tensors, and its inverse for the way back.

    sends: the rows that go to other ranks. arrivals: the buffer rows of what arrives, in order of arrival; their
    gradients go back. returns: for each of the rank's own rows, then for each row of DeviceCache.takes, the rows
    whose gradients belong to it: buffer rows, and below 0 the rows that come back.
    """

    sends: Rows
    place: Tensor
    arrivals: Rows
    returns: tuple[RowGroups, ...]
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    remote: bool


@dataclass(frozen=True)
class DeviceCache:
    """sharding.attention_calls.CachedKeys on a device. keeps: (piece, int32[k] local rows) each; None for all rows in
    order."""

    micro_batch: int
    takes: tuple[Taken, ...]
    keeps: tuple[tuple[int, Tensor | None], ...]
    prefixed: bool


@dataclass(frozen=True)
class DeviceWindow:
    """sharding.attention_calls.WindowLayout on a device. exchange: None if the keys are the rank's own, in order."""

    call: DeviceCall
    exchange: DeviceExchange | None
    cache: DeviceCache | None = None


@dataclass(frozen=True)
class DeviceLayout:
    """sharding.attention_calls.AttentionLayout on a device.

    * positions: int32[t]. query_rows: int32, the local row of each query of the rectangles. queries: the inverse, by
      local row.
    * exchange: None if no rank needs earlier keys.
    * window: the layout of windowed layers. single: the layout of the other layers, if one call computes them.
    * cache: None if the micro-batch shares no document with another, or if `single` is used.
    """

    tokens: int
    positions: Tensor
    diagonals: DeviceCall
    rectangles: DeviceCall | None
    query_rows: Tensor | None
    queries: RowGroups | None
    exchange: DeviceExchange | None
    hide_return: bool
    window: DeviceWindow | None = None
    single: DeviceWindow | None = None
    cache: DeviceCache | None = None


class Shipment:
    """Arrays that go to a device in one copy. Until they are sent, their tensors are empty."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Tensor, np.ndarray]] = []

    def add(self, array: np.ndarray) -> Tensor:
        """The int32 tensor on the device that will hold the array."""
        tensor = torch.empty(0, dtype=torch.int32, device=self._device)
        self._parts.append((tensor, array))
        return tensor

    def groups(self, arrays: Sequence[np.ndarray]) -> tuple[RowGroups, ...]:
        """Targets, bounds and members of each."""
        tensors = map(self.add, arrays)
        return tuple(map(RowGroups, tensors, tensors, tensors))

    def send(self) -> None:
        """On a GPU an asynchronous copy from pinned memory.

        Each array starts at a multiple of 16 bytes, because Triton compiles a kernel anew for pointers that do not.
        """
        sizes = [len(array) for _, array in self._parts]
        begins = np.concatenate(([0], np.cumsum([-(-size // 4) * 4 for size in sizes]))).tolist()
        pinned = self._device.type != "cpu"
        flat = torch.empty(begins[-1], dtype=torch.int32, pin_memory=pinned)
        for (_, array), begin in zip(self._parts, begins, strict=False):
            np.copyto(flat.numpy()[begin : begin + len(array)], array, casting="same_kind")
        flat = flat.to(self._device, non_blocking=True)
        for (tensor, array), begin in zip(self._parts, begins, strict=False):
            tensor.set_(flat[begin : begin + len(array)])  # type: ignore[call-overload]


def device_layout(layout: AttentionLayout, device: torch.device | str) -> DeviceLayout:
    """Copies a layout to `device`."""
    shipment, tokens = Shipment(torch.device(device)), layout.tokens
    add, exchange, rectangles = shipment.add, layout.exchange, layout.rectangles
    bounds = add(layout.diagonals.cu_seqlens_q)
    rectangle_call = rows = queries = moves = None
    if rectangles:
        earlier_bounds = add(rectangles.cu_seqlens_q), add(rectangles.cu_seqlens_kv)
        rectangle_call, rows = _call(rectangles, earlier_bounds, causal=False), add(layout.query_rows)
        (queries,) = shipment.groups(_row_groups(layout.query_rows, tokens))
    if rectangles or exchange.remote:
        moves = _moves(exchange, _parts(layout.cached, tokens), shipment)
    window, single = (
        None if one_call is None else _one_call(one_call, tokens, shipment)
        for one_call in (layout.window, layout.single)
    )
    shipped_layout = DeviceLayout(
        tokens=tokens,
        positions=add(layout.positions),
        diagonals=_call(layout.diagonals, (bounds, bounds)),
        rectangles=rectangle_call,
        query_rows=rows,
        queries=queries,
        exchange=moves,
        hide_return=layout.hide_return,
        window=window,
        single=single,
        cache=_cache(layout.cached, tokens, add),
    )
    shipment.send()
    return shipped_layout


def _one_call(one_call: WindowLayout, rows: int, shipment: Shipment) -> DeviceWindow:
    bounds = key_bounds = shipment.add(one_call.call.cu_seqlens_q)
    moves, cached = None, one_call.cached
    # With nothing remote or cached, all pieces are whole on a rank, and its keys are its own, in order.
    if one_call.exchange.remote or (cached and cached.takes):
        key_bounds = shipment.add(one_call.call.cu_seqlens_kv)
        moves = _moves(one_call.exchange, _parts(cached, rows), shipment)
    call = _call(one_call.call, (bounds, key_bounds), one_call.size)
    return DeviceWindow(call, moves, _cache(cached, rows, shipment.add))


def _parts(cached: CachedKeys | None, rows: int) -> list[int]:
    """Rows of each part that a rank holds: its own, then those of each entry that it reads from its cache."""
    return [rows, *(take.rows for take in cached.takes)] if cached else [rows]


def _cache(cached: CachedKeys | None, rows: int, add: Callable[[np.ndarray], Tensor]) -> DeviceCache | None:
    if cached is None:
        return None
    # If all rows are kept, in order, none need be copied.
    every = np.arange(rows)
    keeps = [
        (keep.piece, None if np.array_equal(keep.rows, every) else add(keep.rows)) for keep in cached.keeps
    ]
    return DeviceCache(cached.micro_batch, cached.takes, tuple(keeps), cached.prefixed)


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


def _moves(exchange: ExchangePlan, parts: Sequence[int], shipment: Shipment) -> DeviceExchange:
    """parts: rows of each target of what comes back; send_rows counts through them."""
    place, send_rows = exchange.place, exchange.send_rows
    local, first = np.flatnonzero(place >= 0), sum(exchange.send_counts[: exchange.rank])
    # In rank order, so that a sum does not depend on which of its rows come from other ranks.
    back = ~np.arange(len(send_rows))
    owner = np.concatenate((send_rows[:first], place[local], send_rows[first:]))
    source = np.concatenate((back[:first], local, back[first:]))
    sends, arrivals = (
        shipment.add(rows) if (run := _run(rows)) is None else run
        for rows in (send_rows, _arrivals(exchange))
    )
    returns = shipment.groups(_row_groups(owner, *parts, source=source))
    counts = exchange.send_counts, exchange.recv_counts
    return DeviceExchange(sends, shipment.add(place), arrivals, returns, *counts, exchange.remote)


def _arrivals(exchange: ExchangePlan) -> npt.NDArray[np.int64]:
    """The buffer row of each row that arrives. Example: place [~1, 0, ~0] gives 2 0."""
    rows = np.flatnonzero(exchange.place < 0)
    return rows[np.argsort(~exchange.place[rows])]


def _run(rows: npt.NDArray[np.int64]) -> slice | None:
    """Consecutive rows such as 3 4 5 as a slice, else None."""
    if not len(rows):
        return slice(0, 0)
    return slice(int(rows[0]), int(rows[-1]) + 1) if bool((np.diff(rows) == 1).all()) else None


def _row_groups(
    owner: npt.NDArray[np.int64], *parts: int, source: npt.NDArray[np.int64] | None = None
) -> list[np.ndarray]:
    """targets, bounds and members of RowGroups, for each part of the rows that `owner` counts through.

    owner: int64, the target row of each source row. parts: rows of each part. source: int64, the source row of each
    owner; None: its index.

    Example: owners [3, 0, 3] of 4 rows: targets 0 3, members 1 | 0 2. With parts of 2 and 2 rows: target 0, member 1,
    then target 1, members 0 2.
    """
    counts, members = np.bincount(owner, minlength=sum(parts)), np.argsort(owner, kind="stable")
    members = members if source is None else source[members]
    arrays, row, member_offset = [], 0, 0
    for rows in parts:
        targets = np.flatnonzero(counts[row : row + rows])
        bounds = np.concatenate(([0], np.cumsum(counts[row + targets])))
        arrays += [targets, bounds, members[member_offset : member_offset + bounds[-1]]]
        row, member_offset = row + rows, member_offset + bounds[-1]
    return arrays
