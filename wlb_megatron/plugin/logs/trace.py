"""A real iteration as a trace for Perfetto: when each rank ran each micro-batch's forward and backward.

Megatron's schedule calls one function for each. During the traced iteration a mark on the device is made before and
after each call; otherwise nothing is done. No order of the schedule is assumed. The plugin's forward step tells which
micro-batch a forward is of, and a backward is of the micro-batch whose output it is given.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from wlb_megatron.pipeline.orders import documents_in_chunks
from wlb_megatron.pipeline.schedule import Event
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.flags.refusal_printing import never_fatal
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.stores import wait_for
from wlb_megatron.report.timeline import chrome_trace
from wlb_megatron.whole_files import write_whole

IntArray = npt.NDArray[np.int64]
Mark = Any
"""A CUDA event, or the host's nanoseconds where the CPU is the device."""

UNKNOWN = -1
"""Stands for the micro-batch of a backward that cannot be matched to one."""

PATIENCE = 60
"""Seconds that the last rank waits for the times of the others."""


class Call(NamedTuple):
    """A forward or backward of one micro-batch through one model chunk: begin and end."""

    backward: bool
    begin: Mark
    end: Mark
    micro_batch: int
    chunk: int


class Recorder:
    """Marks of one iteration on this rank."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._zero: tuple[int, Mark] | None = None
        self._calls: list[Call] = []
        self._passed: Counter[int] = Counter()  # chunks that each micro-batch has passed forward
        self._made: dict[
            int, tuple[int, int]
        ] = {}  # micro-batch and chunk by the id of what its forward returned
        self.micro_batch = 0
        """Of the forward that runs; set by the plugin's forward step."""

    def forward(self, call: Callable[[], Any]) -> Any:
        """The result of a schedule's forward; its time is noted."""
        begin = self._begin()
        result = call()
        micro_batch = self.micro_batch
        chunk = self._passed[micro_batch]
        self._passed[micro_batch] += 1
        # An id stays the output's until its backward: the schedule keeps the output so long.
        self._made[_id(result[0])] = micro_batch, chunk
        self._calls.append(Call(False, begin, self._mark(), micro_batch, chunk))
        return result

    def backward(self, output: Any, call: Callable[[], Any]) -> Any:
        """The result of a schedule's backward from `output`; its time is noted."""
        micro_batch, chunk = self._made.get(_id(output), (UNKNOWN, 0))
        begin = self._begin()
        result = call()
        self._calls.append(Call(True, begin, self._mark(), micro_batch, chunk))
        return result

    def calls(self) -> list[Call]:
        """All calls, in nanoseconds since 1970 by this host's clock."""
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._zero is None:
            return []
        clock, zero = self._zero
        return [
            call._replace(
                begin=clock + self._since(zero, call.begin), end=clock + self._since(zero, call.end)
            )
            for call in self._calls
        ]

    def _begin(self) -> Mark:
        if self._zero is None:
            self._zero = self._now()
        return self._mark()

    def _now(self) -> tuple[int, Mark]:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.time_ns(), self._mark()

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, zero: Mark, mark: Mark) -> int:
        return int(zero.elapsed_time(mark) * 1e6) if self._on_gpu else mark - zero


def _id(output: Any) -> int:
    """Of a stage's output, which schedules hand on as a tensor or as a list of one."""
    return id(output[0] if isinstance(output, list) else output)


@dataclass(slots=True)
class Tracing:
    """next_recorder: that of the next step, if it is traced. recorder: the traced iteration's, while it runs."""

    next_recorder: Recorder | None = None
    recorder: Recorder | None = None


def begin_step() -> None:
    """Called before each training step. (Evaluation may run between two, and is not recorded.)"""
    tracing = part(Tracing)
    if tracing.next_recorder is not None:
        tracing.recorder, tracing.next_recorder = tracing.next_recorder, None


def begin_micro_batch(index: int) -> None:
    """Called by the plugin's forward step: index of the micro-batch of the iteration that it runs."""
    recorder = part(Tracing).recorder
    if recorder is not None:
        recorder.micro_batch = index


def wrap_forward_step(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A schedule's forward of one micro-batch, marked in a traced iteration."""
    recorder = part(Tracing).recorder
    if recorder is None:
        return original(*args, **kwargs)
    return recorder.forward(lambda: original(*args, **kwargs))


def wrap_backward_step(
    original: Original, input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    """A schedule's backward of one micro-batch, marked in a traced iteration."""
    recorder = part(Tracing).recorder
    if recorder is None:
        return original(input_tensor, output_tensor, *args, **kwargs)
    return recorder.backward(output_tensor, lambda: original(input_tensor, output_tensor, *args, **kwargs))


def after_iteration(
    iteration: int, job: TrainingJob, store: Any, pieces: Sequence[Sequence[Piece]] = ()
) -> None:
    """To be called by every rank after each iteration (from 1). The iteration before the traced one makes it due; after
    the traced one it is written.

    store: common to all ranks, over which they send their times to the last one,
    which writes the trace. pieces: this rank's micro-batches, whose documents in chunks the trace tells apart.
    """
    tracing, config = part(Tracing), job.config
    if config.trace is None:
        return
    if iteration + 1 == config.trace_iteration:
        tracing.next_recorder = Recorder(job.device.on_gpu)
    elif tracing.recorder is not None:
        recorder, tracing.recorder = tracing.recorder, None
        with never_fatal("--wlb-trace writes nothing"):
            _send(recorder, store, documents_in_chunks(pieces))
            if dist.get_rank() == dist.get_world_size() - 1:
                _write(job, Path(config.trace), _gather(store))


def _send(recorder: Recorder, store: Any, documents: Sequence[int]) -> None:
    """Leave int64[1 + n + calls, 5] in the store: this rank's data, pipeline, context and tensor rank and n, its
    micro-batches' documents in chunks, then its calls. Nothing but the first row where its times cannot be had: the
    last rank waits for an answer."""
    from megatron.core import parallel_state as state

    place = (
        state.get_data_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_context_parallel_rank(),
        state.get_tensor_model_parallel_rank(),
    )
    rows = np.array([(*place, 0)], dtype=np.int64)
    try:
        in_chunks = [(document, 0, 0, 0, 0) for document in documents]
        rows = np.array([(*place, len(in_chunks)), *in_chunks, *recorder.calls()], dtype=np.int64)
    finally:
        store.set(str(dist.get_rank()), rows.tobytes())


def _gather(store: Any) -> list[IntArray]:
    """What the ranks have sent, in rank order. TimeoutError if one has not within PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    tables = []
    for rank in range(dist.get_world_size()):
        if not wait_for(store, str(rank), lambda: time.monotonic() > deadline):
            raise TimeoutError(f"rank {rank} has not sent its times within {PATIENCE} s")
        tables.append(np.frombuffer(store.get(str(rank)), dtype=np.int64).reshape(-1, 5))
    return tables


def _write(job: TrainingJob, path: Path, ranks: list[IntArray]) -> None:
    cp, tp = job.sizes.context, job.sizes.tensor
    calls = [rows[1 + int(rows[0, 4]) :] for rows in ranks]
    zero = min(int(rows[:, 1].min()) for rows in calls if len(rows))
    groups: dict[int, list[Event]] = {}
    documents: dict[int, list[int]] = {}
    for rows, rank_calls in zip(ranks, calls, strict=True):
        data, stage, context, tensor, count = rows[0].tolist()
        documents[data] = rows[1 : 1 + count, 0].tolist() or documents.get(data, [])
        row = (stage * cp + context) * tp + tensor
        for backward, begin, end, micro_batch, chunk in rank_calls.tolist():
            event = Event(row, micro_batch, bool(backward), begin - zero, end - zero, chunk)
            groups.setdefault(data, []).append(event)

    def named(row: int) -> str:
        return f"stage {row // (cp * tp)}, context rank {row // tp % cp}, tensor rank {row % tp}"

    replicas = sorted(groups)
    trace = chrome_trace([groups[data] for data in replicas], [documents[data] for data in replicas], named)
    write_whole(path, json.dumps(trace) + "\n", "--wlb-trace")
    print(
        f"> wlb_megatron: iteration {job.config.trace_iteration} is traced in {path}: open it in ui.perfetto.dev",
        flush=True,
    )
