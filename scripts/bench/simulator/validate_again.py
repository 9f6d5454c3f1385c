"""The simulator's predictions of steps that were measured before, from their plans: no GPU is needed.

python -m scripts.bench.simulator.validate_again [--results docs/results/2x_h200] [--out DIR]

--results holds what validate_simulator.py left: profile_2048.json, validation_iterations.csv (measured milliseconds)
and validation_plans.json, {run: {iteration: lengths[micro-batch][data-parallel rank]}}. Prints measured and predicted
times of every run; --out gets iterations.csv and runs.csv anew and, where matplotlib is, scatter.png.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from scripts.bench.simulator.validate_compare import (
    LAYOUTS,
    SHAPE,
    Row,
    mark_hitches,
    model_of,
    print_comparison,
    simulated_plans,
)
from scripts.environment import ROOT
from wlb_megatron.workload.profile import Profile, read_profile

BETWEEN = 0.011
"""Seconds of an iteration between steps, one figure of these runs themselves (validate_simulator.py printed it)."""

WAITS = 0.007
"""Seconds of a micro-batch without a pipeline in which the device waited for the host. These runs are of a version in
which Megatron checked each micro-batch's loss on the host; now it checks a step's (plugin/step/losses.py). One
figure, fitted to eleven of these runs."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "2x_h200")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    profile = read_profile(options.results / "profile_2048.json")
    with (options.results / "validation_iterations.csv").open(encoding="utf-8") as lines:
        measured = list(csv.DictReader(lines))
    plans = json.loads((options.results / "validation_plans.json").read_text(encoding="utf-8"))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    print_comparison(predicted(measured, plans, profile), profile, SHAPE.layers, options.out)


def predicted(
    measured: list[dict[str, str]], plans: dict[str, dict[str, Row]], profile: Profile
) -> list[Row]:
    """The measured rows with today's predictions."""
    models = {layout: model_of(layout, profile, SHAPE.layers, BETWEEN) for layout in LAYOUTS}
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


if __name__ == "__main__":
    main()
