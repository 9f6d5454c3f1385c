"""Statistics of convergence.py's runs: differences from plain of the same seed, and what full iterations do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Run = dict[str, Any]
Floats = npt.NDArray[np.float64]
NEAR = 32
"""Iterations on each side over which a run's training loss is averaged, to see what one iteration adds."""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of these files; none of a file that is not there. A line that was cut off is left out.

    SystemExit where they were trained on other documents, or a run comes twice.
    """
    runs: dict[tuple[str, int], Run] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                run = json.loads(line)
            except ValueError:
                continue
            if runs and run["corpus"] != next(iter(runs.values()))["corpus"]:
                raise SystemExit(f"{path} holds runs on other documents: report them apart")
            runs[run["arm"], run["seed"]] = run
    return list(runs.values())


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Mean over the first axis and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.inf


def interval(error: float, count: int) -> float:
    """Half the width of the 95 % interval of a mean over `count` values (Student's t, by its expansion in 1/df)."""
    z, df = 1.959964, max(count - 1, 1)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return error * (z + first / df + second / df**2 + third / df**3)


def paired(runs: list[Run], arm: str, other: str = "plain") -> tuple[Floats, Floats]:
    """An arm's loss minus the other's of the same seeds: of all held-out tokens [seeds], by length [seeds, classes]."""
    of = {(run["arm"], run["seed"]): run for run in runs}
    seeds = sorted(seed for name, seed in of if name == arm and (other, seed) in of)
    differences, by_length = (
        np.array([np.subtract(of[arm, seed][key], of[other, seed][key]) for seed in seeds])
        for key in ("held_out_loss", "loss_by_length")
    )
    return differences, by_length


def by_fullness(run: Run) -> list[tuple[float, float, float]]:
    """Iterations of the second half in thirds, those of the fewest tokens first.

    Of each third mean tokens, mean token delay, and training loss minus the run's mean over the iterations near it.
    """
    loss, tokens, delay = (np.array(run[key], float) for key in ("training", "step_tokens", "step_delay"))
    kernel = np.ones(min(2 * NEAR + 1, len(loss)))
    near = np.convolve(loss * tokens, kernel, "same") / np.convolve(tokens, kernel, "same")
    at = np.arange(len(loss) // 2, len(loss))
    thirds = np.array_split(at[np.argsort(tokens[at], kind="stable")], 3)
    return [
        (
            float(tokens[third].mean()),
            float(np.average(delay[third], weights=tokens[third])),
            float(np.average((loss - near)[third], weights=tokens[third])),
        )
        for third in thirds
    ]
