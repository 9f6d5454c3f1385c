"""`wlb-megatron reproduce`: its flags, progress and files."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron import __version__
from wlb_megatron.bounds import SEED, TOKENS, real, whole
from wlb_megatron.documents.lengths import read_lengths
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.foresee import too_small
from wlb_megatron.packing.packer import read_per_window
from wlb_megatron.report.progress import progress
from wlb_megatron.report.table import as_csv, print_table
from wlb_megatron.simulator.calibration import calibrated
from wlb_megatron.simulator.reproduction.paper import CONFIGURATIONS, LARGE_JOB, K
from wlb_megatron.simulator.reproduction.reproduce import Finished, parts, reproduce
from wlb_megatron.simulator.run import Inputs
from wlb_megatron.whole_files import whole_folder
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.kernel_table import KernelTable, builtin, builtin_names
from wlb_megatron.workload.profile import Profile, read_profile

REPRODUCED = Assumptions(tp_exposed=0.0, host_launch=0.0)
"""With tensor parallelism's communication hidden, the imbalance of 7B-128K's micro-batches is about the paper's. Of its
hosts the paper says nothing: they are taken to be ahead of the devices."""


UNFINISHED = "unfinished.json"
"""Rows of a run that has not ended yet, or was stopped. A rerun with the same arguments goes on with them."""


def add_assumptions(parser: argparse.ArgumentParser, defaults: Assumptions) -> None:
    """One flag for each figure, and the kernel table."""
    group = parser.add_argument_group(
        "assumptions",
        "figures of the cluster that are assumed, not measured; with --profile some are measured",
    )
    for assumption in fields(Assumptions):
        kind = whole(1) if assumption.name == "node" else real(0)
        value = getattr(defaults, assumption.name)
        group.add_argument(
            f"--{assumption.name.replace('_', '-')}",
            type=kind,
            default=None if assumption.name == "network_rate" else value,  # --network-gbps may say it
            help=f"{assumption.metadata['help']} (default: {value:g})",
        )
    parser.add_argument(
        "--network-gbps",
        type=real(0),
        help=f"the same as --network-rate in Gbit/s (default: {defaults.network_rate * 8e-9:g})",
    )
    parser.add_argument(
        "--kernel-table",
        metavar="NAME|PATH",
        help=f"attention times: a built-in table ({', '.join(builtin_names())}), or a JSON file of another GPU's "
        "(default: h100)",
    )
    parser.add_argument(
        *("--wlb-profile", "--profile"),
        dest="profile",
        metavar="PATH",
        help="file of wlb-megatron profile; what it measured replaces the kernel table and the assumptions about it "
        "(default: none)",
    )


def read_assumptions(args: argparse.Namespace) -> tuple[Assumptions, KernelTable, Profile | None]:
    """Figures as the flags say, attention of a kernel table, and the profile that they are of, if one is given."""
    with explain_bad_values():
        rates = {field.name: getattr(args, field.name) for field in fields(Assumptions)}
        if args.network_gbps is not None:
            if args.network_rate is not None:
                raise WlbError("--network-gbps and --network-rate say the same: give one")
            if not args.network_gbps:
                raise WlbError("--network-gbps 0 is no rate: give the Gbit/s of a GPU's network card")
            rates["network_rate"] = args.network_gbps * 1e9 / 8
        figures = Assumptions(**{name: rate for name, rate in rates.items() if rate is not None})
        if args.profile is not None:
            if args.kernel_table is not None:
                raise WlbError("--profile brings its own kernel table: drop --kernel-table")
            profile = read_profile(args.profile)
            return calibrated(figures, profile), profile.costs.table, profile
        source = args.kernel_table or "h100"
        if source not in builtin_names() and not Path(source).exists():
            raise WlbError(f"no kernel table {source}: give {', '.join(builtin_names())} or a JSON file")
        return figures, builtin(source) if source in builtin_names() else KernelTable.from_json(source), None


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


def run_reproduce(args: argparse.Namespace) -> None:
    if args.out is None:
        raise WlbError("reproduce writes files: give --out DIR")
    _need("matplotlib")
    _refuse_idle(args)
    read_per_window(args.micro_batches_per_window)
    assumptions, table, profile = read_assumptions(args)
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
    from wlb_megatron.report.reproduction import as_page, draw, speedup_rows

    draw(report, folder)
    texts = {
        "reproduction.json": json.dumps(report, indent=1) + "\n",
        "reproduction.csv": as_csv(speedup_rows(report)),
        "reproduction.md": as_page(report),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _show(report: dict[str, Any]) -> None:
    from wlb_megatron.report.reproduction import sections

    for title, header, rows, note in sections(report):
        print_table(title, header, rows)
        if note:
            print(note + "\n")


def _need(module: str) -> None:
    try:
        __import__(module)
    except ImportError:
        raise WlbError(f"pictures need {module}: pip install {module}") from None
