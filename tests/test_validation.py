"""The simulator against the steps that two H200s took: predictions made anew from the stored plans."""

import csv
from pathlib import Path

import numpy as np

from wlb_megatron.workload.profile import read_profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "2x_h200"


def test_no_measured_run_is_predicted_more_than_a_twelfth_off():
    from scripts.bench.simulator.validate_compare import predicted

    with (RESULTS / "validation_iterations.csv").open(encoding="utf-8") as lines:
        measured = list(csv.DictReader(lines))
    profile = read_profile(RESULTS / "profile_2048.json")
    rows = [row for row in predicted(RESULTS, profile) if not row["hitch"]]
    assert len(rows) == 161
    errors = []
    for run in dict.fromkeys(row["run"] for row in rows):
        measured_ms, predicted_ms = (
            np.mean([row[key] for row in rows if row["run"] == run])
            for key in ("measured_ms", "predicted_ms")
        )
        errors.append(abs(predicted_ms / measured_ms - 1))
    assert len(errors) == 18 and max(errors) < 0.08 and np.mean(errors) < 0.04
    stored = {(row["run"], int(row["iteration"])): float(row["predicted_ms"]) for row in measured}
    for row in rows:  # the stored figures are today's
        assert abs(stored[row["run"], row["iteration"]] - row["predicted_ms"]) < 0.5
