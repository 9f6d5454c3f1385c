"""The plugin's share of a step among Megatron's timers: --timing-log-level 1 or 2, --log-timers-to-tensorboard.

    wlb-draw          1  the host gets this step's micro-batches, or in it the next one's: waits for plans and tokens
    wlb-plan-wait     1  the part of it that it waits for plans
    wlb-planning      1  an iteration is planned, by a thread or a process beside training
    wlb-predicted     1  the iteration's predicted time (last rank)
    wlb-key-exchange  2  keys, or their gradients, of other context-parallel ranks are waited for (from iteration 2)

Nothing here synchronises: exchanges are marked on the device, and read when the step's work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from wlb_megatron.attention import kv_exchange
from wlb_megatron.plugin.flags.refusal_printing import never_fatal
from wlb_megatron.plugin.job_state import part

LEVELS = {"wlb-draw": 1, "wlb-plan-wait": 1, "wlb-planning": 1, "wlb-predicted": 1, "wlb-key-exchange": 2}
"""--timing-log-level from which each is shown."""


@dataclass(slots=True)
class Waits:
    """marks: around the waits for exchanges since they were last read."""

    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


def add(name: str, seconds: float) -> None:
    """Add to a timer of LEVELS; nothing if the run does not log it. Times of a log interval are averaged."""
    from megatron.training import get_args, get_timers

    if get_args().timing_log_level >= LEVELS[name]:
        with never_fatal(f"the timer {name} is not kept"):
            timer = get_timers()(name, log_level=LEVELS[name])
            timer.set_elapsed(timer.elapsed(reset=False) + seconds)


def continue_lists() -> None:
    """Before training_log: have the plugin's timers follow Megatron's lists of them, on every rank alike."""
    from megatron.training import get_args, get_timers

    level, timers = get_args().timing_log_level, get_timers()
    names = [name for name, minimum in LEVELS.items() if minimum <= level]
    if names and not hasattr(timers.log, "names"):
        timers.log, timers.write = _continued(timers.log, names), _continued(timers.write, names)
    on_wait = _on_gpu if get_args().distributed_backend == "nccl" else _on_host
    kv_exchange.on_wait = on_wait if level >= LEVELS["wlb-key-exchange"] else None
    if kv_exchange.on_wait is not None:
        with never_fatal("the timer wlb-key-exchange is not kept"):
            add("wlb-key-exchange", _read_waits())


def _continued(method: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Timers.log or .write: a list with training's first timer gets ours as well."""

    def run(timers: list[str], *args: Any, **kwargs: Any) -> Any:
        return method([*timers, *names] if "forward-backward" in timers else timers, *args, **kwargs)

    run.names = names  # type: ignore[attr-defined]
    return run


def _on_host(wait: Callable[[], Any]) -> None:
    start = time.perf_counter()
    wait()
    add("wlb-key-exchange", time.perf_counter() - start)


def _on_gpu(wait: Callable[[], Any]) -> None:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    wait()
    after.record()
    part(Waits).marks.append((before, after))


def _read_waits() -> float:
    """Seconds. The step's last work is waited for, which Megatron has done for the gradients' norm."""
    marks = part(Waits).marks
    if marks:
        marks[-1][1].synchronize()
    milliseconds = sum(before.elapsed_time(after) for before, after in marks)
    marks.clear()
    return milliseconds / 1e3
