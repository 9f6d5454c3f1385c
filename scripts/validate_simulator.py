#!/usr/bin/env python3
"""Real Megatron steps on two GPUs against the simulator's prediction of the same plans.

python3 scripts/validate_simulator.py --out out/validate                  profile, train, simulate, compare
python3 scripts/validate_simulator.py --out out/validate --simulate-only  from the logs and profile that lie there

CP=2, PP=2 and DP=2, each plain (arrival order, per-sequence sharding) and balanced, on mixes of document lengths,
of a GPT of --layers x 2048 at a window of 32K. The profile is measured first, or given by --profile. Runs are begun
until --minutes are over; one that fails is told and left out. Writes iterations.csv, runs.csv and scatter.png.
Errors are of whole iterations, Megatron's own "elapsed time per iteration", the first --warm-up ones left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_train
import numpy as np
from gpu_train import PLAIN, WLB, finish, run

from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.select import shard_all
from wlb_megatron.simulator.assumptions import Assumptions
from wlb_megatron.simulator.calibration import calibrated
from wlb_megatron.simulator.iteration import Shards, Simulated, simulate
from wlb_megatron.simulator.lengths import long_tailed
from wlb_megatron.simulator.model import LayerModel, Layout, ModelShape
from wlb_megatron.workload.profile import Profile, read_profile

WINDOW, VOCABULARY = 32768, 384
SHAPE = ModelShape(
    layers=8, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=VOCABULARY, channels=128, gated=True
)
"""gpu_train.MODEL."""
PROFILED = """--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --num-query-groups 4 --kv-channels 128
--vocab-size 384 --swiglu"""
LAYOUTS = {"cp2": Layout(cp=2), "pp2": Layout(pp=2), "dp2": Layout(dp=2)}
FLAGS = {
    "cp2": ["--context-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
}
SCHEMES = {"plain": (PLAIN, "per-sequence"), "wlb": (WLB, "adaptive")}
MIXES = ("long-tailed", "half-long", "short")
ROUNDS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
"""Mix of each layout, by round: the first round has all layouts and all mixes."""


def mix_lengths(mix: str, tokens: int) -> np.ndarray:
    """int64[n]: seeded document lengths of about `tokens` in all."""
    rng = np.random.default_rng(11)
    if mix == "long-tailed":
        lengths = long_tailed(WINDOW, 20_000, 3)
    elif mix == "half-long":
        short = rng.lognormal(np.log(900), 0.9, 20_000)
        lengths = np.where(
            rng.random(20_000) < 0.05, rng.uniform(12_000, WINDOW, 20_000), np.minimum(short, 6000)
        )
    else:
        lengths = np.minimum(rng.lognormal(np.log(700), 0.8, 20_000), 8000)
    lengths = np.maximum(lengths, 2).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--profile", type=Path, help="of this model (default: made first, in --out)")
    parser.add_argument("--grid", default="reduced", help="of the profile that is made (default: reduced)")
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--layouts", default="cp2,pp2,dp2")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=4, help="iterations left out")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--rounds", type=int, default=1, help="mixes of each layout")
    parser.add_argument("--minutes", type=float, default=5.5, help="begin no run that would end after this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    profile = options.profile or options.out / "profile.json"
    if not options.simulate_only:
        train(options, profile)
    if not profile.exists():
        raise SystemExit(
            f"no profile {profile}: make it, then --simulate-only compares the runs that are there"
        )
    compare(options, read_profile(profile))


def train(options: argparse.Namespace, profile: Path) -> None:
    """Profile and run what time allows; logs and plans lie in --out."""
    began = time.perf_counter()
    if not profile.exists():
        make_profile(options, profile)
        print(f"profile: {time.perf_counter() - began:.0f} s", flush=True)
    corpora = {mix: build_corpus(options, mix) for mix in MIXES}
    longest = 60.0
    for name, layout, scheme, mix in jobs(options):
        left = options.minutes * 60 - (time.perf_counter() - began)
        if left < longest:
            print(f"{name}: left out, {left:.0f} s remain of --minutes", flush=True)
            continue
        given = argparse.Namespace(
            out=options.out,
            script=None,
            extra=f"--wlb-log-plans --wlb-trace {options.out / name}.trace.json --wlb-trace-iteration "
            f"{options.iterations - 1}" + (f" --wlb-profile {profile}" if profile.exists() else ""),
            layers=options.layers,
            seq_length=WINDOW,
            global_batch_size=options.global_batch_size,
            iterations=options.iterations,
            limit=left + 20,
        )
        start = time.perf_counter()
        rows = run(name, 2, SCHEMES[scheme][0] + FLAGS[layout], corpora[mix], given)
        longest = max(longest, time.perf_counter() - start) if rows else longest
        print(f"{name}: {len(rows)} iterations, {time.perf_counter() - start:.0f} s", flush=True)


def jobs(options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """Name, layout, scheme and mix of each run, in order. Names end as gpu_train's that need no checkout."""
    chosen = options.layouts.split(",")
    return [
        (f"{layout}-{scheme}-{MIXES[mixes[list(LAYOUTS).index(layout)]]}-module", layout, scheme, mix)
        for mixes in ROUNDS[: options.rounds]
        for layout in chosen
        for mix in [MIXES[mixes[list(LAYOUTS).index(layout)]]]
        for scheme in SCHEMES
    ]


def make_profile(options: argparse.Namespace, profile: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(gpu_train.free_port())),
        *("-m", "wlb_megatron.profiler", "--out", str(profile), "--grid", options.grid, "--budget", "70"),
        *PROFILED.split(),
    ]
    log = options.out / "profile.log"
    status = finish(command, dict(os.environ), log, 150)
    print(log.read_text(encoding="utf-8")[-5000:])
    if status:
        print(f"the profile failed with status {status}: see {log}; the runs go on without")


def build_corpus(options: argparse.Namespace, mix: str) -> Path:
    """Python's sources cut to the mix's lengths, of enough documents for the run."""
    prefix = options.out / "corpus" / mix
    prefix.parent.mkdir(exist_ok=True)
    lengths = prefix.with_suffix(".npy")
    if not prefix.with_suffix(".idx").exists():
        np.save(lengths, mix_lengths(mix, 2 * options.iterations * options.global_batch_size * WINDOW))
        build = [sys.executable, str(Path(__file__).with_name("build_corpus.py")), str(prefix)]
        subprocess.run([*build, "--lengths", str(lengths)], check=True)
    return prefix


def compare(options: argparse.Namespace, profile: Profile) -> None:
    """Simulate every run that left a log, print and write what was measured and what was predicted."""
    every = jobs(argparse.Namespace(**{**vars(options), "rounds": len(ROUNDS)}))
    overhead = step_overhead(options, profile, every)
    rows = []
    for name, layout, scheme, mix in every:
        rows += run_rows(options, profile, overhead, name, layout, scheme, mix)
    if not rows:
        raise SystemExit("no run has left iterations: see the logs")
    write(options.out / "iterations.csv", rows)
    runs = [
        summary([row for row in rows if row["run"] == name]) for name in dict.fromkeys(r["run"] for r in rows)
    ]
    write(options.out / "runs.csv", runs)
    print(
        f"\n{profile.told()}; {options.layers} layers of 2048, window {WINDOW}; milliseconds of an iteration"
    )
    print(f"{'run':28}{'iterations':>11}{'measured':>10}{'predicted':>10}{'error':>8}{'mean |error|':>13}")
    for told in runs:
        print(
            f"{told['run'][:-7]:28}{told['iterations']:11}{told['measured_ms']:10.1f}{told['predicted_ms']:10.1f}"
            f"{told['error']:8.1%}{told['mean_error']:13.1%}"
        )
    errors = np.abs([row["error"] for row in rows])
    over_runs = np.abs([told["error"] for told in runs])
    print(
        f"mean |error|: {over_runs.mean():.1%} over runs, {errors.mean():.1%} over iterations "
        f"(median {np.median(errors):.1%}, p95 {np.percentile(errors, 95):.1%})"
    )
    speedups(rows)
    scatter(options.out / "scatter.png", rows, profile)


def step_overhead(
    options: argparse.Namespace, profile: Profile, every: Sequence[tuple[str, str, str, str]]
) -> float:
    """Seconds of an iteration that are neither forward and backward nor what is predicted to follow them.

    The median over the runs' traced iterations: the iteration's time less the span of its forwards and backwards, less
    the predicted gradient reduction and optimizer. Data, logging and first launches are in it, which no profile sees.
    """
    found = []
    for name, layout, _, _ in every:
        log, traced = options.out / f"{name}.log", options.out / f"{name}.trace.json"
        if not log.exists() or not traced.exists():
            continue
        steps = {int(s[1]): float(s[2]) for s in gpu_train.STEP.finditer(log.read_text(encoding="utf-8"))}
        events = [e for e in json.loads(traced.read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]
        if options.iterations - 1 not in steps or not events:
            continue
        span = (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e3
        model = model_of(layout, profile, options.layers, 0.0)
        follows = max(
            sum(model.gradient_sync_ns(stage)) + model.optimizer_ns(stage) for stage in range(model.layout.pp)
        )
        outside = steps[options.iterations - 1] - span
        found.append(outside - follows / 1e6)
        print(f"{name}: {outside:.1f} ms outside forward and backward, {follows / 1e6:.1f} of them predicted")
    overhead = float(np.median(found)) if found else 0.0
    print(f"taken for all runs: {overhead:.1f} ms an iteration beside what is predicted")
    return max(overhead, 0.0) / 1e3


def run_rows(
    options: argparse.Namespace,
    profile: Profile,
    overhead: float,
    name: str,
    layout: str,
    scheme: str,
    mix: str,
) -> list[dict[str, Any]]:
    """An iteration's measured and predicted milliseconds, for each after the warm-up."""
    log, lines = options.out / f"{name}.log", options.out / f"{name}.jsonl"
    if not lines.exists() or not log.exists():
        return []
    measured = {int(s[1]): float(s[2]) for s in gpu_train.STEP.finditer(log.read_text(encoding="utf-8"))}
    told = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    timed = set(measured) - {*range(options.warm_up + 1), options.iterations - 1}  # that one was traced
    told = [one for one in told if one["iteration"] in timed]
    if not told:
        return []
    model = model_of(layout, profile, options.layers, overhead)
    simulated = simulated_plans([one["lengths"] for one in told], model, scheme, profile)
    return [
        {
            "run": name,
            "layout": layout,
            "scheme": scheme,
            "mix": mix,
            "iteration": one["iteration"],
            "tokens": one["tokens"],
            "imbalance": round(one["imbalance"], 4),
            "measured_ms": measured[one["iteration"]],
            "predicted_ms": round(float(ns) / 1e6, 2),
            "predicted_live_ms": one["predicted_ms"],
            "error": round(float(ns) / 1e6 / measured[one["iteration"]] - 1, 4),
        }
        for one, ns in zip(told, simulated.steps, strict=True)
    ]


def model_of(layout: str, profile: Profile, layers: int, overhead: float) -> LayerModel:
    return LayerModel(
        shape=replace(SHAPE, layers=layers),
        layout=LAYOUTS[layout],
        assumptions=calibrated(Assumptions(dp_exposed=1.0, step_overhead=overhead), profile),
        costs=profile.costs,
    )


def simulated_plans(
    iterations: Sequence[list[list[list[int]]]], model: LayerModel, scheme: str, profile: Profile
) -> Simulated:
    """The plans of document lengths [iteration][micro-batch][data-parallel rank] as the simulator runs them."""
    cp = model.layout.cp
    flat = [
        np.array(lengths + [pad] * (pad > 0), dtype=np.int64)
        for plan in iterations
        for row in plan
        for lengths in row
        for pad in [padding(sum(lengths), cp)]
    ]
    made = iter(shard_all(flat, cp, SCHEMES[scheme][1], profile.costs.table))
    shards: Shards = [[[next(made) for _ in row] for row in plan] for plan in iterations]
    return simulate(shards, model)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured, predicted = (np.array([row[key] for row in rows]) for key in ("measured_ms", "predicted_ms"))
    return {
        "run": rows[0]["run"],
        "iterations": len(rows),
        "measured_ms": round(float(measured.mean()), 2),
        "predicted_ms": round(float(predicted.mean()), 2),
        "error": round(float(predicted.mean() / measured.mean() - 1), 4),
        "mean_error": round(float(np.abs(predicted / measured - 1).mean()), 4),
        "tokens": int(np.mean([row["tokens"] for row in rows])),
    }


def speedups(rows: list[dict[str, Any]]) -> None:
    """Balanced over plain by time per token, measured and predicted, of each layout and mix that has both."""
    print(f"\n{'speed-up by tokens/s':28}{'measured':>10}{'predicted':>10}")
    for layout in LAYOUTS:
        for mix in MIXES:
            told = []
            for key in ("measured_ms", "predicted_ms"):
                pace = []
                for scheme in ("plain", "wlb"):
                    chosen = [
                        r for r in rows if (r["layout"], r["mix"], r["scheme"]) == (layout, mix, scheme)
                    ]
                    if chosen:
                        pace.append(sum(r[key] for r in chosen) / sum(r["tokens"] for r in chosen))
                told.append(pace[0] / pace[1] if len(pace) == 2 else None)
            if told[0] is not None and told[1] is not None:
                print(f"{layout + ' ' + mix:28}{told[0]:10.3f}{told[1]:10.3f}")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    scratch = path.with_name(f"{path.name}.tmp")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    scratch.replace(path)


def scatter(path: Path, rows: list[dict[str, Any]], profile: Profile) -> None:
    """Predicted over measured, each iteration a dot."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib here: run with --simulate-only where it is, for scatter.png")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    colours = dict(zip(LAYOUTS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for layout in LAYOUTS:
        for scheme, marker in (("plain", "x"), ("wlb", "o")):
            chosen = [r for r in rows if r["layout"] == layout and r["scheme"] == scheme]
            if chosen:
                axes.scatter(
                    [r["measured_ms"] for r in chosen],
                    [r["predicted_ms"] for r in chosen],
                    marker=marker,
                    s=24,
                    color=colours[layout],
                    label=f"{layout.upper()}, {'arrival order' if scheme == 'plain' else 'balanced'}",
                )
    ends = [f(r[k] for r in rows for k in ("measured_ms", "predicted_ms")) for f in (min, max)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.fill_between(
        ends, [0.95 * e for e in ends], [1.05 * e for e in ends], color="grey", alpha=0.2, label="5 %"
    )
    axes.set_xlabel("measured (ms an iteration)")
    axes.set_ylabel("simulated from the profile (ms)")
    axes.set_title(f"Two {profile.device}, a GPT of 2048, window 32K", fontsize=10)
    axes.legend(fontsize=8)
    scratch = path.with_name(f"{path.stem}.tmp.png")
    figure.savefig(scratch, dpi=120)
    pyplot.close(figure)
    scratch.replace(path)


if __name__ == "__main__":
    main()
