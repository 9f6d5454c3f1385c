"""What would a step save whose forwards run ahead only while a group of chunks needs it? Counted over simulated plans.

    python3 -m scripts.bench.simulator.bench_lead

Steps with a group of n micro-batches run n - 1 forwards ahead from beginning to end, so all their micro-batches live
long (pipeline.orders.grouped_orders). Here the lead grows with n - 1 slots that hold no backward, right before the
group's own backwards, and shrinks with n - 1 slots that hold no forward. Each order has the layers planned that fit it.
Printed: time of the growing lead over the constant one, and of the better one of each step; long-tailed seeded lengths.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from wlb_megatron import cli
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blocks import Lengths
from wlb_megatron.documents.synthetic import paper_like
from wlb_megatron.pipeline import graph
from wlb_megatron.pipeline.orders import Step, grouped_orders
from wlb_megatron.recompute import step_layers
from wlb_megatron.recompute.step_layers import recomputed_array
from wlb_megatron.simulator.iteration import simulate
from wlb_megatron.simulator.job_flags import read_job

LAYER = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --swiglu"
JOBS = {
    # window, flags
    "16 layers of 4096, PP2, 4 windows of 64K, 139 GiB": (65536, f"{LAYER} --num-layers 16 --gpu-memory 139"),
    "the same, 74.5 GiB (80 GB)": (65536, f"{LAYER} --num-layers 16 --gpu-memory 74.5"),
    "8B, TP2 CP2 PP2, 8 windows of 64K, 80 GiB": (
        65536,
        f"{LAYER} --num-layers 32 --vocab-size 128256 --gpu-memory 80 --tp 2 --cp 2 --micro-batches 8",
    ),
    "70B, TP8 CP2 PP4, 4 windows of 128K, 80 GiB": (
        131072,
        "--model 70B --tp 8 --cp 2 --pp 4 --gpu-memory 80",
    ),
    "70B, TP8 CP4 PP4, 4 windows of 128K, 80 GiB": (
        131072,
        "--model 70B --tp 8 --cp 4 --pp 4 --gpu-memory 80",
    ),
}
COMMON = "--micro-batches 4 --pp 2 --recompute-granularity full --chunks on --search none --iterations 48"


def growing_orders(stages: int, sizes: Sequence[int], chunks: int = 1) -> list[list[Step]]:
    """Two stages, sizes 1, 3: slots F0 B0 | F1 | F2 | F3 B3 | B2 | B1 on the last, F0 F1 B0 F2 F3 B3 B2 B1 on the
    first."""
    forwards: list[int | None] = []
    backwards: list[int | None] = []
    for size in sizes:
        members = range(len(forwards) - forwards.count(None), len(forwards) - forwards.count(None) + size)
        forwards += [*members, *[None] * (size - 1)]
        backwards += [*[None] * (size - 1), *reversed(members)]
    orders = []
    for ahead in reversed(range(stages)):
        rest = [*forwards[ahead:], *[None] * ahead]
        pairs = zip(rest, backwards, strict=True)
        slots = [(f, False) for f in forwards[:ahead]]
        slots += [slot for f, b in pairs for slot in ((f, False), (b, True))]
        orders.append([Step(m, 0, backward) for m, backward in slots if m is not None])
    return orders


def count(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> str:
    job = read_job(args, lengths)
    run = job.run(lengths, config)
    plans, shards = run.plans[job.warm_up :], run.shards
    assert shards is not None
    steps, shares = [], []
    for order in (grouped_orders, growing_orders):
        use(order)
        kept = job.kept_layers(plans, run.config)
        assert kept is not None and all(stage.fits for step in kept for rank in step for stage in rank)
        again = [recomputed_array(step) for step in kept]
        shares.append(np.mean([step.mean() for step in again]) / job.model.layers_of(0, 0))
        steps.append(
            simulate(shards, job.model, blocking=False, orders=job.orders(plans), recomputed=again).steps
        )
    use(grouped_orders)
    constant, growing = steps
    ratios = growing.sum() / constant.sum(), np.minimum(*steps).sum() / constant.sum()
    return f"{shares[0]:.1%} | {shares[1]:.1%} | {ratios[0]:.3f} | {ratios[1]:.3f}"


def use(order: Callable[..., list[list[Step]]]) -> None:
    graph.pipeline_graph.cache_clear()
    graph.grouped_orders = step_layers.grouped_orders = order


class Counted(Exception):
    """The row of a job, out of `analyze`."""


def stop(*of_job: object) -> None:
    raise Counted(count(*of_job))  # type: ignore[arg-type]


def main() -> None:
    cli.run_analyze = stop  # type: ignore[assignment]
    print(
        "job (simulated) | recomputed, constant lead | growing | growing over constant | better of each step"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, (window, flags) in JOBS.items():
            path = Path(folder) / f"{window}.npy"
            np.save(path, paper_like(20000, window=window))
            try:
                cli.main(f"analyze --lengths {path} --window {window} {COMMON} {flags}".split())
            except Counted as row:
                print(f"{name} | {row}", flush=True)


if __name__ == "__main__":
    main()
