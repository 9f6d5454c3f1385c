"""Simulates the paper's tables: plain 4D, fixed-length packing, WLB-LLM as its paper says, and this project's scheme.

All schemes run with one attention executor (sharding/attention_calls.py) and one network. So only packing and
sharding differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from scripts.reproduce import paper
from scripts.reproduce.compare import OURS, PAPER, PLAIN, Inputs, SettingRuns, compare_schemes, means
from scripts.reproduce.sensitivity import vary
from wlb_megatron import __version__
from wlb_megatron.whole_files import write_whole

LARGE_JOB_ITERATIONS = 100
"""At most; one of its iterations has as many micro-batches as 16 of the others."""


class Finished:
    """Rows of finished settings in a file that is replaced after each one. A run that was stopped, even by a kill, goes
    on with them if its inputs and the release are the same.

    before: how many there were. OSError or WlbError where the file cannot be written.
    """

    def __init__(self, path: Path, inputs: Inputs) -> None:
        lengths, self._path = inputs.lengths, path
        of = {
            "wlb_megatron": __version__,
            "lengths": lengths is not None
            and hashlib.sha256(np.asarray(lengths, "<i8").tobytes()).hexdigest(),
            "kernel_table": hashlib.sha256(inputs.measured.to_json().encode()).hexdigest(),
            "assumptions": asdict(inputs.assumptions),
            **{name: getattr(inputs, name) for name in ("lengths_of", "stretch", "iterations", "warm_up")},
            **{name: getattr(inputs, name) for name in ("seed", "per_window")},
        }
        self._of, self._rows = of, dict[str, Any]()
        with suppress(OSError, ValueError, LookupError, TypeError):  # none, or damaged
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["of"] == of:
                self._rows = dict(saved["rows"])
        self.before = len(self._rows)
        self._write()

    def row(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept by this name. It is not called where the row is known."""
        if name not in self._rows:
            self._rows[name] = make()
            self._write()
        return self._rows[name]

    def _write(self) -> None:
        text = json.dumps({"simulated": True, "of": self._of, "rows": self._rows}) + "\n"
        write_whole(self._path, text, "--out")


def reproduce(
    inputs: Inputs, tick: Callable[[str], None], finished: Finished, *, large: bool = True
) -> dict[str, Any]:
    """All tables, as JSON-able figures. tick: called with the name of each part begun (`parts` says how many).
    finished: holds rows that are not made again.

    large: also the 8,192-GPU job, whose plans take a minute.
    """
    report: dict[str, Any] = {
        "simulated": True,
        "kernel_table": inputs.measured.device,
        "assumptions": asdict(inputs.assumptions),
        "lengths": "given" if inputs.lengths is not None else "seeded, long-tailed",
        "stretched": inputs.stretch,
        "micro_batches_per_window": inputs.per_window,
        "iterations": inputs.iterations,
        "warm_up": inputs.warm_up,
        "seed": inputs.seed,
        "paper": {"mean": paper.MEAN, "over_fixed": paper.OVER_FIXED, "sharding": paper.SHARDING},
    }
    for key, settings in _tables().items():
        report[key] = []
        for setting in settings:
            tick(setting.name)
            row = finished.row(f"{key}, {setting.name}", partial(compare_schemes, inputs, setting))
            report[key].append(row)
    report["means"] = means(report["configurations"])
    tick("breakdown")
    run = SettingRuns(inputs, paper.BREAKDOWN_OF)
    report["breakdown"] = finished.row("breakdown", lambda: break_down(run))
    report["packing"] = finished.row("packing", lambda: compare_packings(run))
    report["sharding"] = finished.row(
        "sharding", lambda: compare_shardings(SettingRuns(inputs, paper.SHARDING_OF))
    )
    report["sensitivity"] = vary(
        inputs, report["configurations"], lambda: tick("other assumptions"), finished.row
    )
    report["large_job"] = []
    for scheme in (PLAIN, PAPER, OURS) if large else ():
        tick(f"{paper.LARGE_JOB.layout.gpus} GPUs, {scheme}")
        report["large_job"].append(finished.row(f"large job, {scheme}", partial(large_job, inputs, scheme)))
    return report


def parts(large: bool) -> int:
    """How often `reproduce` ticks."""
    return sum(map(len, _tables().values())) + 4 * len(paper.CONFIGURATIONS) + 1 + (3 if large else 0)


def _tables() -> dict[str, tuple[paper.Setting, ...]]:
    return {
        "configurations": paper.CONFIGURATIONS,
        "windows": paper.WINDOWS,
        "interleaved": paper.INTERLEAVED,
        "many_windows": paper.MANY,
    }


def break_down(run: SettingRuns) -> list[dict[str, Any]]:
    """What each part brings at 7B-128K, the paper's and ours; each over plain 4D."""
    parts = [
        ("per-document CP", "original", "per-document", paper.BREAKDOWN["per-document"]),
        ("adaptive CP (the paper's two)", "original", "paper-adaptive", paper.BREAKDOWN["adaptive"]),
        ("adaptive CP with hybrid (ours)", "original", "adaptive", None),
        ("packing and delay (paper)", "paper-2", "per-sequence", paper.BREAKDOWN["packing and delay"]),
        ("packing and delay (ours)", "varlen", "per-sequence", None),
        ("all of WLB-LLM", "paper-2", "paper-adaptive", paper.BREAKDOWN["all"]),
        ("packing and delay (ours), 1 micro-batch a window", "varlen-1", "per-sequence", None),
        ("all of ours, 1 micro-batch a window", "varlen-1", "adaptive", None),
        ("all of ours", "varlen", "adaptive", None),
    ]
    rows: list[dict[str, Any]] = [
        {"part": part, "simulated": run.speedup(packing, sharding), "paper": published}
        for part, packing, sharding, published in parts
    ]
    return [*rows, {"part": "perfectly balanced (bound)", "simulated": run.bound(), "paper": None}]


def compare_packings(run: SettingRuns) -> list[dict[str, Any]]:
    """Max/mean of simulated micro-batch times, per-document sharding throughout; and of work by the cost model."""
    packings = [
        ("original", "original"),
        *((f"fixed-greedy over {k}", f"fixed-greedy-{k}") for k in (1, 2, 4, 8)),
        *([("fixed-solver over 1", "fixed-solver-1")] if find_spec("ortools") else []),
        *((f"WLB-LLM, {q} queue{'s' * (q > 1)}", f"paper-{q}") for q in (1, 2, 3)),
        ("ours, 1 micro-batch a window", "varlen-1"),
        ("ours", "varlen"),
    ]
    rows = []
    for name, packing in packings:
        works = [
            np.array([[micro_batch.work for micro_batch in row] for row in p.micro_batches])
            for p in run.planned(packing)
        ]
        rows.append(
            {
                "packing": name,
                "work_imbalance": float(np.mean([work.max() / work.mean() for work in works])),
                "imbalance": run.simulated(packing, "per-document").imbalance,
                "paper": paper.IMBALANCE.get(name),
            }
        )
    return rows


def compare_shardings(run: SettingRuns) -> list[dict[str, Any]]:
    """A layer's attention at this setting's CP over arrival-order micro-batches: mean of the slowest rank's time."""
    rows: list[dict[str, Any]] = []
    for kind in ("per-sequence", "per-document", "paper-adaptive", "hybrid", "adaptive"):
        plans = [p for n in run.shards("original", kind) for row in n for p in row]
        attention = run.model.attention(plans)
        times = attention.forward + attention.backward
        rows.append(
            {
                "sharding": kind,
                "ms": float(times.max(axis=1).mean() / 1e6),
                "imbalance": float((times.max(axis=1) / times.mean(axis=1)).mean()),
            }
        )
    for row in rows:
        row["over_per_sequence"] = rows[0]["ms"] / row["ms"]
    return rows


def large_job(inputs: Inputs, scheme: str) -> dict[str, Any]:
    """Figures of the 8,192-GPU job; `heat`: [dp * pp][cp], each GPU's mean computing time of an iteration (ms,
    tensor ranks alike)."""
    setting = paper.LARGE_JOB
    job_inputs = replace(inputs, iterations=min(inputs.iterations, LARGE_JOB_ITERATIONS))
    _, _, simulated = SettingRuns(job_inputs, setting).scheme(scheme)
    flat = simulated.busy.reshape(len(simulated.busy), -1)
    return {
        "scheme": scheme,
        "gpus": setting.layout.gpus,
        "iterations": len(simulated.steps),
        "step_ms": float(simulated.steps.mean() / 1e6),
        "ns_per_token": simulated.ns_per_token,
        "imbalance": simulated.imbalance,
        "gpu_max_over_min": float((flat.max(axis=1) / flat.min(axis=1)).mean()),
        "heat": np.round(simulated.busy.mean(axis=0).reshape(-1, setting.layout.context) / 1e6, 3).tolist(),
        "heat_of_one": np.round(simulated.busy[0].reshape(-1, setting.layout.context) / 1e6, 3).tolist(),
    }
