"""Predicted attention time of each way to cut a micro-batch over context-parallel ranks, and the time to plan it.

    python -m scripts.bench.simulator.bench_sharding [--mixes mixes.json] [--cp 2 4 8] \\
        [--window 131072] [--table table.json]

--mixes: a JSON file {name: [document lengths]}. Besides them, --samples seeded windows of a long-tailed
distribution. Times are forward + backward of one layer on the slowest rank, with exposed exchange; ideal is the
same work in one kernel call, spread evenly with nothing cut. Percentages: how far above the best of the ways.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from wlb_megatron.config import SHARDINGS
from wlb_megatron.sharding.alignment import padded
from wlb_megatron.sharding.cuts.hybrid import mix
from wlb_megatron.sharding.predict import predict
from wlb_megatron.sharding.segments import IntArray, ShardPlan
from wlb_megatron.sharding.select import shard
from wlb_megatron.workload.kernel_table import KernelTable, h100


def long_tailed_window(seed: int, window: int) -> IntArray:
    """Lengths that fill a window: log-normal bulk of about 3K tokens, 2 % from 16K to 3/4 of the window."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = window
    while left:
        long = rng.random() < 0.02
        d = rng.uniform(16384, max(16385, 0.75 * window)) if long else rng.lognormal(7.8, 0.8)
        lengths.append(max(1, min(int(d), left)))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def plan_time(make: Callable[[], ShardPlan], repeats: int) -> tuple[ShardPlan, float]:
    """The plan, and the median of the times to make it (ms)."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = make()
        seconds.append(time.perf_counter() - begin)
    return plan, float(np.median(seconds)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", help="JSON file of further micro-batches")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--window", type=int, default=131072, help="tokens of a sample")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--table", help="measured kernel table (default: the built-in H100's)")
    parser.add_argument("--repeats", type=int, default=9, help="plans timed for the median")
    args = parser.parse_args()

    table = KernelTable.from_json(args.table) if args.table else h100()
    mixes: dict[str, IntArray] = {}
    if args.mixes:
        with open(args.mixes) as file:
            mixes = {name: np.array(lengths, dtype=np.int64) for name, lengths in json.load(file).items()}
    samples = [long_tailed_window(seed, args.window) for seed in range(args.samples)]
    print(f"kernel table: {table.device}, {table.heads} heads, {table.kv_heads} KV heads, d={table.head_dim}")
    for cp in args.cp:
        print(f"\nCP={cp}\n{'documents':16}{'':>5}{'ideal':>8}", end="")
        print(
            "".join(f"{kind:>21}" for kind in (*SHARDINGS, "mix alone"))
            + "   predicted ms, above best, plan ms"
        )
        for name, lengths in mixes.items():
            show(name, [lengths], cp, table, args.repeats)
        if samples:
            show(f"{len(samples)} samples", samples, cp, table, args.repeats)


def show(name: str, batches: list[IntArray], cp: int, table: KernelTable, repeats: int) -> None:
    """One line: sums over the micro-batches; plan time is their median."""
    ideal = 0.0
    ms = np.zeros((len(batches), len(SHARDINGS) + 1))
    plan_ms = np.zeros_like(ms)
    for at, documents in enumerate(batches):
        lengths = padded(documents, cp)
        ideal += (float(table.diagonal_ns(lengths).sum()) / cp + table.call) / 1e6
        makers = [lambda lengths=lengths, kind=kind: shard(lengths, cp, kind, table) for kind in SHARDINGS]
        makers.append(lambda lengths=lengths: mix(lengths, cp, table))
        for way, make in enumerate(makers):
            plan, plan_ms[at, way] = plan_time(make, repeats)
            ms[at, way] = predict(plan, table).max() / 1e6
    best = float(ms.min(axis=1).sum())
    cells = [
        f"{total:9.2f}{100 * (total / best - 1):5.0f} %{planned:5.2f}"
        for total, planned in zip(ms.sum(axis=0), np.median(plan_ms, axis=0), strict=True)
    ]
    count = sum(map(len, batches)) // len(batches)
    print(f"{name:16}{count:5}{ideal:8.2f}" + "".join(cells))


if __name__ == "__main__":
    main()
