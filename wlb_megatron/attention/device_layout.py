"""An attention layout on a device: index tensors built once per micro-batch and shared by all its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wlb_megatron.sharding.attention_calls import AttentionLayout


@dataclass(frozen=True)
class DeviceCall:
    """sharding.attention_calls.AttentionCall with int32 tensors. segments: (q_start, q_end, kv_start, kv_end)."""

    mask: str
    gathered: bool
    rows: tuple[int, int]
    q_starts: Tensor
    cu_seqlens_q: Tensor
    kv_starts: Tensor
    cu_seqlens_kv: Tensor
    max_q: int
    max_kv: int
    skipped: Tensor | None
    fresh: bool
    segments: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class DeviceExchange:
    """sharding.exchange.ExchangePlan with int64 tensors, and its inverse for the way back.

    unplace: arriving row j is buffer row unplace[j]. sum_rows, sum_bounds: local row i's gradient is the sum
    of the returned rows sum_rows[sum_bounds[i] : sum_bounds[i + 1]].
    """

    send_rows: Tensor
    place: Tensor
    unplace: Tensor
    sum_rows: Tensor
    sum_bounds: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    remote: bool


@dataclass(frozen=True)
class DeviceLayout:
    """tokens: t. positions: int64[t], position of each local token inside its document."""

    tokens: int
    calls: tuple[DeviceCall, ...]
    exchange: DeviceExchange | None
    positions: Tensor


def device_layout(layout: AttentionLayout, device: torch.device | str) -> DeviceLayout:
    """Copy a layout to `device`: two asynchronous copies from pinned memory on a GPU, none on a CPU."""
    target = torch.device(device)
    exchange = layout.exchange
    need = any(call.gathered for call in layout.calls) or exchange.remote
    long: list[np.ndarray] = [layout.positions]
    if need:
        unplace = np.empty_like(exchange.place)
        unplace[exchange.place] = np.arange(len(unplace))
        counts = np.bincount(exchange.send_rows, minlength=layout.tokens)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        order = np.argsort(exchange.send_rows, kind="stable")
        long += [exchange.send_rows, exchange.place, unplace, order, bounds]
    positions, *indices = _ship(long, torch.int64, target)
    device_exchange = None
    if need:
        send_rows, place, back, sum_rows, sum_bounds = indices
        device_exchange = DeviceExchange(
            send_rows,
            place,
            back,
            sum_rows,
            sum_bounds,
            exchange.send_counts,
            exchange.recv_counts,
            exchange.remote,
        )
    short: list[np.ndarray] = []
    for call in layout.calls:
        short += [call.q_starts, call.cu_seqlens_q, call.kv_starts, call.cu_seqlens_kv]
    shipped = iter(_ship(short, torch.int32, target))
    masks = iter(_ship([~c.covered for c in layout.calls if c.covered is not None], torch.bool, target))
    calls = tuple(
        DeviceCall(
            call.mask,
            call.gathered,
            call.rows,
            next(shipped),
            next(shipped),
            next(shipped),
            next(shipped),
            call.max_q,
            call.max_kv,
            None if call.covered is None else next(masks),
            call.fresh,
            _segments(call),
        )
        for call in layout.calls
    )
    return DeviceLayout(layout.tokens, calls, device_exchange, positions)


def _segments(call: Any) -> tuple[tuple[int, int, int, int], ...]:
    q, k = call.q_starts[:-1], call.kv_starts[:-1]
    rows = np.stack((q, q + np.diff(call.cu_seqlens_q), k, k + np.diff(call.cu_seqlens_kv)), axis=1)
    return tuple(map(tuple, rows.tolist()))


def _ship(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Views of one copy of all arrays on the device."""
    if not arrays:
        return []
    flat = torch.from_numpy(np.concatenate(arrays)).to(dtype)
    if device.type != "cpu":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return list(flat.split([len(array) for array in arrays]))
