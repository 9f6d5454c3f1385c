"""The command that simulates the paper's tables: its flags, progress and files."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.commands import run_script
from scripts.csv_files import as_csv
from scripts.reproduce.compare import Inputs
from scripts.reproduce.page import as_page, draw, sections, speedup_rows
from scripts.reproduce.paper import CONFIGURATIONS, LARGE_JOB, K
from scripts.reproduce.tables import Finished, parts, reproduce
from wlb_megatron import __version__
from wlb_megatron.config import SEED, TOKENS, whole
from wlb_megatron.documents.lengths import read_lengths
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.factory import too_small
from wlb_megatron.packing.packer import read_per_window
from wlb_megatron.report.terminal import print_table, progress
from wlb_megatron.simulator.job_flags import add_assumptions, read_assumptions
from wlb_megatron.whole_files import of_this_process
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.profile import Profile

REPRODUCED = Assumptions(tp_exposed=0.0, host_launch=0.0)
"""With tensor parallelism's communication hidden, the imbalance of 7B-128K's micro-batches is about the paper's. Of its
hosts the paper says nothing: they are taken to be ahead of the devices."""


UNFINISHED = "unfinished.json"
"""Rows of a run that has not ended yet, or was stopped. A rerun with the same arguments goes on with them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as wlb-megatron's commands do."""
    return run_script("reproduce", add_reproduce, argv)


def add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulates the WLB-LLM paper's eight configurations four ways: arrival order, balanced windows, "
        "the paper's method, and this project's. Prints the paper's figures beside them. Writes JSON, CSV, Markdown, "
        "and PNG. A run that was stopped left its rows in DIR/unfinished.json: the same command goes on."
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder to write to (required)")
    add(
        "--lengths",
        help="tokens of each document: a .npy of integers or an .idx (default: seeded, long-tailed)",
    )
    add(
        "--lengths-of",
        type=whole(1, TOKENS),
        default=128 * K,
        help="window for which --lengths were drawn (tokens; default: 131072)",
    )
    add(
        "--no-stretch",
        action="store_true",
        help="use the lengths as they are, split above each window (default: stretch them in proportion to it)",
    )
    add("--iterations", type=whole(1), default=300, help="iterations to simulate for each job (default: 300)")
    add("--seed", type=whole(0, SEED), default=1234, help="seed of the documents' order (default: 1234)")
    add(
        "--micro-batches-per-window",
        default="auto",
        help="micro-batches for each window in this project's plans: auto, or a number from 1 (default: auto)",
    )
    add("--no-large-job", action="store_true", help="leave out the job of 8,192 GPUs, which takes longest")
    add_assumptions(parser, REPRODUCED)
    parser.set_defaults(run=run_reproduce)


def calibrated(assumptions: Assumptions, profile: Profile) -> Assumptions:
    """With the rate of matrix products at which the model's arithmetic gives the profiled layer's time per token, with
    element-wise kernels at their assumed rate. A rate that the user changed stays."""
    model = profile.model
    widths = assumptions.activation_passes * model.hidden + assumptions.ffn_passes * model.ffn
    elements = 3 * 2 * widths / model.tp / assumptions.memory_rate * 1e9
    products = sum(profile.costs.layer.slope()) - elements
    if products <= 0 or assumptions.matmul_rate != Assumptions().matmul_rate:
        return assumptions
    return replace(assumptions, matmul_rate=3 * 2 * model.rank_parameters_passed / products * 1e9)


def run_reproduce(args: argparse.Namespace) -> None:
    if args.out is None:
        raise WlbError("reproduce writes files: give --out DIR")
    _need("matplotlib")
    _refuse_idle(args)
    read_per_window(args.micro_batches_per_window)
    assumptions, table, profile = read_assumptions(args)
    if profile is not None:
        assumptions = calibrated(assumptions, profile)
    inputs = Inputs(
        lengths=None if args.lengths is None else read_lengths(args.lengths),
        lengths_of=args.lengths_of,
        stretch=not args.no_stretch,
        iterations=args.iterations,
        seed=args.seed,
        per_window=args.micro_batches_per_window,
        assumptions=assumptions,
        measured=table,
    )
    large = not args.no_large_job
    _refuse_few(inputs, large)
    out = Path(args.out)
    with whole_folder(out):
        pass  # it can be written
    path = out / UNFINISHED
    finished = Finished(path, inputs)
    if finished.before:
        print(f"goes on with {finished.before} rows of {path}; delete it to begin anew", file=sys.stderr)
    with progress(parts(large), lines=True) as tick, explain_bad_values():
        report = reproduce(inputs, tick, finished, large=large)
    with whole_folder(out) as folder:
        report["profile"] = None if profile is None else profile.describe()
        report["versions"] = {
            "wlb_megatron": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        _write(report, folder)
    path.unlink(missing_ok=True)
    _show(report)
    print(f"written to {args.out}: reproduction.json, .csv, .md and pictures")


def _refuse_few(inputs: Inputs, large: bool) -> None:
    """WlbError for documents that the largest step would take hundreds of times."""
    settings = (*CONFIGURATIONS, *((LARGE_JOB,) if large else ()))
    for setting in settings if inputs.lengths is not None else ():
        step = setting.window * setting.micro_batches * setting.layout.data
        if problem := too_small(inputs.lengths_for(setting.window), step):
            raise WlbError(problem.removesuffix(", or a shorter --window"))


def _refuse_idle(args: argparse.Namespace) -> None:
    """WlbError for --lengths-of where it would have no effect."""
    plain = argparse.ArgumentParser()
    add_reproduce(plain)
    lengths_set = args.lengths_of != plain.get_default("lengths_of")
    if lengths_set and args.lengths is None and not args.no_stretch:
        raise WlbError(
            "--lengths-of changes nothing with seeded lengths, which are made for each window; give --lengths, or "
            "--no-stretch; or leave it out"
        )


def _write(report: dict[str, Any], folder: Path) -> None:
    draw(report, folder)
    texts = {
        "reproduction.json": json.dumps(report, indent=1) + "\n",
        "reproduction.csv": as_csv(speedup_rows(report)),
        "reproduction.md": as_page(report),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _show(report: dict[str, Any]) -> None:
    for title, header, rows, note in sections(report):
        print_table(title, header, rows)
        if note:
            print(note + "\n")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end, file by file where that is there already; nothing is left
    of it after an error."""
    scratch = out.with_name(f".{out.name}.{of_this_process()}.partial")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(scratch.iterdir()):
            path.replace(out / path.name)
    except OSError as error:
        raise WlbError(f"cannot write to {out}: {error.strerror}; give another --out") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _need(module: str) -> None:
    try:
        __import__(module)
    except ImportError:
        raise WlbError(f"pictures need {module}: pip install {module}") from None


if __name__ == "__main__":
    sys.exit(main())
