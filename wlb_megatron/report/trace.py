"""A pipeline step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wlb_megatron.pipeline.schedule import Event


def chrome_trace(
    groups: Sequence[Sequence[Event]],
    *,
    to_us: float = 1e-3,
    name: str = "simulated",
    thread: Callable[[int], str] = "stage {}".format,
) -> dict[str, Any]:
    """Trace Event Format, JSON-able. groups: each data-parallel rank's events, a process each; stages are threads.

    to_us: microseconds of a unit of the events' times (from nanoseconds: 0.001). thread: name of a stage's row.
    """
    events: list[dict[str, Any]] = []
    for rank, group in enumerate(groups):
        events.append(_named("process_name", rank, 0, f"data-parallel rank {rank} ({name})"))
        for stage in sorted({event.stage for event in group}):
            events.append(_named("thread_name", rank, stage, thread(stage)))
        events += [
            {
                "name": f"{'B' if event.backward else 'F'}{event.micro_batch}"
                + (f".{event.chunk}" if event.chunk else ""),
                "cat": "backward" if event.backward else "forward",
                "ph": "X",
                "ts": event.start * to_us,
                "dur": (event.end - event.start) * to_us,
                "pid": rank,
                "tid": event.stage,
                "args": {"micro_batch": event.micro_batch, "chunk": event.chunk},
            }
            for event in group
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": name}}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
