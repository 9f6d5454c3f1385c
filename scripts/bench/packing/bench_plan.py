"""Processor time to plan one iteration: packing, its figures, the digest, and sharding of a rank's own micro-batches.

    python -m scripts.bench.packing.bench_plan [--documents 1024] [--micro-batches 32] [--cp 4] [--iterations 50]
    python -m scripts.bench.packing.bench_plan --kind web-like --documents 63500 --dp 8 --pp 4 --per-window auto \\
        --chunks on --cp 2 --packing varlen --sharding hybrid --iterations 10

Prints a table of milliseconds per iteration (p20, p50, p80, largest), and the median in microseconds a document.
Lengths are drawn from a seed: long-tailed ones, so many that an iteration takes in about --documents documents; or
web-like ones, with as many micro-batches as hold so many.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from wlb_megatron.config import PACKINGS, SHARDINGS, WlbConfig
from wlb_megatron.documents.synthetic import web_like
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.summary import Summariser
from wlb_megatron.packing.varlen.thresholds import Repeated
from wlb_megatron.plugin.micro_batches.planning import update_digest
from wlb_megatron.sharding.alignment import multiple
from wlb_megatron.sharding.chunks import links_of
from wlb_megatron.sharding.cut import cut, pad
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

WARM = 3
"""Iterations before those that are timed."""


def long_tailed(count: int, mean: float, longest: int, seed: int) -> np.ndarray:
    """int64[count] lengths: log-normal bulk, 1.5 % ten times as long, cut at `longest`, scaled."""
    rng = np.random.default_rng(seed)
    raw = rng.lognormal(0.0, 1.0, count) * np.where(rng.random(count) < 0.015, 10.0, 1.0)
    for _ in range(8):  # cutting at the longest lowers the mean: scale again
        raw = np.minimum(raw * (mean / raw.mean()), longest)
    return np.maximum(raw, 1).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1024, help="documents an iteration takes in")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument(
        "--kind", choices=("long-tailed", "web-like"), default="long-tailed", help="of lengths"
    )
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--per-window", default="1", help="--wlb-micro-batches-per-window")
    parser.add_argument("--chunks", choices=("off", "on"), default="off", help="--wlb-chunks")
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--window", type=int, default=131072, help="tokens")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--packing", nargs="*", default=[p for p in PACKINGS if p != "fixed-solver"])
    parser.add_argument("--sharding", nargs="*", default=list(SHARDINGS))
    args = parser.parse_args()

    if args.kind == "web-like":
        lengths = np.minimum(web_like(4 * args.documents, seed=1), args.window)
        args.micro_batches = args.dp * round(args.documents * lengths.mean() / args.window / args.dp)
    else:
        mean = args.window * args.micro_batches / args.documents
        lengths = long_tailed(50 * args.documents, mean, args.window, seed=1)
    print(
        f"{args.documents} documents, {args.micro_batches} windows of {args.window} tokens, DP={args.dp}, "
        f"PP={args.pp}, CP={args.cp}; Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    )
    print(
        f"{'packing':14}{'sharding':14}{'step':10}"
        + "".join(f"{q:>9}" for q in ("p20", "p50", "p80", "max"))
        + "  ms   us a document"
    )
    for packing in args.packing:
        for kind in args.sharding:
            steps = measure(args, packing, kind, lengths)
            for step, seconds in (*steps.items(), ("total", np.sum(list(steps.values()), axis=0))):
                ms = np.percentile(np.array(seconds) * 1e3, [20, 50, 80, 100])
                per_document = f"{1e3 * ms[1] / args.documents:14.2f}"
                print(f"{packing:14}{kind:14}{step:10}" + "".join(f"{v:9.2f}" for v in ms) + per_document)


def measure(args: argparse.Namespace, packing: str, kind: str, lengths: np.ndarray) -> dict[str, list[float]]:
    """Seconds of each iteration's packing and sharding, after warm-up."""
    align = multiple(args.cp)
    packer = make_packer(
        WlbConfig(packing=packing, micro_batches_per_window=args.per_window, chunks=args.chunks),
        CostModel(quadratic_at=24 * 1024),
        window=args.window,
        micro_batches=args.micro_batches // args.dp,
        dp=args.dp,
        pp=args.pp,
        alignment=align,
        sample=lengths[:10000].tolist(),
    )
    planner = Planner(Repeated(lengths), packer, global_tokens=args.window * args.micro_batches)
    steps: dict[str, list[float]] = {"packing": [], "summary": [], "digest": [], "sharding": []}
    summariser, digest = Summariser(), hashlib.blake2b(digest_size=8)
    for _ in range(args.iterations + WARM):
        times = [time.process_time()]
        plan = planner.next_iteration()
        assert plan is not None, "the stream is endless"
        times.append(time.process_time())
        summariser.summarise(plan)
        times.append(time.process_time())
        update_digest(digest, plan)
        times.append(time.process_time())
        own = [pad(row[0].pieces, align) for row in plan.micro_batches]
        lengths_of_own = [np.array([p.end - p.start for p in pieces], dtype=np.int64) for pieces in own]
        cut(lengths_of_own, args.cp, kind, h100(), links_of(own))
        times.append(time.process_time())
        for step, seconds in zip(steps, np.diff(times), strict=True):
            steps[step].append(float(seconds))
    return {step: seconds[WARM:] for step, seconds in steps.items()}


if __name__ == "__main__":
    main()
