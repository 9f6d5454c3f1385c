"""How far a run has come, and when it will have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from wlb_megatron.report.progress import duration

WINDOW = 200
"""Iterations whose time, evaluations and saves between them included, is expected of the next ones."""


class Progress:
    """Of this start of the run."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began = clock, round(clock(), 3)
        self._ended: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, iteration: int, of: int | None) -> dict[str, Any]:
        """Figures after an iteration. of: iterations of the whole run; None: not known.

        seconds_left is missing until two iterations have ended.
        """
        now = self._clock()
        self._ended.append((iteration, now))
        figures: dict[str, Any] = {"time": round(now, 3), "started": self._began, "train_iterations": of}
        (first, then), passed = self._ended[0], iteration - self._ended[0][0]
        if of and passed > 0 and now > then:
            figures["seconds_left"] = round((of - iteration) * (now - then) / (iteration - first), 1)
        return figures


def describe(figures: Mapping[str, Any]) -> str:
    """The part of a log line behind the iteration's number."""
    of, left = figures.get("train_iterations"), figures.get("seconds_left")
    if not of:
        return ""
    line = f" of {of} ({figures['iteration'] / of:.1%}"
    return line + (f", {duration(left)} left)" if left is not None else ")")
