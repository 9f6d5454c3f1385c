"""Which micro-batch and window fit a GPU's memory, counted as training counts them (packing/limits.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.limits import MARGIN, GpuMemory
from wlb_megatron.workload.memory import GIB, LEAST, memory_needed

MOST = 1 << 26
"""The search ends at this many tokens."""


class Fits(NamedTuple):
    """What fits the GPU: tokens of the longest micro-batch and of the longest window; 0: not even the smallest.

    in_chunks: with documents in chunks, else with whole ones, which need 1.25 windows.
    """

    micro_batch: int
    window: int
    gib: float
    in_chunks: bool


def fits(memory: GpuMemory, *, in_chunks: bool) -> Fits:
    room = int(memory.size * (1 - MARGIN))
    gib = memory.size / GIB
    if in_chunks:
        plain = WlbConfig()
        window = _most(1024, lambda w: replace(memory, window=w).needed(plain, w)[0] <= room)
        return Fits(memory.in_chunks(), window, gib, True)
    limit = _most(memory.alignment, lambda tokens: memory_needed(memory.shape, memory.layout, tokens) <= room)
    return Fits(limit, limit * LEAST[1] // LEAST[0] // 1024 * 1024, gib, False)


def _most(step: int, fit: Callable[[int], bool]) -> int:
    """The largest multiple of `step` that fits, if the need grows with it."""
    low, high = 0, MOST // step
    while low < high:
        middle = (low + high + 1) // 2
        if fit(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step
