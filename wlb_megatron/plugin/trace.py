"""A real iteration as a trace for Perfetto: when each rank ran each micro-batch's forward and backward.

Megatron's schedule calls one function for each; during the traced iteration a mark on the device is made before and
after each call, otherwise nothing is done. The calls come in the order of the schedule, which tells the micro-batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from wlb_megatron.pipeline.orders import pipeline_orders
from wlb_megatron.pipeline.schedule import Event
from wlb_megatron.report.files import whole_file
from wlb_megatron.report.trace import chrome_trace

IntArray = npt.NDArray[np.int64]
Mark = Any
"""A CUDA event, or the host's nanoseconds where the CPU is the device."""


class Recorder:
    """Marks of one iteration on this rank."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._zero: tuple[int, Mark] | None = None
        self._calls: list[tuple[bool, Mark, Mark]] = []

    def run(self, backward: bool, call: Callable[[], Any]) -> Any:
        """The call's result; its time is noted."""
        if self._zero is None:
            self._zero = self._now()
        begin = self._mark()
        result = call()
        self._calls.append((backward, begin, self._mark()))
        return result

    def spans(self) -> list[tuple[bool, int, int]]:
        """Backward or not, begin and end of each call, in nanoseconds since 1970 by this host's clock."""
        if self._on_gpu:
            torch.cuda.synchronize()
        if self._zero is None:
            return []
        clock, zero = self._zero
        return [
            (back, clock + self._since(zero, a), clock + self._since(zero, b)) for back, a, b in self._calls
        ]

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


_recorder: Recorder | None = None


def wrap_forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's forward of one micro-batch, marked in a traced iteration."""
    return _marked(original, False)


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's backward of one micro-batch, marked in a traced iteration."""
    return _marked(original, True)


def _marked(original: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        if _recorder is None:
            return original(*args, **kwargs)
        return _recorder.run(backward, lambda: original(*args, **kwargs))

    return step


def after_iteration(iteration: int, args: Any, micro_batches: int, store: Any) -> None:
    """To be called by every rank after each iteration (from 1): begins before the traced one, writes after it.

    store: common to all ranks, over which they send their times to the last one, which writes --wlb-trace.
    """
    global _recorder
    if args.wlb_trace is None:
        return
    if iteration + 1 == args.wlb_trace_iteration:
        _recorder = Recorder(args.distributed_backend == "nccl")
    elif _recorder is not None:
        spans, _recorder = _recorder.spans(), None
        ranks = _gather(spans, store)
        if ranks is not None:
            chunks = args.virtual_pipeline_model_parallel_size or 1
            _write(Path(args.wlb_trace), ranks, args, micro_batches, chunks)


def _gather(spans: list[tuple[bool, int, int]], store: Any) -> list[IntArray] | None:
    """On the last rank, int64[1 + calls, 4] of each rank: its data, pipeline, context and tensor rank, then its
    calls. None on the others, which do not wait."""
    from megatron.core import parallel_state as state

    place = (
        state.get_data_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_context_parallel_rank(),
        state.get_tensor_model_parallel_rank(),
    )
    rows = np.array([place, *((int(back), a, b, 0) for back, a, b in spans)], dtype=np.int64)
    store.set(str(dist.get_rank()), rows.tobytes())
    if dist.get_rank() != dist.get_world_size() - 1:
        return None
    told = [store.get(str(rank)) for rank in range(dist.get_world_size())]
    return [np.frombuffer(one, dtype=np.int64).reshape(-1, 4) for one in told]


def _write(path: Path, ranks: list[IntArray], args: Any, micro_batches: int, chunks: int) -> None:
    orders = pipeline_orders(args.pipeline_model_parallel_size, micro_batches, chunks)
    cp, tp = args.context_parallel_size, args.tensor_model_parallel_size
    zero = min(int(rows[1:, 1].min()) for rows in ranks)
    groups: dict[int, list[Event]] = {}
    for rows in ranks:
        data, stage, context, tensor = rows[0].tolist()
        for step, (backward, begin, end, _) in zip(orders[stage], rows[1:].tolist(), strict=True):
            if step.backward != bool(backward):
                raise RuntimeError(f"stage {stage} did not run the schedule that --wlb-trace knows")
            row = (stage * cp + context) * tp + tensor
            groups.setdefault(data, []).append(
                Event(row, step.micro_batch, step.backward, begin - zero, end - zero, step.chunk)
            )

    def named(row: int) -> str:
        return f"stage {row // (cp * tp)}, context rank {row // tp % cp}, tensor rank {row % tp}"

    told = chrome_trace([groups[data] for data in sorted(groups)], name="measured", thread=named)
    with whole_file(path, "--wlb-trace") as scratch:
        scratch.write_text(json.dumps(told) + "\n", encoding="utf-8")
    print(
        f"> wlb_megatron: iteration {args.wlb_trace_iteration} is traced in {path}: open it in ui.perfetto.dev"
    )
