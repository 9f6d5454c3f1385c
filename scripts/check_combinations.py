#!/usr/bin/env python3
"""Run every configuration of tests/megatron_combinations.py through Megatron's loop against the single process.

python scripts/check_combinations.py --device cpu [--only NAME ...] [--out DIR]

The model, its first weights and the documents of every iteration are the same; each iteration's loss and the first
iteration's gradients (parts of all ranks joined) are compared. Prints a table, writes combinations.csv after each
run, exits 1 if one differs by more than its bound. On two GPUs: --device gpu.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import megatron_runs as runs  # noqa: E402
from megatron_combinations import CPU, GPU, Combination  # noqa: E402

BOUNDS = {"cpu": (1e-5, 1e-4), "gpu": (1e-2, 4e-2), "fp8": (3e-2, 0.3)}
"""Largest relative differences of losses and of gradients: fp32, bf16, 8-bit matrix products."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of names (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "combinations", help="folder of results")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which a run is given up")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = GPU if options.device == "gpu" else CPU
    chosen = [c for c in table if not options.only or any(part in c.name for part in options.only)]
    if not chosen:
        raise SystemExit(f"no configuration is called {' '.join(options.only)}")
    runs.write_corpus(options.out / "corpus", lengths(options.device))
    with ThreadPoolExecutor(options.jobs) as pool:
        models = {(c.model, c.without): c for c in chosen}
        singles = dict(zip(models, pool.map(lambda c: single(c, options), models.values()), strict=True))
        print(f"{'configuration':36} ranks  result  {'loss':>9} {'gradient':>9}  seconds", flush=True)
        rows: list[dict[str, Any]] = []
        for row in pool.map(lambda c: check(c, singles[c.model, c.without], options), chosen):
            rows.append(row)
            print(told(row), flush=True)
            write(options.out / "combinations.csv", rows)
    failed = [row["configuration"] for row in rows if row["result"] != "equal"]
    print(f"{len(rows) - len(failed)} of {len(rows)} equal the single process")
    raise SystemExit(1 if failed else 0)


def lengths(device: str) -> list[int]:
    """The small test corpus; on GPUs sixteen times as long, as the window is."""
    return runs.LENGTHS if device == "cpu" else [16 * length - length % 7 for length in runs.LENGTHS]


def arguments(combination: Combination, options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    parts = (
        (runs.GPU_MODEL, runs.GPU_MACHINE, runs.GPU_TRAINING)
        if options.device == "gpu"
        else (runs.MODEL, runs.MACHINE, runs.TRAINING)
    )
    base = [flag for part in parts for flag in part.split() if flag not in combination.without.split()]
    return [
        *base,
        *("--data-path", str(options.out / "corpus"), "--global-batch-size", "4"),
        *("--train-iters", str(options.iterations)),
        *combination.model.split(),
        *flags,
    ]


def single(combination: Combination, options: argparse.Namespace) -> list[dict[str, Any]] | str:
    """What the single process saw, or why it failed."""
    return attempt(f"single {combination.model} {combination.without}", combination, options, 1, ())


def attempt(
    name: str, combination: Combination, options: argparse.Namespace, processes: int, flags: Sequence[str]
) -> list[dict[str, Any]] | str:
    folder = options.out / "".join(letter if letter.isalnum() else "_" for letter in name)[:100]
    try:
        return runs.train(
            arguments(combination, options, flags),
            processes,
            folder,
            timeout=options.timeout,
            gpu=options.device == "gpu",
        )
    except (AssertionError, TimeoutExpired) as failed:
        (folder / "failure.txt").write_text(str(failed), encoding="utf-8")
        return str(failed)


def check(
    combination: Combination, expected: list[dict[str, Any]] | str, options: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    row: dict[str, Any] = {"configuration": combination.name, "ranks": combination.processes}
    row |= dict.fromkeys(("result", "loss_difference", "gradient_difference", "parameter", "why"), "")
    if isinstance(expected, str):
        row |= {"result": "FAILED", "why": last_line(expected)}
    else:
        found = attempt(
            combination.name, combination, options, combination.processes, combination.flags.split()
        )
        if isinstance(found, str):
            row |= {"result": "FAILED", "why": last_line(found)}
        else:
            loss, gradient, parameter = runs.differences(expected, found, options.iterations)
            limits = BOUNDS[combination.bounds or options.device]
            equal = loss <= limits[0] and gradient <= limits[1]
            row |= {"result": "equal" if equal else "DIFFERS", "parameter": parameter}
            row |= {"loss_difference": f"{loss:.2e}", "gradient_difference": f"{gradient:.2e}"}
    flags = {"flags": combination.flags, "model": combination.model, "without": combination.without}
    return {**row, "seconds": f"{time.perf_counter() - start:.0f}", **flags}


def last_line(text: str) -> str:
    """Of a failed run's output, the line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line or "refuses" in line]
    return (told or lines or ["no output"])[-1]


def told(row: dict[str, Any]) -> str:
    figures = f"{row['loss_difference']:>9} {row['gradient_difference']:>9}  {row['seconds']:>7}"
    return f"{row['configuration']:36} {row['ranks']:5}  {row['result']:7} {figures}  {row['why']}"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
