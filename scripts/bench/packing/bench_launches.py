"""How often the main thread gets to launch kernels: alone, beside a thread that plans, and beside a process that does.

    python -m scripts.bench.packing.bench_launches [--documents 63500] [--dp 8] [--seconds 4] [--rounds 5]
        --groups --context 8: also beside a thread that plans dynamic groups over dp x context ranks, as rank 0 does

The main thread calls a small torch operation as often as it can, as a training step launches kernels. Beside it
iterations of web-like documents are planned, one after the other, and taken as training takes them. Prints a table of
each row's round with the most launches: launches a second, the p99 and the largest time of one, the shares of the
time in which the main thread waited for the interpreter and for a core (other work on the machine; Linux counts it),
iterations taken meanwhile, the processor's milliseconds of this process's planning thread for each of them, and the
seconds from the start until the first one is there.
"""

from __future__ import annotations

import argparse
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.documents.synthetic import web_like
from wlb_megatron.packing.job import plan_job
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.micro_batches.planning import (
    PlanAhead,
    PlannedIteration,
    ShardSettings,
    plan_iterations,
)
from wlb_megatron.plugin.plans.planning_process import plan_in_a_process
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

WINDOW = 131072
QUADRATIC_AT = 24576.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=63500, help="documents of an iteration, about")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks; this process is one of them")
    parser.add_argument("--context", type=int, default=2, help="context-parallel ranks")
    parser.add_argument("--balance-batches", type=int, help="fixed-greedy over so many global batches")
    parser.add_argument("--groups", action="store_true", help="a row for dynamic groups, too")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    parser.add_argument("--rounds", type=int, default=5, help="over all rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = np.minimum(web_like(200_000, seed=1), WINDOW)
    windows = max(1, round(args.documents * float(lengths.mean()) / WINDOW / args.dp))
    settings = ShardSettings(0, args.context, args.context, "hybrid", h100())
    packing: dict[str, Any] = {}
    if args.balance_batches is not None:
        packing = {"packing": "fixed-greedy", "balance_batches": args.balance_batches}
    planner = partial(planner_of, lengths, windows, args.dp)
    rows: dict[str, Callable[[], Iterator[PlannedIteration]] | None] = {
        "alone": None,
        "beside a thread that plans": lambda: plan_iterations(planner(**packing), settings),
        "beside a process that plans": partial(plan_in_a_process, planner(**packing), settings),
    }
    if args.groups:
        from scripts.bench.packing.group_plans import group_plans  # imports Megatron

        rows["beside a thread, dynamic groups"] = lambda: group_plans(
            planner(cp_mode="dynamic"), settings, args.dp, QUADRATIC_AT
        )
    print(
        f"{windows} windows of {WINDOW} tokens on each of {args.dp} ranks; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    measurements: dict[str, list[Row]] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, plans in rows.items():
            measurements[name].append(measure(plans, args.seconds))
    print(
        f"{'':32}{'launches/s':>12}{'p99 ms':>10}{'most ms':>10}{'interpreter':>13}{'core':>8}{'iterations':>12}"
        f"{'plan ms':>10}{'first s':>10}"
    )
    for name, measured in measurements.items():
        best = max(measured, key=lambda row: row.rate)
        first = f"{best.plan:10.1f}{min(row.first for row in measured):10.2f}" if best.iterations else ""
        print(
            f"{name:32}{best.rate:12,.0f}{best.p99:10.3f}{best.most:10.1f}{best.interpreter:13.1%}{best.core:8.1%}"
            f"{best.iterations:12}{first}"
        )


class Row(NamedTuple):
    """rate: launches a second. p99, most: time of one (ms). interpreter, core: share of the time that the main thread
    waited for it. plan: the planning thread's processor time (ms an iteration). first: seconds until the first
    iteration is there."""

    rate: float
    p99: float
    most: float
    interpreter: float
    core: float
    iterations: int
    plan: float
    first: float


def planner_of(lengths: np.ndarray, windows: int, dp: int, **changed: Any) -> Planner:
    stream = DocumentStream.of_lengths(lengths, Rules(window=WINDOW, seed=1, endless=True))
    config = WlbConfig(
        quadratic_at=QUADRATIC_AT, thresholds="49152,90112", micro_batches_per_window="1", **changed
    )
    return plan_job(stream, config, CostModel(QUADRATIC_AT, 0.0), window=WINDOW, micro_batches=windows, dp=dp)


def measure(plans: Callable[[], Iterator[PlannedIteration]] | None, seconds: float) -> Row:
    """Launch as often as possible for so long, beside what makes plans."""
    taken, ahead, began = 0, None, time.perf_counter()
    if plans is not None:
        make = plans
        ahead = PlanAhead(lambda: takewhile(lambda _: ahead is not None and not ahead.closing, make()), 1)
    iterations = iter(ahead or ())
    next(iterations, None)  # the planner has started
    x, stamps = torch.ones(8), []
    own, planning = threading.get_native_id(), None if ahead is None else ahead._thread.native_id
    ran, queued = scheduled(own)
    planned = 0.0 if planning is None else scheduled(planning)[0]
    start = last = time.perf_counter()
    while last < start + seconds:
        for _ in range(100):
            x.add_(1.0)
            stamps.append(time.perf_counter())
        last = stamps[-1]
        if ahead is not None and ahead.ready:
            next(iterations)
            taken += 1
    ran, queued = (after - before for after, before in zip(scheduled(own), (ran, queued), strict=True))
    planned = 0.0 if planning is None else scheduled(planning)[0] - planned
    if ahead is not None:
        ahead.close()
    wall = last - start
    times = np.diff(np.array([start, *stamps])) * 1e3
    waits = max(0.0, 1 - (ran + queued) / wall), queued / wall
    p99, most = float(np.percentile(times, 99)), float(times.max())
    return Row(len(times) / wall, p99, most, *waits, taken, planned * 1e3 / max(taken, 1), start - began)


def scheduled(thread: int) -> tuple[float, float]:
    """Seconds that a thread of this process has run, and that it has waited for a core."""
    counts = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(counts[0]) / 1e9, int(counts[1]) / 1e9


if __name__ == "__main__":
    main()
