"""`wlb-megatron simulate`: iterations of a user's job, in arrival order and as set, with a trace of one of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blocks import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.job import arrival_order
from wlb_megatron.pipeline.groups import documents_in_chunks
from wlb_megatron.plan import IterationPlan
from wlb_megatron.report.progress import progress
from wlb_megatron.report.table import print_table
from wlb_megatron.report.trace import chrome_trace
from wlb_megatron.settings_flags import renamed
from wlb_megatron.simulator.iteration import Orders, Shards, group_events
from wlb_megatron.simulator.job_flags import add_job, read_job
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.reproduction.schemes import perfectly_balanced
from wlb_megatron.whole_files import write_whole


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings."""
    add_job(parser)
    parser.add_argument(
        "--trace", metavar="PATH", help="write the slowest iteration, as set, as a trace for ui.perfetto.dev"
    )


def run_simulate(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> dict[str, Any]:
    """Simulate as the flags say, with progress on stderr; write the trace if asked for. JSON-able figures."""
    job = read_job(args, lengths)
    if args.trace is not None and config.cp_mode == "dynamic":
        raise WlbError("--trace supports only fixed groups: leave out --trace or --cp-mode dynamic")
    model = job.model
    rows: list[dict[str, Any]] = []
    bound = 0.0
    with progress(2) as tick:
        for name, chosen in (("plain", arrival_order(config)), ("as set", config)):
            tick(f"planning and simulating {name}")
            run = job.run(lengths, chosen)
            simulated, plans = run.timed, run.plans[job.warm_up :]
            bound = perfectly_balanced(plans, model).ns_per_token
            rows.append(
                {
                    "scheme": name,
                    "packing": chosen.packing,
                    "sharding": chosen.sharding,
                    "step_ms": float(simulated.steps.mean() / 1e6),
                    "step_ms_p95": float(np.percentile(simulated.steps, 95) / 1e6),
                    "tokens_per_second": 1e9 / simulated.ns_per_token,
                    "micro_batches": simulated.micro_batch_count,
                    "time_imbalance": simulated.imbalance,
                    "step_over_ideal": simulated.step_over_ideal,
                }
            )
    if args.trace is not None:
        slowest = int(simulated.steps.argmax())
        assert run.shards is not None
        plan = plans[slowest]
        _write_trace(Path(args.trace), plan, [run.shards[slowest]], model, job.orders([plan]))
    problem = job.weights_problem()
    before, after = (row["tokens_per_second"] for row in rows)
    return {
        "simulated": True,
        "gpus": model.layout.gpus,
        "layout": asdict(model.layout),
        "model": asdict(model.shape),
        "quadratic_at": job.cost(config).quadratic_at,
        "kernel_table": model.measured.device,
        "profile": None if job.profile is None else job.profile.describe(),
        "assumptions": asdict(model.assumptions),
        "iterations": job.iterations,
        "said": [*run.messages, *([] if problem is None else [problem])],
        "schemes": rows,
        "speedup": after / before,
        "bound": 1e9 / bound / before,
    }


def print_simulation(report: dict[str, Any]) -> None:
    for line in report["said"]:
        print(renamed(line))
    header = (
        "",
        "packing",
        "sharding",
        "step ms",
        "p95 ms",
        "tokens/s",
        "micro-batches",
        "imbalance of time",
        "step over ideal",
    )
    rows = [
        [
            *(r["scheme"], r["packing"], r["sharding"], f"{r['step_ms']:,.1f}", f"{r['step_ms_p95']:,.1f}"),
            *(f"{r['tokens_per_second']:,.0f}", f"{r['micro_batches']:.1f}", f"{r['time_imbalance']:.3f}"),
            f"{r['step_over_ideal']:.3f}",
        ]
        for r in report["schemes"]
    ]
    print_table(f"{report['gpus']} GPUs, {report['iterations']} iterations, simulated", header, rows)
    print(
        f"speed-up {report['speedup']:.3f}; of a perfectly balanced plan {report['bound']:.3f}. "
        + (
            f"Times of {report['profile']}; what it has not measured is assumed: see --json -"
            if report["profile"]
            else f"Kernel times of {report['kernel_table']}; rates and network are assumed: see --help or --json -"
        )
    )


def _write_trace(path: Path, plan: IterationPlan, shards: Shards, model: LayerModel, orders: Orders) -> None:
    columns = zip(*plan.micro_batches, strict=True)
    documents = [documents_in_chunks([micro_batch.pieces for micro_batch in column]) for column in columns]
    trace = chrome_trace(group_events(shards, model, orders=orders), documents=documents)
    write_whole(path, json.dumps(trace) + "\n", "--trace")
