"""Index tensors of an attention layout on a device, built once per micro-batch and shared by all its layers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wlb_megatron.sharding.attention_calls import ExchangePlan

Layout = TypeVar("Layout")
Parts = dict[int, tuple[Tensor, np.ndarray]]
"""Arrays that go to a device in one copy, by identity, and the tensors that will hold them."""


def device_layout(layout: Layout, device: torch.device | str) -> Layout:
    """A layout, or another record, with int32 tensors on `device` for its arrays.

    On a GPU an asynchronous copy from pinned memory. Each array starts at a multiple of 16 bytes, because Triton
    compiles a kernel anew for pointers that do not.
    """
    place, parts = torch.device(device), Parts()
    shipped_layout: Layout = _with_tensors(layout, place, parts)
    sizes = [len(array) for _, array in parts.values()]
    begins = np.concatenate(([0], np.cumsum([-(-size // 4) * 4 for size in sizes]))).tolist()
    flat = torch.empty(begins[-1], dtype=torch.int32, pin_memory=place.type != "cpu")
    for (_, array), begin in zip(parts.values(), begins, strict=False):
        np.copyto(flat.numpy()[begin : begin + len(array)], array, casting="same_kind")
    flat = flat.to(place, non_blocking=True)
    for (tensor, array), begin in zip(parts.values(), begins, strict=False):
        tensor.set_(flat[begin : begin + len(array)])  # type: ignore[call-overload]
    return shipped_layout


def _with_tensors(value: Any, device: torch.device, parts: Parts) -> Any:
    """A record with empty tensors for its arrays, one for an array that it has twice; and so the records in it."""
    if isinstance(value, np.ndarray):
        if id(value) not in parts:
            parts[id(value)] = torch.empty(0, dtype=torch.int32, device=device), value
        return parts[id(value)][0]
    if isinstance(value, ExchangePlan):
        if not value.used:
            return None
        value = replace(value, send_rows=_run(value.send_rows), arrivals=_run(value.arrivals))
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _with_tensors(getattr(value, f.name), device, parts) for f in fields(value)}
        return replace(value, **moved)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return tuple(_with_tensors(one, device, parts) for one in value)
    return value


def _run(rows: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Consecutive rows such as 3 4 5 as a slice, else the rows."""
    if not len(rows):
        return slice(0, 0)
    return slice(int(rows[0]), int(rows[-1]) + 1) if bool((np.diff(rows) == 1).all()) else rows
