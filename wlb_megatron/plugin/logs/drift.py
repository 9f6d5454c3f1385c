"""Whether iterations take the time that they are predicted to take."""

from __future__ import annotations

from collections import deque
from statistics import median

CALIBRATION = (5, 20)
"""Of the measured iterations of a run, the first that counts and how many tell the scale."""
WINDOW = 20
LIMIT = 0.15


class Drift:
    """Measured over predicted times. The first iterations' median is the scale; later ones are compared with it.

    An iteration is left out if it is no number of milliseconds (a step that was skipped, a clock that stood).
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        self._seen = 0
        self._ratios: deque[float] = deque(maxlen=max(WINDOW, CALIBRATION[1]))
        self._warned = False

    def add(self, predicted: float, measured: float) -> str | None:
        """Milliseconds of one iteration. A warning, the first time that the last WINDOW iterations' median is more
        than LIMIT from the scale."""
        if not (predicted > 0 and measured > 0):
            return None
        self._seen += 1
        if self._seen < CALIBRATION[0]:
            return None
        self._ratios.append(measured / predicted)
        if self.scale is None:
            if len(self._ratios) < CALIBRATION[1]:
                return None
            self.scale = median(self._ratios)
            self._ratios.clear()
            return None
        if len(self._ratios) < WINDOW or self._warned:
            return None
        now = median(list(self._ratios)[-WINDOW:]) / self.scale
        if abs(now - 1) <= LIMIT:
            return None
        self._warned = True
        slower = "longer" if now > 1 else "shorter"
        return (
            f"the last {WINDOW} iterations took {abs(now - 1):.0%} {slower} than predicted, compared with the run's "
            "first ones: a slower GPU or network, another load on the machine, or work that plans do not count"
        )
