"""Whether iterations take the time that they are predicted to take, and which rank computes slower than the others.

Within a step all ranks wait for the slowest, so that their times say little. So ranks are compared by the same small
work on every rank, now and then between two steps. Alone, a GPU whose clock was lowered, or a rank whose processor
something else uses, takes longer for the same matrix products and the same Python.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.stores import common_store

EVERY = 100
"""Iterations between two measurements: one takes some 10 ms."""
FIRST = 10
"""Iteration of the first one."""
LIMIT = 0.15
"""A rank that takes longer than the median by more of it is named, and so is a pace that moves by more of the run's
first one. A change by more is told again."""
_REPEATS = 3
_SIZE, _PRODUCTS = 2048, 16
_LOOPS = 20_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one rank: milliseconds of the products on its device, and of the Python loop."""

    rank: int
    host: str
    device: str
    device_ms: float
    host_ms: float


@dataclass(slots=True)
class Stragglers:
    """store: holds all ranks' latest measurements. reported: the rank, kind of work and excess that the log has said
    last.
    """

    store: Any = None
    slowest: Pace | None = None
    excess: float = 0.0
    reported: tuple[int, str, float] | None = None


def after_iteration(iteration: int) -> str | None:
    """To be called by every rank after each iteration: measures, and sends the times to the last rank, which reads
    them one iteration later. A warning there, where a rank is slower than the others, or no longer."""
    state = part(Stragglers)
    measures = iteration == FIRST or iteration % EVERY == 0
    if measures:
        if state.store is None:
            state.store = common_store("pace")
        state.store.set(str(dist.get_rank()), json.dumps(_measure()))
    if state.store is None or dist.get_rank() < dist.get_world_size() - 1:
        return None
    if iteration - 1 == FIRST or (iteration - 1) % EVERY == 0:
        keys = [str(rank) for rank in range(dist.get_world_size())]
        if state.store.check(keys):  # else a rank is an iteration behind: next time
            return judge(
                [
                    Pace(rank_number, *json.loads(text))
                    for rank_number, text in enumerate(state.store.multi_get(keys))
                ]
            )
    return None


def judge(paces: Sequence[Pace]) -> str | None:
    """Remember the slowest rank; a line if it is another than before, or slower by more than LIMIT."""
    state = part(Stragglers)
    outlier = None
    for kind in ("device_ms", "host_ms"):
        usual = median(getattr(pace, kind) for pace in paces)
        slowest = max(paces, key=lambda pace: getattr(pace, kind))
        excess = getattr(slowest, kind) / usual - 1 if usual > 0 else 0.0
        if outlier is None or excess > outlier[2]:
            outlier = slowest, kind, excess
    assert outlier is not None
    slowest, kind, excess = outlier
    state.slowest, state.excess = slowest, excess
    before, state.reported = state.reported, (slowest.rank, kind, excess) if excess > LIMIT else None
    if state.reported is None:
        return "no rank is slower than the others any more" if before is not None else None
    if before is not None and before[:2] == state.reported[:2] and abs(before[2] - excess) <= LIMIT:
        state.reported = before
        return None
    return f"{name_slowest()}; every step waits for it"


def name_slowest() -> str | None:
    """The slowest rank at the last measurement, if it stands out."""
    state = part(Stragglers)
    if state.reported is None or state.slowest is None:
        return None
    pace, work = state.slowest, {"device_ms": "matrix products", "host_ms": "Python"}[state.reported[1]]
    return (
        f"rank {pace.rank} on {pace.host} ({pace.device}) takes {state.excess:.0%} longer than the median of all ranks "
        f"for the same {work}"
    )


def figures() -> dict[str, Any]:
    """Of the last measurement, for the log's JSON; nothing before the first one."""
    state = part(Stragglers)
    if state.slowest is None:
        return {}
    pace = state.slowest
    return {"slowest_rank": pace.rank, "slowest_host": pace.host, "slowest_excess": round(state.excess, 4)}


def _measure() -> tuple[str, str, float, float]:
    """This rank's Pace without its number."""
    device, name = torch.device("cpu"), "CPU"
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
        name = f"GPU {device.index}, {torch.cuda.get_device_name(device)}"
    on_gpu = device.type == "cuda"
    size, kind = (_SIZE, torch.bfloat16) if on_gpu else (_SIZE // 16, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=kind) / size
    device_times, host_times = [], []
    for _ in range(_REPEATS + 1):  # the first warms up
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            matrix = matrix @ matrix
        if on_gpu:
            torch.cuda.synchronize(device)
        device_times.append(time.perf_counter() - start)
        start = time.perf_counter()
        sum(range(_LOOPS))
        host_times.append(time.perf_counter() - start)
    return socket.gethostname(), name, 1e3 * min(device_times[1:]), 1e3 * min(host_times[1:])


CALIBRATION = (5, 20)
"""Of the measured iterations of a run, the first that counts and how many tell the scale."""
WINDOW = 20
"""Iterations whose median is compared with the scale."""


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

    def add(self, predicted_ms: float, measured_ms: float) -> str | None:
        """Milliseconds of one iteration. A warning if the last WINDOW iterations' median has moved by more than
        LIMIT of the scale since the last warning, or since the first iterations."""
        if not (predicted_ms > 0 and measured_ms > 0):
            return None
        self._seen += 1
        if self._seen < CALIBRATION[0]:
            return None
        self._ratios.append(measured_ms / predicted_ms)
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
        cost = abs(now - 1) * self.scale * predicted_ms
        return (
            f"the last {WINDOW} iterations took {abs(now - 1):.0%} {slower} than predicted ({cost:,.0f} ms each), "
            "compared with the run's first ones"
        )
