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
        self._told = 1.0  # the pace that the log knows
        self._moved = 0  # iterations since the median has

    def add(self, predicted: float, measured: float) -> str | None:
        """Milliseconds of one iteration. A warning where the last WINDOW iterations' median has moved by more than
        LIMIT of the scale since the last warning, or since the first iterations."""
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
        if len(self._ratios) < WINDOW:
            return None
        now = median(list(self._ratios)[-WINDOW:]) / self.scale
        self._moved = self._moved + 1 if abs(now - self._told) > LIMIT else 0
        if self._moved <= WINDOW // 2:  # the other half of the window is from before
            return None
        self._told, self._moved = now, 0
        if abs(now - 1) <= LIMIT:
            return f"the last {WINDOW} iterations took as long as the run's first ones again"
        slower = "longer" if now > 1 else "shorter"
        cost = abs(now - 1) * self.scale * predicted
        return (
            f"the last {WINDOW} iterations took {abs(now - 1):.0%} {slower} than predicted ({cost:,.0f} ms each), "
            "compared with the run's first ones"
        )
