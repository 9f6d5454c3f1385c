"""How far a run has come, and when it will have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

WINDOW = 200
"""Iterations whose time, evaluations and saves between them included, is expected of the next ones."""


class Progress:
    """Of this start of the run."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ended: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, iteration: int, of: int | None) -> dict[str, Any]:
        """Figures after an iteration. of: iterations of the whole run; None: not known.

        seconds_left is missing until two iterations have ended.
        """
        now = self._clock()
        self._ended.append((iteration, now))
        figures: dict[str, Any] = {"time": round(now, 3), "train_iterations": of}
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


def duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 20 min, 5 d 7 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
