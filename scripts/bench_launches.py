"""How often the main thread gets to launch kernels: alone, beside a thread that plans, and beside a process that does.

    python scripts/bench_launches.py [--documents 63500] [--dp 8] [--seconds 10]

The main thread calls a small torch operation as often as it can, as a training step launches kernels. Beside it
iterations of web-like documents are planned, one after the other, and taken as training takes them. Prints a table:
launches a second, the p99 and the largest time of one, and iterations planned meanwhile.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.job import plan_job
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.synthetic import web_like
from wlb_megatron.plugin.planning import PlanAhead, PlannedIteration, ShardSettings, plan_iterations
from wlb_megatron.plugin.planning_process import plan_in_a_process
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

WINDOW = 131072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=63500, help="documents of an iteration, about")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks; this process is one of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = np.minimum(web_like(200_000, seed=1), WINDOW)
    windows = max(1, round(args.documents * float(lengths.mean()) / WINDOW / args.dp))
    settings = ShardSettings(0, 2, 2, "hybrid", h100())
    rows: dict[str, Callable[[], Iterator[PlannedIteration]] | None] = {
        "alone": None,
        "beside a thread that plans": lambda: plan_iterations(
            planner_of(lengths, windows, args.dp), settings
        ),
        "beside a process that plans": partial(
            plan_in_a_process, planner_of(lengths, windows, args.dp), settings
        ),
    }
    print(
        f"{windows} windows of {WINDOW} tokens on each of {args.dp} ranks; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    print(f"{'':30}{'launches/s':>12}{'p99 ms':>10}{'most ms':>10}{'iterations':>12}{'documents':>12}")
    for name, plans in rows.items():
        rate, p99, most, documents = measure(plans, args.seconds)
        each = f"{np.mean(documents):.0f}" if documents else ""
        print(f"{name:30}{rate:12,.0f}{p99:10.3f}{most:10.1f}{len(documents):12}{each:>12}", flush=True)


def planner_of(lengths: np.ndarray, windows: int, dp: int) -> Planner:
    stream = DocumentStream.of_lengths(lengths, Rules(window=WINDOW, seed=1, endless=True))
    config = WlbConfig(quadratic_at=24576.0, thresholds="49152,90112", micro_batches_per_window="1")
    return plan_job(stream, config, CostModel(24576.0, 0.0), window=WINDOW, micro_batches=windows, dp=dp)


def measure(
    plans: Callable[[], Iterator[PlannedIteration]] | None, seconds: float
) -> tuple[float, float, float, list[int]]:
    """Launches a second, p99 and largest time of one (ms), documents of the iterations planned meanwhile."""
    taken: list[int] = []
    ahead: PlanAhead | None = None
    if plans is not None:
        make = plans
        ahead = PlanAhead(lambda: takewhile(lambda _: ahead is not None and not ahead.closing, make()), 1)
    iterations = iter(ahead or ())
    if ahead is not None:
        next(iterations)  # the planner has started
    x, stamps = torch.ones(8), []
    began = last = time.perf_counter()
    while last < began + seconds:
        for _ in range(100):
            x.add_(1.0)
            stamps.append(time.perf_counter())
        last = stamps[-1]
        if ahead is not None and ahead.ready:
            taken.append(next(iterations).micro_batches[0].summary.documents)
    times = np.diff(np.array([began, *stamps])) * 1e3
    if ahead is not None:
        ahead.close()
    return len(times) / (last - began), float(np.percentile(times, 99)), float(times.max()), taken


if __name__ == "__main__":
    main()
