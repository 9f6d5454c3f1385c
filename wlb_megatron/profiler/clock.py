"""Times a forward and a backward on a device: medians and spreads, the host's share apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SECONDS = 0.12
"""Device time that a point is measured for, beside its warm-up."""

LEAST, MOST = 3, 15
SLEEP_CYCLES_PER_NS = 2.0
"""Cycles of torch.cuda._sleep for a nanosecond, with some to spare (an H100 runs at up to 1.98 GHz)."""


@dataclass(frozen=True)
class Timing:
    """Nanoseconds. forward, backward: (median, p20, p80) on the device; host_*: median to launch it."""

    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    host_forward: int
    host_backward: int
    repeats: int


def _spread(times: npt.NDArray[np.float64]) -> tuple[int, int, int]:
    middle, low, high = np.percentile(times, (50, 20, 80))
    return int(middle), int(low), int(high)


class Clock:
    """CUDA events on a GPU; on a CPU, where work is done when a call returns, the host's clock."""

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.seconds = seconds

    def measure(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Timing:
        """forward's result is given to backward. Both launch work only: they must not wait for the device."""
        for _ in range(2):
            backward(forward())
        begin = self._now()
        marks = self._run(forward, backward, 0)
        whole = self._now() - begin
        host = int(marks[2] - marks[0]) if self.on_gpu else 0
        repeats = int(np.clip(self.seconds * 1e9 / max(whole, 1), LEAST, MOST))
        rows = [self._run(forward, backward, host) for _ in range(repeats)]
        times = np.array(rows, dtype=np.float64)
        device = times[:, 3:] if self.on_gpu else np.diff(times[:, :3], axis=1)
        # On a CPU there is nothing to launch: the host is the device.
        launched = np.median(np.diff(times[:, :3], axis=1), axis=0) * self.on_gpu
        there, back = (_spread(device[:, i]) for i in (0, 1))
        return Timing(there, back, int(launched[0]), int(launched[1]), repeats)

    def _now(self) -> int:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def _run(self, forward: Callable[[], Any], backward: Callable[[Any], Any], host: int) -> list[float]:
        """Host's clock before, between and after; then, on a GPU, the device's nanoseconds of both."""
        if not self.on_gpu:
            marks = [time.perf_counter_ns()]
            made = forward()
            marks.append(time.perf_counter_ns())
            backward(made)
            return [*map(float, marks), float(time.perf_counter_ns())]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        # The device sleeps until the host has launched all of it: what is measured is the device alone.
        torch.cuda._sleep(int(min(host * 1.3 + 50_000, 30_000_000) * SLEEP_CYCLES_PER_NS))
        marks = [time.perf_counter_ns()]
        events[0].record()
        made = forward()
        events[1].record()
        marks.append(time.perf_counter_ns())
        backward(made)
        events[2].record()
        marks.append(time.perf_counter_ns())
        torch.cuda.synchronize()
        spans = [events[i].elapsed_time(events[i + 1]) * 1e6 for i in (0, 1)]
        return [*map(float, marks), *spans]
