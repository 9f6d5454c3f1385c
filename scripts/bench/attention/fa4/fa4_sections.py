"""Sections of gpu_fa4.py for a machine of two GPUs. Each is a process or two of its own, within a budget of seconds.

nvlink: CP=2 over NVLink, ours by both backends beside Transformer Engine's p2p and all-gather (nvlink.csv)
host: host time of one layer by FlashAttention-4's kernels, one call and two (host.csv)
shares: gpu_fa4.py's choice, half of the mixes on each GPU (shares.csv, shares_predicted.csv)
steps: whole steps of gpu_train.py at CP=1, a backend on each GPU, then at CP=2 (steps.csv)
equal: documents as long as the window against stock, by each backend's kernels (equal.csv)
Rows are in --out within seconds of being measured, so that a run that is cut short loses none.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.attention.attention_regret import against, report
from scripts.environment import free_port
from wlb_megatron.report.files import write_csv

TABLES = {
    "nvlink.csv": ("nvlink/backends.csv",),
    "host.csv": ("host/host.csv",),
    "shares.csv": ("shares*/choice_*[0-9].csv",),
    "shares_predicted.csv": ("shares*/choice_*_predicted.csv",),
    "steps.csv": ("steps*/iterations.csv",),
    "equal.csv": ("equal*/pairs.csv",),
}
"""Files of --out, and those that they are put together from."""
BUDGETS = {"nvlink": 130.0, "host": 50.0, "shares": 300.0, "steps": 280.0, "equal": 300.0}
CACHED = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
FRESH = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
"""Whether FlashAttention-4 takes what another process compiled: not where a job's start is timed."""


@dataclass
class Sections:
    """work: folder of logs and partial results. until: when all must be done, by time.monotonic()."""

    args: argparse.Namespace
    work: Path
    until: float
    corpus: Path | None = None
    _running: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def run(self, name: str) -> None:
        budget = self.args.budgets.get(name, BUDGETS[name])
        limit = min(budget, self.until - time.monotonic() - 3)
        began = time.monotonic()
        if limit < 20:
            print(f"{name}: no time left", flush=True)
            return
        steps: dict[str, Callable[[float], None]] = {
            "nvlink": self._nvlink,
            "host": self._host,
            "shares": self._shares,
            "steps": self._steps,
            "equal": self._equal,
        }
        steps[name](limit)
        print(f"[{name} took {time.monotonic() - began:.0f} s of {limit:.0f}]", flush=True)
        self.keep()

    def _nvlink(self, limit: float) -> None:
        mixes = ["--mixes", str(self.args.mixes), "--out", str(self.work / "nvlink")]
        arguments = ["backends", *mixes, "--seconds", str(limit * 0.8)]
        self._start("nvlink", self._torchrun("scripts.bench.attention.gpu_attention", *arguments), CACHED)
        self._wait(limit)

    def _host(self, limit: float) -> None:
        kinds = ["--kernels", "fa4", "--kinds", "hybrid", "hybrid, one call", "--windows", "131072", "16384"]
        mixes = ["--mixes", str(self.args.mixes), "--out", str(self.work / "host")]
        self._start(
            "host", self._torchrun("scripts.bench.attention.gpu_attention", "host", *mixes, *kinds), CACHED
        )
        self._wait(limit)

    def _shares(self, limit: float) -> None:
        for gpu in range(self.args.gpus):
            arguments = [
                "--parts",
                "choice",
                "--mixes",
                str(self.args.mixes),
                "--every",
                f"{gpu}::{self.args.gpus}",
            ]
            arguments += ["--seconds", str(limit - 8), "--out", str(self.work / f"shares{gpu}")]
            arguments += ["--cp", *map(str, self.args.cp), "--windows", *map(str, self.args.windows)]
            command = self._python("scripts.bench.attention.fa4.gpu_fa4", *arguments)
            self._start(f"shares{gpu}", command, CACHED | {"CUDA_VISIBLE_DEVICES": str(gpu)})
        self._wait(limit)
        self.keep()
        rows = read(self.args.out / "shares.csv")
        wrong = read(self.args.out / "shares_predicted.csv")
        of = {name: [row for row in rows if row["kernels"] == name] for name in ("cudnn", "fa4")}
        for name, mine in of.items():
            errors = [row for row in wrong if row["kernels"] == name]
            report(mine, errors, self.args.windows, self.args.cp, name)
        against(of["fa4"], "FlashAttention-4", of["cudnn"], "cuDNN")

    def _steps(self, limit: float) -> None:
        until = time.monotonic() + limit
        train = ["--seq-length", "65536", "--layers", str(self.args.layers), "--gpus", str(self.args.gpus)]
        train += ["--iterations", "10", "--warm-up", "4", "--data", str(self.made_corpus())]
        for gpu, kernels in enumerate(("cudnn", "fa4")):
            named = ["--runs", f"cp1-{kernels}-module", "--out", str(self.work / f"steps-cp1-{kernels}")]
            seen = FRESH | {"CUDA_VISIBLE_DEVICES": str(gpu % self.args.gpus)}
            self._start(
                f"steps-cp1-{kernels}", self._python("scripts.bench.training.gpu_train", *train, *named), seen
            )
        self._wait(until - time.monotonic())
        for kernels in ("fa4", "cudnn"):
            named = ["--runs", f"cpN-{kernels}-module", "--out", str(self.work / f"steps-cpN-{kernels}")]
            self._start(
                f"steps-cpN-{kernels}",
                self._python("scripts.bench.training.gpu_train", *train, *named),
                FRESH,
            )
            self._wait(until - time.monotonic())

    def _equal(self, limit: float) -> None:
        until = time.monotonic() + limit
        for place, kernels in enumerate(("fa4", "cudnn")):
            arguments = [
                "--script",
                str(self.args.script),
                "--kernels",
                kernels,
                "--warm-ranks",
                "--layers",
                "4",
            ]
            arguments += ["--iterations", "9", "--warm-up", "4", "--pairs", str(self.args.pairs)]
            arguments += ["--out", str(self.work / f"equal-{kernels}")]
            self._start(
                f"equal-{kernels}",
                self._python("scripts.bench.training.gpu_equal_lengths", *arguments),
                CACHED,
            )
            left = until - time.monotonic()
            self._wait(left * (0.55 if place == 0 else 1.0))

    def made_corpus(self) -> Path:
        """Prefix of the documents that `steps` trains on."""
        if self.corpus is None:
            self.corpus = self.work / "corpus" / "python_sources"
            arguments = [
                str(self.corpus),
                *(["--lengths", str(self.args.lengths)] if self.args.lengths else []),
            ]
            self._start("corpus", self._python("wlb_megatron.cli", "corpus", *arguments), {})
            self._wait(60)
        return self.corpus

    def keep(self) -> None:
        """Put the tables of --out together anew."""
        for name, patterns in TABLES.items():
            paths = sorted({path for pattern in patterns for path in self.work.glob(pattern)})
            if rows := [row for path in paths for row in read(path)]:
                write_csv(self.args.out / name, rows)

    def keep_logs(self) -> None:
        with tarfile.open(self.args.out / "logs.tgz", "w:gz") as kept:
            for path in sorted(p for kind in ("*.log", "*.jsonl") for p in self.work.rglob(kind)):
                kept.add(path, path.relative_to(self.work))

    def _python(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", module, *arguments]

    def _torchrun(self, module: str, *arguments: str) -> list[str]:
        count = ["--nproc-per-node", str(self.args.gpus), "--master-addr", "127.0.0.1"]
        count += ["--master-port", str(free_port())]
        return [sys.executable, "-m", "torch.distributed.run", *count, "-m", module, *arguments]

    def _start(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        quiet = {"OMP_NUM_THREADS": "4", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        cache = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(self.work / "cache")}
        with (self.work / f"{name}.log").open("wb") as log:
            started = subprocess.Popen(
                command,
                env={**os.environ, **quiet, **cache, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._running.append((name, started))

    def _wait(self, seconds: float) -> None:
        """Until all that runs is done; killed with all that they started after these seconds. Prints what they said."""
        until = time.monotonic() + seconds
        while any(process.poll() is None for _, process in self._running) and time.monotonic() < until:
            time.sleep(2)
            self.keep()
        for name, process in self._running:
            late = process.poll() is None
            for started in [*descendants(process.pid), process.pid] if late else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(started, signal.SIGKILL)
            status = process.wait()
            output = (self.work / f"{name}.log").read_text(errors="replace").strip().splitlines()
            ended = "cut short" if late else f"status {status}" if status else "done"
            print(f"--- {name}: {ended}", *output[-self.args.lines :], sep="\n", flush=True)
        self._running = []


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and those that they started, in sessions of their own or not. Linux alone."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    pids = [pid]
    for parent in pids:
        pids += [child for child, its in parents.items() if its == parent]
    return pids[1:]


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV; none where it is not there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
