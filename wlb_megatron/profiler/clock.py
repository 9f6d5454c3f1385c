"""Times a forward and a backward on a device: medians and spreads, with the host's share separate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]
SECONDS = 0.12
"""Device time for which a point is measured, after its warm-up."""

LEAST, MOST = 3, 11
HEAT = 0.25
"""Device time for which work runs before it is measured, so that power and clocks have settled (seconds)."""
SLEEP_CYCLES_PER_NS = 2.0
"""Cycles of torch.cuda._sleep per nanosecond, rounded up (an H100 runs at up to 1.98 GHz)."""


@dataclass(frozen=True)
class Timing:
    """Nanoseconds. forward, backward: (median, p20, p80) on the device; host_*: median to launch it."""

    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    host_forward: int
    host_backward: int
    repeats: int


def _spread(times: FloatArray) -> tuple[int, int, int]:
    middle, low, high = np.percentile(times, (50, 20, 80))
    return int(middle), int(low), int(high)


class Clock:
    """CUDA events on a GPU; the host's clock on a CPU, where work is done when a call returns.

    On a GPU work is repeated without a pause, as in training, because clocks are higher after a pause than they stay.
    If the host launches more slowly than the device runs, the device sleeps until everything is launched.
    """

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self.on_gpu = device.type == "cuda"
        self.seconds = seconds

    def measure(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], *, waits: bool = False
    ) -> Timing:
        """Passes forward's result to backward. waits: they wait for the device, so it must not sleep; otherwise they
        only launch work."""
        for _ in range(2):
            backward(forward())
        return self._on_gpu(forward, backward, waits) if self.on_gpu else self._on_cpu(forward, backward)

    def _on_cpu(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Timing:
        rows: list[tuple[int, int]] = []
        deadline = time.perf_counter_ns() + int(self.seconds * 1e9)
        while len(rows) < LEAST or (len(rows) < MOST and time.perf_counter_ns() < deadline):
            begin = time.perf_counter_ns()
            result = forward()
            middle = time.perf_counter_ns()
            backward(result)
            rows.append((middle - begin, time.perf_counter_ns() - middle))
        there, back = (_spread(np.array(side, dtype=np.float64)) for side in zip(*rows, strict=True))
        return Timing(there, back, 0, 0, len(rows))

    def _on_gpu(self, forward: Callable[[], Any], backward: Callable[[Any], Any], waits: bool) -> Timing:
        device, host = self._train(forward, backward, 1, 0 if waits else 30_000_000)
        run_ns, launch = float(device.sum()), float(host.sum())
        repeats = int(np.clip(self.seconds * 1e9 / max(run_ns, launch), LEAST, MOST))
        warm = int(HEAT * 1e9 / max(run_ns, launch if waits else 0)) + 1 if waits or run_ns > launch else 0
        lead = (launch - run_ns) * repeats * 1.3 if launch > run_ns else 0.0
        asleep = 0 if waits else min(int(lead) + 100_000, 150_000_000)
        device, host = self._train(forward, backward, warm + repeats, asleep)
        there, back = (_spread(side) for side in device[warm:].T)
        # A full queue makes the host wait: the quicker launches are what it takes.
        launched = np.percentile(host, 20, axis=0)
        return Timing(there, back, int(launched[0]), int(launched[1]), repeats)

    def _train(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], count: int, asleep: int
    ) -> tuple[FloatArray, FloatArray]:
        """float[count, 2]: the device's nanoseconds of each forward and backward, and the host's to launch them."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count + 1)]
        host = []
        torch.cuda.synchronize()
        torch.cuda._sleep(int(asleep * SLEEP_CYCLES_PER_NS))
        events[0].record()
        for number in range(count):
            begin = time.perf_counter_ns()
            result = forward()
            events[2 * number + 1].record()
            middle = time.perf_counter_ns()
            backward(result)
            del result
            events[2 * number + 2].record()
            host.append((middle - begin, time.perf_counter_ns() - middle))
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]
        return np.array(spans).reshape(count, 2), np.array(host, dtype=np.float64)
