"""What validate_simulator.py's runs took beside what the simulator says of their plans: tables, CSV, scatter."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.start import STEP
from scripts.csv_files import write_csv
from wlb_megatron.sharding.cut import shard_all
from wlb_megatron.sharding.slots import padded
from wlb_megatron.simulator.iteration import Shards, Simulated, simulate
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.whole_files import renamed_at_end
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.memory import Layout
from wlb_megatron.workload.model import Model
from wlb_megatron.workload.profile import Profile

WINDOW = 32768
SHAPE = Model(layers=8, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=384, head_dim=128, gated=True)
"""start.MODEL."""
LAYOUTS = {
    "cp2": Layout(context=2, distributed_optimizer=True),
    "pp2": Layout(pipeline=2, distributed_optimizer=True),
    "dp2": Layout(data=2, distributed_optimizer=True),
}
SHARDINGS = {"plain": "per-sequence", "wlb": "adaptive"}
Row = dict[str, Any]
HITCH = 1.4
"""Iterations as much slower than a run's others are no matter of the plan: a kernel graph built in a step, say."""


BETWEEN = 0.011
"""Seconds of an iteration between steps, one figure of these runs themselves (validate_simulator.py printed it)."""

WAITS = 0.007
"""Seconds of a micro-batch without a pipeline in which the device waited for the host. These runs are of a version in
which Megatron checked each micro-batch's loss on the host; now it checks a step's (plugin/step/losses.py). One
figure, fitted to eleven of these runs."""


def compare(
    runs: Path,
    jobs: Sequence[tuple[str, str, str, str]],
    profile: Profile,
    layers: int,
    warm_up: int,
    out: Path,
) -> None:
    """Simulate every run that left lines in `runs`; print, and write to `out`, what was measured and predicted."""
    overhead = step_overhead(runs, jobs, profile, layers)
    models = {layout: model_of(layout, profile, layers, overhead) for layout in LAYOUTS}
    rows_of_runs = [run_rows(runs, *job, models, profile, warm_up) for job in jobs]
    for rows_of_run in rows_of_runs:
        mark_hitches(rows_of_run)
    rows = [row for rows_of_run in rows_of_runs for row in rows_of_run]
    if not rows:
        raise SystemExit("no run has left iterations: see the logs")
    print_comparison(rows, profile, layers, out)


def predicted(results: Path, profile: Profile) -> list[Row]:
    """Stored rows with today's predictions.

    Args:
        results: folder of validation_iterations.csv (measured milliseconds) and of validation_plans.json, {run:
            {iteration: lengths[micro-batch][data-parallel rank]}}.
        profile: of the GPU on which they were measured.
    """
    with (results / "validation_iterations.csv").open(encoding="utf-8") as lines:
        measured = list(csv.DictReader(lines))
    plans = json.loads((results / "validation_plans.json").read_text(encoding="utf-8"))
    models = {layout: model_of(layout, profile, int(SHAPE.layers), BETWEEN) for layout in LAYOUTS}
    rows: list[Row] = []
    for run in dict.fromkeys(row["run"] for row in measured):
        chosen = [row for row in measured if row["run"] == run]
        layout, scheme = chosen[0]["layout"], chosen[0]["scheme"]
        lengths = [plans[run][row["iteration"]] for row in chosen]
        wait = 0.0 if models[layout].layout.pipeline > 1 else WAITS
        waits = [1e9 * wait * len(micro_batches) for micro_batches in lengths]
        simulated = simulated_plans(lengths, models[layout], scheme, profile)
        mine = [
            {
                **row,
                "iteration": int(row["iteration"]),
                "tokens": int(row["tokens"]),
                "measured_ms": float(row["measured_ms"]),
                "predicted_ms": round(float(ns) / 1e6, 2),
                "error": round(float(ns) / 1e6 / float(row["measured_ms"]) - 1, 4),
            }
            for row, ns in zip(chosen, simulated.steps + waits, strict=True)
        ]
        mark_hitches(mine)
        rows += mine
    return rows


def print_comparison(rows: list[Row], profile: Profile, layers: int, out: Path) -> None:
    """Print what was measured and predicted, of runs and layouts; write it to `out`."""
    write_csv(out / "iterations.csv", rows)
    for row in rows:
        if row["hitch"]:
            print(
                f"left out, a hitch: {row['run']} iteration {row['iteration']}, {row['measured_ms']:.0f} ms"
            )
    rows = [row for row in rows if not row["hitch"]]
    names = dict.fromkeys(row["run"] for row in rows)
    runs = [summary([row for row in rows if row["run"] == name]) for name in names]
    write_csv(out / "runs.csv", runs)
    print(f"\n{profile.describe()}; {layers} layers of 2048, window {WINDOW}; milliseconds of an iteration")
    print(f"{'run':24}{'iterations':>11}{'measured':>10}{'predicted':>10}{'error':>8}{'mean |error|':>13}")
    for run in runs:
        print(
            f"{run['run']:24}{run['iterations']:11}{run['measured_ms']:10.1f}{run['predicted_ms']:10.1f}"
            f"{run['error']:8.1%}{run['mean_error']:13.1%}"
        )
    errors = np.abs([row["error"] for row in rows])
    over_runs = np.abs([run["error"] for run in runs])
    print(
        f"mean |error|: {over_runs.mean():.1%} over runs, {errors.mean():.1%} over iterations "
        f"(median {np.median(errors):.1%}, p95 {np.percentile(errors, 95):.1%})"
    )
    speedups(rows)
    scatter(out / "scatter.png", rows, profile)


def mark_hitches(rows: list[Row]) -> None:
    """An iteration is a hitch where its measured over its predicted time is over HITCH times the run's median."""
    usual = np.median([row["measured_ms"] / row["predicted_ms"] for row in rows]) if rows else 0.0
    for row in rows:
        row["hitch"] = int(row["measured_ms"] / row["predicted_ms"] > HITCH * usual)


def measured_steps(log: Path) -> dict[int, float]:
    """Milliseconds of each iteration (from 1), as Megatron logs them."""
    if not log.exists():
        return {}
    return {int(step[1]): float(step[2]) for step in STEP.finditer(log.read_text(encoding="utf-8"))}


def spans(runs: Path, name: str) -> dict[int, list[list[list[int]]]]:
    """[backward, begin, end] (nanoseconds) of a run's forwards and backwards, {iteration: [rank][call]}."""
    calls: dict[int, list[list[list[int]]]] = {}
    for path in sorted(runs.glob(f"{name}.spans.*")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            calls.setdefault(line["iteration"], []).append(line["calls"])
    return calls


def step_overhead(
    runs: Path, jobs: Sequence[tuple[str, str, str, str]], profile: Profile, layers: int
) -> float:
    """Seconds of an iteration that are neither forward and backward nor what is predicted to follow them.

    One figure for all runs, the median over their iterations: the iteration's time less the span of its forwards and
    backwards, less the predicted gradient reduction and optimizer. The host's work between steps is in it, which no
    profile sees.
    """
    overheads = []
    for name, layout, _, _ in jobs:
        steps = measured_steps(runs / f"{name}.log")
        model = model_of(layout, profile, layers, 0.0)
        follows = max(
            sum(model.gradient_sync_ns(stage)) + model.optimizer_ns(stage)
            for stage in range(model.layout.pipeline)
        )
        outside = [
            steps[iteration]
            - (max(end for r in ranks for *_, end in r) - min(begin for r in ranks for _, begin, _ in r))
            / 1e6
            for iteration, ranks in spans(runs, name).items()
            if iteration in steps
        ]
        if outside:
            overheads += [ms - follows / 1e6 for ms in outside]
            print(
                f"{name}: {np.median(outside):.1f} ms outside forward and backward, {follows / 1e6:.1f} of them "
                "predicted"
            )
    overhead = float(np.median(overheads)) if overheads else 0.0
    print(f"taken for all runs: {overhead:.1f} ms an iteration beside what is predicted")
    return max(overhead, 0.0) / 1e3


def run_rows(
    runs: Path,
    name: str,
    layout: str,
    scheme: str,
    mix: str,
    models: dict[str, LayerModel],
    profile: Profile,
    warm_up: int,
) -> list[Row]:
    """An iteration's measured and predicted milliseconds, for each after the warm-up."""
    lines, measured = runs / f"{name}.jsonl", measured_steps(runs / f"{name}.log")
    if not lines.exists():
        return []
    steps = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if step["iteration"] > warm_up and step["iteration"] in measured]
    if not steps:
        return []
    simulated = simulated_plans([step["lengths"] for step in steps], models[layout], scheme, profile)
    return [
        {
            "run": name,
            "layout": layout,
            "scheme": scheme,
            "mix": mix,
            "iteration": step["iteration"],
            "tokens": step["tokens"],
            "imbalance": round(step["imbalance"], 4),
            "measured_ms": measured[step["iteration"]],
            "predicted_ms": round(float(ns) / 1e6, 2),
            "predicted_live_ms": step["predicted_ms"],
            "error": round(float(ns) / 1e6 / measured[step["iteration"]] - 1, 4),
        }
        for step, ns in zip(steps, simulated.steps, strict=True)
    ]


def model_of(layout: str, profile: Profile, layers: int, overhead: float) -> LayerModel:
    return LayerModel(
        shape=replace(SHAPE, layers=layers),
        layout=LAYOUTS[layout],
        assumptions=Assumptions(dp_exposed=1.0, step_overhead=overhead).with_links(profile.costs),
        costs=profile.costs,
    )


def simulated_plans(
    iterations: Sequence[list[list[list[int]]]], model: LayerModel, scheme: str, profile: Profile
) -> Simulated:
    """The plans of document lengths [iteration][micro-batch][data-parallel rank] as the simulator runs them."""
    cp = model.layout.context
    flat = [padded(lengths, cp) for plan in iterations for row in plan for lengths in row]
    made = iter(shard_all(flat, cp, SHARDINGS[scheme], profile.costs.table))
    shards: Shards = [[[next(made) for _ in row] for row in plan] for plan in iterations]
    return simulate(shards, model)


def summary(rows: list[Row]) -> Row:
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


def speedups(rows: list[Row]) -> None:
    """Balanced over plain by time per token, measured and predicted, of each layout and mix that has both."""
    print(f"\n{'speed-up by tokens/s':28}{'measured':>10}{'predicted':>10}")
    for layout in LAYOUTS:
        for mix in dict.fromkeys(row["mix"] for row in rows):
            ratios = []
            for key in ("measured_ms", "predicted_ms"):
                pace = []
                for scheme in ("plain", "wlb"):
                    chosen = [
                        r for r in rows if (r["layout"], r["mix"], r["scheme"]) == (layout, mix, scheme)
                    ]
                    if chosen:
                        pace.append(sum(r[key] for r in chosen) / sum(r["tokens"] for r in chosen))
                ratios.append(pace[0] / pace[1] if len(pace) == 2 else None)
            if ratios[0] is not None and ratios[1] is not None:
                print(f"{layout + ' ' + mix:28}{ratios[0]:10.3f}{ratios[1]:10.3f}")


def scatter(path: Path, rows: list[Row], profile: Profile) -> None:
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
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120)
    pyplot.close(figure)
