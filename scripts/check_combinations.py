#!/usr/bin/env python3
"""Run every configuration of tests/megatron_combinations.py through Megatron's loop against the single process.

python scripts/check_combinations.py --device cpu [--only NAME ...] [--repeat N] [--load PROCESSES] [--out DIR]
python scripts/check_combinations.py --device gpu --jobs 6 --budget 220 [--out DIR]        (two GPUs)

The model, its first weights and the documents of every iteration are the same; each iteration's loss and the first
iteration's gradients (parts of all ranks joined) are compared. In fp32 (CPU) with fixed bounds. In bf16 (GPU, or
--bf16) a gradient's error is its distance from that of the single process in fp32, and may be at most 1.5 times the
error of the single process in bf16, by parameters of one kind in all layers. Rows that also run without the plugin
(tensor parallelism) pass, too, where they differ from the single process by at most 1.5 times as much as Megatron's
own does from its own. Prints a table, writes combinations.csv after each row, exits 1 if one is over its bound.
What depends on which of two transfers is first shows beside busy processes (--load), in some of many runs (--repeat).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
import megatron_runs as runs  # noqa: E402
from megatron_combinations import CPU, GPU, Combination  # noqa: E402
from torch.cuda import device_count  # noqa: E402

from scripts.csv_files import write_csv  # noqa: E402

Run = list[dict[str, Any]] | str
"""What each rank saw, or why the run failed."""

BOUNDS = (1e-5, 1e-4)
"""Largest relative differences of losses and of gradients in fp32."""

HALF_ULP = 2.0**-9
"""Of bf16: a relative difference of losses that it may always make; else 1.5 times the single process's error."""

TIMES_NOISE = 1.5
"""Largest error in bf16, in errors of the single process."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="on CPUs, too: in bf16, against fp32")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of names (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "combinations", help="folder of results")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each configuration")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the runs")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run is given up")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which none is begun or goes on"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = GPU if options.device == "gpu" else CPU
    chosen = [c for c in table if not options.only or any(part in c.name for part in options.only)]
    if not chosen:
        raise SystemExit(f"no configuration is called {' '.join(options.only)}")
    runs.write_corpus(options.out / "corpus", lengths(options.device))
    for combination in chosen:
        if combination.needs and find_spec(combination.needs) is None:
            print(f"{combination.name}: not run, for Megatron needs the package {combination.needs} for it")
    chosen = [c for c in chosen if not c.needs or find_spec(c.needs)]
    if options.repeat > 1:
        chosen = [
            replace(c, name=f"{c.name}, run {run}") for c in chosen for run in range(1, options.repeat + 1)
        ]
    rows: list[dict[str, Any]] = []
    with busy(options.load), ThreadPoolExecutor(options.jobs) as pool:
        check = in_bf16 if options.bf16 or options.device == "gpu" else in_fp32
        jobs = Jobs(pool, options)
        checks = [(combination, check(jobs, combination)) for combination in chosen]
        print(f"{'configuration':40} ranks  result  {'loss':>9} {'gradient':>9}  seconds", flush=True)
        for combination, compare in checks:
            rows.append(row_of(combination, compare, jobs))
            print(row_text(rows[-1]), flush=True)
            write_csv(options.out / "combinations.csv", rows)
    failed = [row["configuration"] for row in rows if row["result"] not in ("equal", "as stock")]
    print(f"{len(rows) - len(failed)} of {len(rows)} equal the single process")
    raise SystemExit(1 if failed else 0)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """This many processes that compute without end beside what is run."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def in_fp32(jobs: Jobs, combination: Combination) -> Callable[[], dict[str, Any]]:
    """Begin the runs of a row; the function returned waits for them and compares."""
    single, ranks = jobs.single(combination), jobs.ranks(combination)

    def compare() -> dict[str, Any]:
        numbers = runs.numbers(done(ranks)) if "--wlb-chunks on" in combination.flags else None
        loss, gradient, parameter = runs.differences(
            done(single), done(ranks), jobs.options.iterations, numbers
        )
        equal = loss <= BOUNDS[0] and gradient <= BOUNDS[1]
        return result("equal" if equal else "DIFFERS", loss, gradient, parameter)

    return compare


def in_bf16(jobs: Jobs, combination: Combination) -> Callable[[], dict[str, Any]]:
    """The same against errors from fp32, and against Megatron's own layout where the row has that."""
    exact, single, ranks = jobs.exact(combination), jobs.single(combination), jobs.ranks(combination)
    stock = [jobs.stock(combination, alone) for alone in (True, False)] if combination.stock else []

    def compare() -> dict[str, Any]:
        iterations = jobs.options.iterations
        numbers = runs.numbers(done(ranks)) if "--wlb-chunks on" in combination.flags else None
        loss, gradient, _ = runs.differences(done(single), done(ranks), iterations, numbers)
        # Experts and FP8 err by more than bf16 rounds: tokens go to other experts, scales are taken anew.
        most = max(HALF_ULP, TIMES_NOISE * runs.differences(done(exact), done(single), iterations)[0])
        errors = [runs.errors_by_kind(done(exact), done(run)) for run in (single, ranks)]
        times = {kind: error / errors[0][kind] for kind, error in errors[1].items()}
        worst = max(times, key=lambda kind: times[kind])
        equal = loss <= most and times[worst] <= TIMES_NOISE
        row = result("equal" if equal else "DIFFERS", loss, gradient, worst)
        row |= {"times_noise": f"{times[worst]:.2f}", "noise": f"{errors[0][worst]:.2e}"}
        if stock:
            theirs = max(runs.errors_by_kind(*map(done, stock)).values())
            ours = max(runs.errors_by_kind(done(single), done(ranks)).values())
            row |= {"stock_difference": f"{theirs:.2e}", "plugin_difference": f"{ours:.2e}"}
            if not equal and loss <= most and ours <= TIMES_NOISE * theirs:
                row["result"] = "as stock"
        return row

    return compare


def result(verdict: str, loss: float, gradient: float, parameter: str) -> dict[str, Any]:
    figures = {"loss_difference": f"{loss:.2e}", "gradient_difference": f"{gradient:.2e}"}
    return {"result": verdict, **figures, "parameter": parameter}


class Failed(Exception):
    """A run that a row needs failed; its text says why."""


def done(run: Future[Run]) -> list[dict[str, Any]]:
    outcome = run.result()
    if isinstance(outcome, str):
        raise Failed(last_line(outcome))
    return outcome


class Jobs:
    """Runs by name, each once, as many at a time as the pool has threads."""

    def __init__(self, pool: ThreadPoolExecutor, options: argparse.Namespace) -> None:
        self.options = options
        self._pool = pool
        self._runs: dict[str, Future[Run]] = {}
        self._ends = time.monotonic() + options.budget
        self._device = itertools.count()
        self.seconds: dict[str, float] = {}

    def single(self, c: Combination) -> Future[Run]:
        return self._run(f"single {c.model} {c.without}", c, 1, ())

    def ranks(self, c: Combination) -> Future[Run]:
        kept = {"WORKER_AVAILABLE": c.available} if c.available else {}
        return self._run(c.name, c, c.processes, c.flags.split(), **kept)

    def exact(self, c: Combination) -> Future[Run]:
        """The single process in fp32, without FP8."""
        model = c.model.split("--fp8-format")[0]
        exact = Combination(c.name, 1, "", model, f"{c.without} --bf16")
        return self._run(
            f"exact {model} {c.without}", exact, 1, (), WORKER_EXACT="1", NVIDIA_TF32_OVERRIDE="0"
        )

    def stock(self, c: Combination, alone: bool) -> Future[Run]:
        name = f"stock {'' if alone else c.flags} {c.model} {c.without}"
        return self._run(name, c, 1 if alone else c.processes, () if alone else c.flags.split(), stock=True)

    def _run(
        self,
        name: str,
        c: Combination,
        processes: int,
        flags: Sequence[str],
        stock: bool = False,
        **environment: str,
    ) -> Future[Run]:
        if name not in self._runs:
            argv = arguments(c, self.options, flags, stock)
            self._runs[name] = self._pool.submit(self._attempt, name, argv, processes, stock, environment)
        return self._runs[name]

    def _attempt(
        self, name: str, argv: list[str], processes: int, stock: bool, environment: dict[str, str]
    ) -> Run:
        began = time.monotonic()
        left = min(self.options.timeout, self._ends - began)
        if left <= 0:
            return "not run: the budget is spent"
        gpu = self.options.device == "gpu"
        if gpu and processes == 1:  # by turns on each GPU
            environment = {**environment, "CUDA_VISIBLE_DEVICES": str(next(self._device) % device_count())}
        plain = "".join(letter if letter.isalnum() else "_" for letter in name)[:90]
        folder = self.options.out / f"{plain}_{zlib.crc32(name.encode()):08x}"
        try:
            return runs.train(argv, processes, folder, timeout=left, gpu=gpu, stock=stock, **environment)
        except TimeoutExpired:
            return f"not run to its end: given up after {left:.0f} s"
        except (AssertionError, OSError) as failed:
            (folder / "failure.txt").write_text(str(failed), encoding="utf-8")
            return str(failed)
        finally:
            self.seconds[name] = time.monotonic() - began


def lengths(device: str) -> list[int]:
    """The small test corpus; on GPUs sixteen times as long, as the window is."""
    return runs.LENGTHS if device == "cpu" else [16 * length - length % 7 for length in runs.LENGTHS]


def arguments(
    combination: Combination, options: argparse.Namespace, flags: Sequence[str], stock: bool = False
) -> list[str]:
    gpu = options.device == "gpu"
    parts = (
        (runs.GPU_MODEL, runs.GPU_MACHINE, runs.GPU_TRAINING)
        if gpu
        else (runs.MODEL, runs.MACHINE + " --bf16" * options.bf16, runs.TRAINING)
    )
    base = [flag for part in parts for flag in part.split() if flag not in combination.without.split()]
    argv = [
        *base,
        *("--data-path", str(options.out / "corpus"), "--global-batch-size", "4"),
        *("--train-iters", str(options.iterations)),
        *combination.model.split(),
        *flags,
    ]
    return runs.without_plugin(argv) if stock else argv


def row_of(combination: Combination, compare: Callable[[], dict[str, Any]], jobs: Jobs) -> dict[str, Any]:
    """One row of the table."""
    columns = (
        "result loss_difference gradient_difference times_noise noise stock_difference plugin_difference"
    )
    row: dict[str, Any] = {"configuration": combination.name, "ranks": combination.processes}
    row |= dict.fromkeys((*columns.split(), "parameter", "why"), "")
    try:
        row |= compare()
    except Failed as failed:
        row |= {"result": "FAILED", "why": str(failed)}
    except KeyError as missing:
        row |= {"result": "FAILED", "why": f"no gradient of {missing}"}
    flags = {"flags": combination.flags, "model": combination.model, "without": combination.without}
    return {**row, "seconds": f"{jobs.seconds.get(combination.name, 0):.0f}", **flags}


def last_line(text: str) -> str:
    """Of a failed run's output, the line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if "rror" in line or "refuses" in line]
    return (reasons or lines or ["no output"])[-1]


def row_text(row: dict[str, Any]) -> str:
    figures = f"{row['loss_difference']:>9} {row['gradient_difference']:>9}  {row['seconds']:>7}"
    more = f" {row['times_noise']} x bf16's own error {row['noise']}" if row["times_noise"] else ""
    if row["stock_difference"]:
        more += f"; stock {row['stock_difference']}, with the plugin {row['plugin_difference']}"
    return f"{row['configuration']:40} {row['ranks']:5}  {row['result']:8}{figures}  {row['why']}{more}"


if __name__ == "__main__":
    main()
