"""Dynamic groups (--wlb-cp-mode dynamic): how good and how fast plans are, and what they gain. Times are simulated.

python -m scripts.bench.dynamic.bench_dynamic --sections buckets,plans,gains \\
    [--wikipedia LENGTHS.npy] [--out out/dynamic] [--megatron ../Megatron-LM]

buckets: tokens that the solver's 16 buckets count too many. plans: seconds to plan on this machine, and predicted
time over a bound that no plan goes below. gains: a layer's time of an iteration on 64 GPUs, over --iterations global
batches of about 786K tokens, every scheme within the same memory: a model of 7B with 8 KV heads on H100s, eight to a
node, by the simulator's assumptions. What all schemes share (gradients, optimizer) is left out. --wikipedia: int
array of document lengths, else seeded web-like ones stand in. --megatron: a checkout of Megatron-LM's branch dev, whose
schedulers plan the same documents in gains.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.dynamic.dynamic_baselines import (
    WITHOUT_HYBRID,
    hybrid_ns,
    planned_ns,
    priced,
    static_plan,
)
from scripts.bench.dynamic.dynamic_buckets import bucket_errors
from scripts.bench.dynamic.megatron_schedules import balanced_plan, dynamic_plan, use_checkout
from scripts.environment import ROOT
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.synthetic import code_like, cut_overlong, web_like
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost, group_cost
from wlb_megatron.dynamic.plan import fixed_groups, validate
from wlb_megatron.dynamic.plan_step import FIXED, SOLVER, plan_step
from wlb_megatron.packing.factory import MAX_DELAY, make_packer
from wlb_megatron.plan import IterationPlan
from wlb_megatron.report.files import write_csv
from wlb_megatron.simulator.model import LayerModel, ParallelSizes
from wlb_megatron.simulator.reproduction.paper import SHAPES
from wlb_megatron.simulator.reproduction.schemes import run_packer
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN

K = 1024
WINDOWS = (192 * K, 384 * K)
RANK_TOKENS = 9216
"""Tokens that fit a GPU, in every scheme: 1.5 windows of 192K over 32 GPUs, of 384K over 64."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default="buckets,plans,gains", help="comma list of these three")
    parser.add_argument("--wikipedia", type=Path, help=".npy of document lengths (tokens)")
    parser.add_argument(
        "--megatron", type=Path, help="checkout of branch dev (gains; default: none compared)"
    )
    parser.add_argument("--iterations", type=int, default=20, help="global batches of each case of gains")
    parser.add_argument("--seconds", type=float, default=1.0, help="the solver's time for one plan")
    parser.add_argument("--seeds", type=int, default=5, help="draws of each case of plans")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "dynamic", help="folder of the CSVs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lengths_by_corpus = corpora(options.wikipedia)
    sections: dict[str, Callable[..., list[dict[str, Any]]]] = {
        "buckets": buckets,
        "plans": plans,
        "gains": gains,
    }
    for name in options.sections.split(","):
        rows = sections[name](lengths_by_corpus, options)
        write_csv(options.out / f"{name}.csv", rows)


def corpora(wikipedia: Path | None) -> dict[str, Any]:
    """Lengths of documents by name."""
    return {
        "wikipedia": web_like(100_000, seed=7) if wikipedia is None else np.load(wikipedia),
        "code-like": code_like(100_000),
        "web-like": web_like(100_000),
    }


def fixed_size(window: int) -> int:
    """The context-parallel size at which a group holds one and a half windows."""
    return window * 3 // 2 // RANK_TOKENS


def stage_of(window: int) -> Stage:
    """64 GPUs, in fixed groups of that size."""
    context = fixed_size(window)
    return Stage.of(context, 64 // context, RANK_TOKENS * context)


def batches(
    lengths: Any, window: int, iterations: int, delay: int = 0
) -> Iterator[tuple[IterationPlan, list[int]]]:
    """Global batches and the tokens of their documents: in arrival order without delay, else as WLB-LLM's packing
    orders them."""
    context = fixed_size(window)
    data = 64 // context
    per_rank = 4 * 192 * K // window // data
    packer = make_packer(
        WlbConfig(packing="varlen", max_delay=delay, thresholds="none" if not delay else "auto"),
        LayerModel(shape=SHAPES["7B"], layout=ParallelSizes()).cost(),
        window=window,
        micro_batches=per_rank,
        dp=data,
        alignment=context,
        sample=lengths[:65536].tolist(),
    )
    rules, batch = Rules(window, "split", 1, endless=True), per_rank * data * window
    for plan in run_packer(packer, lengths, rules, batch, iterations=iterations, warm_up=16):
        yield (
            plan,
            [p.tokens for row in plan.micro_batches for micro_batch in row for p in micro_batch.pieces],
        )


def costs(stage: Stage) -> GroupCost:
    """Of the model's layer on H100s."""
    model = LayerModel(shape=SHAPES["7B"], layout=ParallelSizes())
    line = model.linear(np.array([0.0, 65536.0]))
    return group_cost(model.table, float((line.forward + line.backward) @ [-1, 1]) / 65536, stage.sizes)


def buckets(corpora: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The error of 16 buckets over the corpora, cut to each window."""
    cut = {f"{n}, {w // K}K": cut_overlong(lengths, w) for w in WINDOWS for n, lengths in corpora.items()}
    return bucket_errors(cut)


def plans(corpora: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and quality by size of the job, over --seeds draws of each."""
    rows = []
    print(
        "GPUs  documents corpus      micro-steps  s, greedy (median, most)  s, solver  over bound (mean, most)  whose"
    )
    for ranks, documents in ((64, 512), (128, 1024), (256, 4096), (1024, 16384)):
        stage = Stage.of(32, ranks // 32, RANK_TOKENS * 32)
        cost = costs(stage)
        for name, lengths in corpora.items():
            results = [
                plan_once(cut_overlong(lengths, 192 * K), documents, seed, stage, cost, options.seconds)
                for seed in range(options.seeds)
            ]
            greedy, solver, over, steps, sources = zip(*results, strict=True)
            row = {
                "gpus": ranks,
                "documents": documents,
                "corpus": name,
                "draws": options.seeds,
                "micro_steps": f"{min(steps)} to {max(steps)}",
                "greedy_seconds_median": round(float(np.median(greedy)), 3),
                "greedy_seconds_most": round(max(greedy), 3),
                "solver_seconds_median": round(float(np.median(solver)), 3),
                "solver_seconds_most": round(max(solver), 3),
                "over_bound_mean": round(float(np.mean(over)), 4),
                "over_bound_most": round(max(over), 4),
                "solver_won": sources.count(SOLVER),
            }
            rows.append(row)
            print(
                f"{ranks:4} {documents:10} {name:10} {row['micro_steps']:>12} {np.median(greedy):15.2f}"
                f" {max(greedy):8.2f} {np.median(solver):7.2f} {max(solver):6.2f}"
                f" {np.mean(over):12.3f} {max(over):7.3f}   solver {sources.count(SOLVER)} of {len(sources)}",
                flush=True,
            )
    return rows


def plan_once(
    lengths: Any, documents: int, seed: int, stage: Stage, cost: GroupCost, seconds: float
) -> tuple[float, float, float, int, str]:
    """Seconds without and with the solver, time over the bound, micro-steps and whose plan, of one draw."""
    drawn = np.random.default_rng((stage.ranks, seed)).choice(lengths, documents).tolist()
    began = time.perf_counter()
    plan_step(drawn, stage, cost)
    middle = time.perf_counter()
    best = plan_step(drawn, stage, cost, seconds=seconds)
    ended = time.perf_counter()
    validate(best.plan, drawn, stage)
    return middle - began, ended - middle, best.priced / best.bound, len(best.plan.micro_steps), best.source


def gains(corpora: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time of an iteration's layer by scheme, per unit of work, over the best static degree's."""
    if options.megatron is not None:
        use_checkout(options.megatron)
    rows = []
    for window in WINDOWS:
        for name, lengths in corpora.items():
            cut = cut_overlong(lengths, window)
            rows += case(name, cut, window, options.iterations, megatron=options.megatron is not None)
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    print("\nspeed-up over the best static degree (simulated, 64 GPUs), mean and range over the cases")
    for scheme in schemes:
        speedups = [row["speedup"] for row in rows if row["scheme"] == scheme]
        print(
            f"{scheme:36} {np.exp(np.mean(np.log(speedups))):6.3f}   {min(speedups):.3f} to {max(speedups):.3f}"
        )
    return rows


def case(name: str, lengths: Any, window: int, iterations: int, *, megatron: bool) -> list[dict[str, Any]]:
    """One corpus and window: nanoseconds per unit of work of every scheme. Work is d + d * d / X tokens of a document
    of d: where documents are delayed, an iteration trains others, and tokens of long ones cost more."""
    stage = stage_of(window)
    context = fixed_size(window)
    cost, model_cost = costs(stage), LayerModel(shape=SHAPES["7B"], layout=ParallelSizes()).cost()
    kept, tokens, seconds = 0, [], []  # type: ignore[var-annotated]
    spent: dict[str, float] = {}
    trained: dict[str, int] = {}
    done: dict[str, float] = {}

    def add(scheme: str, ns: float) -> None:
        spent[scheme] = spent.get(scheme, 0.0) + ns
        trained[scheme] = trained.get(scheme, 0) + sum(tokens)
        done[scheme] = done.get(scheme, 0.0) + float(model_cost.work(tokens).sum()) / UNITS_PER_TOKEN

    for delay in (0, MAX_DELAY):
        for plan, tokens in batches(lengths, window, iterations, delay):
            fixed = fixed_groups(plan, context)
            if delay:
                add("WLB-LLM", planned_ns(fixed, tokens, cost, WITHOUT_HYBRID))
                add("fixed groups, hybrid sharding", planned_ns(fixed, tokens, cost, ("adaptive",)))
                made = plan_step(tokens, stage, cost, fixed=fixed)
                add("dynamic, documents delayed", made.predicted)
                kept += made.source == FIXED
                continue
            degrees = []
            for level, size in enumerate(stage.sizes):
                static = static_plan(tokens, stage, cost, level)
                if static is None:
                    continue
                ns = planned_ns(static, tokens, cost, WITHOUT_HYBRID)
                degrees.append(ns)
                if stage.tokens[level] >= window:
                    add(f"static {size}", ns)
            add("best degree per batch", min(degrees))
            if megatron:
                began = time.perf_counter()
                theirs = dynamic_plan(tokens, stage, RANK_TOKENS)
                seconds.append(time.perf_counter() - began)
                add("Megatron default_dynamic_cp", priced(theirs, cost))
                add("Megatron dp_balanced", priced(balanced_plan(tokens, stage, context, RANK_TOKENS), cost))
                add("Megatron hybrid, one a forward", hybrid_ns(tokens, stage, cost))
            add("dynamic", plan_step(tokens, stage, cost).predicted)
    rates = {scheme: spent[scheme] / work for scheme, work in done.items()}
    best = min((scheme for scheme in rates if scheme.startswith("static")), key=lambda s: rates[s])
    rates = {"best static degree": rates[best], **{s: r for s, r in rates.items() if "static" not in s}}
    print(
        f"\n{name}, window {window // K}K, CP={context}; best static degree {best.split()[1]}; fixed kept {kept}x"
    )
    if seconds:
        print(
            f"  seconds of default_dynamic_cp's plan: median {np.median(seconds):.2f}, most {max(seconds):.2f}"
        )
    rows = []
    for scheme, rate in rates.items():
        speedup = rates["best static degree"] / rate
        print(f"  {scheme:36} {rate:8.2f} ns a unit of work and layer   {speedup:.3f}", flush=True)
        rows.append(
            {
                "corpus": name,
                "window": window,
                "gpus": 64,
                "iterations": iterations,
                "best_static_degree": best.split()[1],
                "scheme": scheme,
                "tokens": trained[best if scheme == "best static degree" else scheme],
                "simulated_ns_per_work_and_layer": round(rate, 3),
                "speedup": round(speedup, 4),
            }
        )
    return rows


if __name__ == "__main__":
    main()
