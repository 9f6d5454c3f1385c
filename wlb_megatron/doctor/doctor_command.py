"""`wlb-megatron doctor`: runs the checks, prints what they find, and says what to fix.

Each check is a function that yields findings. A check that raises becomes a finding itself, so the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict

from wlb_megatron.doctor.checks import (
    FIX,
    Finding,
    apex,
    flash_attention,
    gpu_count,
    megatron,
    python,
    self_test,
    torch_and_gpus,
    transformer_engine,
    untried_step,
)
from wlb_megatron.errors import PREFIX, WlbError


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Flags of `wlb-megatron doctor`."""
    parser.description = (
        "Prints versions, which attention runs, and what to fix. Then runs a small plan's attention on the CPU, and "
        "on the GPU if there is one. Exit code 0 if nothing needs fixing, else 2."
    )
    parser.add_argument(
        "--checkout", metavar="PATH", help="check this Megatron-LM checkout instead of pip's megatron-core"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for an issue")
    parser.add_argument(
        "--no-self-test", action="store_true", help="print versions only (10 to 20 seconds less)"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> None:
    """Print the findings. WlbError with what to fix, if there is anything."""
    if args.checkout is not None:
        if not os.path.isdir(os.path.join(args.checkout, "megatron")):
            raise WlbError(f"--checkout {args.checkout} has no folder megatron; give a Megatron-LM checkout")
        sys.path.insert(0, os.path.abspath(args.checkout))
    checks: list[Callable[[], Iterator[Finding]]] = [
        python,
        torch_and_gpus,
        transformer_engine,
        flash_attention,
        apex,
        megatron,
    ]
    if not args.no_self_test:
        checks += [untried_step, self_test]
    results = []
    for check in checks:
        for finding in examine(check):
            results.append(finding)
            if args.json:
                continue
            cure = f"\n      {finding.cure}" if finding.cure else ""
            print(f"{finding.verdict:4}  {finding.what}: {finding.found}{cure}", flush=True)
    if args.json:
        print(json.dumps([asdict(finding) for finding in results], indent=1))
    failed = [finding.what for finding in results if finding.verdict == FIX]
    if failed:
        raise WlbError(f"training cannot start here yet; to fix: {', '.join(failed)}")
    if args.json:
        return
    if gpu_count():
        print("training can start here")
    else:
        print("nothing to fix: training can start where there are GPUs")


def examine(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields a check's findings; a failure becomes a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from check()
    except (Exception, SystemExit) as error:
        yield Finding(check.__name__.replace("_", " "), _line(error), FIX)


def _line(error: BaseException) -> str:
    return " ".join(str(error).replace(PREFIX, "").split()) or type(error).__name__
