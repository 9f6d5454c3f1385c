"""The paper's tables, simulated: plain 4D, fixed-length packing, WLB-LLM as its paper says, and this project's way.

All schemes run with one attention executor (sharding/attention_calls.py) and one network, so that what differs is
packing and sharding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.plan import IterationPlan
from wlb_megatron.simulator import paper
from wlb_megatron.simulator.assumptions import Assumptions
from wlb_megatron.simulator.iteration import Shards, Simulated, simulate
from wlb_megatron.simulator.lengths import long_tailed, rescale
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.paper import Setting
from wlb_megatron.simulator.schemes import perfectly_balanced, plan_run, shard_run
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.kernel_table import KernelTable, h100

IntArray = npt.NDArray[np.int64]

PLAIN, FIXED, PAPER, OURS = "plain-4D", "fixed-4D", "WLB-LLM", "ours"
SCHEMES = {
    PLAIN: ("original", ("per-sequence",)),
    FIXED: ("fixed-greedy-1", ("per-sequence", "per-document")),
    PAPER: ("paper-2", ("paper-adaptive",)),
    OURS: ("varlen", ("adaptive",)),
}
"""Packing, and shardings of which the one that is faster over the whole run counts."""

LARGE_JOB_ITERATIONS = 100
"""At most; one of its iterations has as many micro-batches as 16 of the others."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is simulated with. iterations: few ones compare different documents, as outliers are few: 100 and more.

    lengths: int64[n] of documents for a window of lengths_of tokens; None: seeded ones."""

    lengths: IntArray | None = None
    lengths_of: int = 128 * paper.K
    stretch: bool = True
    iterations: int = 300
    warm_up: int = 16
    seed: int = 1234
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: KernelTable = field(default_factory=h100)

    def lengths_for(self, window: int) -> IntArray:
        """Stretched to the window, or as they are (those above the window are split at it)."""
        if self.lengths is None:
            return long_tailed(window if self.stretch else self.lengths_of)
        return rescale(self.lengths, window, self.lengths_of) if self.stretch else self.lengths


@dataclass
class Run:
    """One setting under several packings and shardings, each planned once."""

    inputs: Inputs
    setting: Setting
    plans: dict[str, list[IterationPlan]] = field(default_factory=dict)
    done: dict[tuple[str, str], Simulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = LayerModel(
            shape=paper.SHAPES[self.setting.model],
            layout=self.setting.layout,
            assumptions=self.inputs.assumptions,
            measured=self.inputs.measured,
        )
        self.cost = self.model.cost()

    def planned(self, packing: str) -> list[IterationPlan]:
        if packing not in self.plans:
            given = self.inputs
            self.plans[packing] = plan_run(
                packing,
                given.lengths_for(self.setting.window),
                self.setting,
                self.cost,
                iterations=given.iterations,
                warm_up=given.warm_up,
                seed=given.seed,
            )
        return self.plans[packing]

    def shards(self, packing: str, sharding: str) -> Shards:
        return shard_run(self.planned(packing), sharding, self.model)

    def simulated(self, packing: str, sharding: str) -> Simulated:
        if (packing, sharding) not in self.done:
            self.done[packing, sharding] = simulate(self.shards(packing, sharding), self.model)
        return self.done[packing, sharding]

    def scheme(self, name: str) -> tuple[str, str, Simulated]:
        """Packing, the sharding that is faster over the run, and what came of them."""
        packing, shardings = SCHEMES[name]
        best = min(shardings, key=lambda kind: self.simulated(packing, kind).ns_per_token)
        return packing, best, self.simulated(packing, best)

    def speedup(self, packing: str, sharding: str) -> float:
        """Time per token, plain 4D's over this one's."""
        plain = self.simulated("original", "per-sequence").ns_per_token
        return plain / self.simulated(packing, sharding).ns_per_token

    def work_per_token(self, packing: str) -> float:
        """Tokens of linear work for each trained token: less where documents are cut, as no piece sees another."""
        grids = [one for plan in self.planned(packing) for row in plan.micro_batches for one in row]
        work = sum(one.work for one in grids) / UNITS_PER_TOKEN
        return work / sum(one.tokens for one in grids)

    def bound(self) -> float:
        """Speed-up of the perfectly balanced plan of our documents."""
        plain = self.simulated("original", "per-sequence").ns_per_token
        return plain / perfectly_balanced(self.planned("varlen"), self.model).ns_per_token


def reproduce(inputs: Inputs, tick: Callable[[str], None], *, large: bool = True) -> dict[str, Any]:
    """All tables, as JSON-able figures. tick: called with the name of each part begun (`parts` says how many).

    large: also the 8,192-GPU job, whose plans take a minute.
    """
    report: dict[str, Any] = {
        "simulated": True,
        "kernel_table": inputs.measured.device,
        "assumptions": asdict(inputs.assumptions),
        "lengths": "given" if inputs.lengths is not None else "seeded, long-tailed",
        "stretched": inputs.stretch,
        "iterations": inputs.iterations,
        "warm_up": inputs.warm_up,
        "seed": inputs.seed,
        "paper": {"mean": paper.MEAN, "over_fixed": paper.OVER_FIXED, "sharding": paper.SHARDING},
    }
    for key, settings in (("configurations", paper.CONFIGURATIONS), ("windows", paper.WINDOWS)):
        report[key] = []
        for setting in settings:
            tick(setting.name)
            report[key].append(compare_schemes(inputs, setting))
    report["means"] = means(report["configurations"])
    tick("breakdown")
    run = Run(inputs, paper.BREAKDOWN_OF)
    report["breakdown"] = break_down(run)
    report["packing"] = compare_packings(run)
    report["sharding"] = compare_shardings(Run(inputs, paper.SHARDING_OF))
    report["sensitivity"] = vary(inputs, report["configurations"], lambda: tick("other assumptions"))
    report["large_job"] = []
    for scheme in (PLAIN, PAPER, OURS) if large else ():
        tick(f"{paper.LARGE_JOB.layout.gpus} GPUs, {scheme}")
        report["large_job"].append(large_job(inputs, scheme))
    return report


def parts(large: bool) -> int:
    """How often `reproduce` ticks."""
    return 4 * len(paper.CONFIGURATIONS) + len(paper.WINDOWS) + 1 + (3 if large else 0)


def compare_schemes(inputs: Inputs, setting: Setting) -> dict[str, Any]:
    """One row of the table. Speed-ups are over plain 4D, by time per trained token."""
    run = Run(inputs, setting)
    bound = run.bound()
    schemes = {}
    for name in SCHEMES:
        packing, sharding, simulated = run.scheme(name)
        speedup = run.speedup(packing, sharding)
        schemes[name] = {
            "packing": packing,
            "sharding": sharding,
            "speedup": speedup,
            "of_bound": speedup / bound,
            "step_ms": float(simulated.steps.mean() / 1e6),
            "ns_per_token": simulated.ns_per_token,
            "imbalance": simulated.imbalance,
            "equal_work_speedup": speedup * run.work_per_token(packing) / run.work_per_token("original"),
            "lockstep_speedup": lockstep(run.simulated("original", "per-sequence"), setting)
            / lockstep(simulated, setting),
        }
    layout = setting.layout
    return {
        "name": setting.name,
        "model": setting.model,
        "window": setting.window,
        "layout": {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp},
        "gpus": layout.gpus,
        "quadratic_at": run.cost.quadratic_at,
        "paper_speedup": setting.speedup,
        "bound": bound,
        "schemes": schemes,
    }


def lockstep(simulated: Simulated, setting: Setting) -> float:
    """Nanoseconds per token if all stages of all pipelines advanced together, at the largest micro-batch's pace.

    A pipeline of m micro-batches then takes (m + P - 1) x the largest; 1F1B takes about sum + (P - 1) x largest.
    """
    slots = setting.micro_batches + setting.layout.pp - 1
    largest = simulated.micro_batches.max(axis=(1, 2)).sum()
    return float(slots * largest / simulated.tokens.sum())


def break_down(run: Run) -> list[dict[str, Any]]:
    """What each part brings at 7B-128K, the paper's and ours; each over plain 4D."""
    parts = [
        ("per-document CP", "original", "per-document", paper.BREAKDOWN["per-document"]),
        ("adaptive CP (the paper's two)", "original", "paper-adaptive", paper.BREAKDOWN["adaptive"]),
        ("adaptive CP with hybrid (ours)", "original", "adaptive", None),
        ("packing and delay (paper)", "paper-2", "per-sequence", paper.BREAKDOWN["packing and delay"]),
        ("packing and delay (ours)", "varlen", "per-sequence", None),
        ("all of WLB-LLM", "paper-2", "paper-adaptive", paper.BREAKDOWN["all"]),
        ("all of ours", "varlen", "adaptive", None),
    ]
    rows: list[dict[str, Any]] = [
        {"part": part, "simulated": run.speedup(packing, sharding), "paper": told}
        for part, packing, sharding, told in parts
    ]
    return [*rows, {"part": "perfectly balanced (bound)", "simulated": run.bound(), "paper": None}]


def compare_packings(run: Run) -> list[dict[str, Any]]:
    """Max/mean of simulated micro-batch times, per-document sharding throughout; and of work by the cost model."""
    packings = [
        ("original", "original"),
        *((f"fixed-greedy over {k}", f"fixed-greedy-{k}") for k in (1, 2, 4, 8)),
        *((f"WLB-LLM, {q} queue{'s' * (q > 1)}", f"paper-{q}") for q in (1, 2, 3)),
        ("ours", "varlen"),
    ]
    rows = []
    for name, packing in packings:
        works = [
            np.array([[one.work for one in row] for row in p.micro_batches]) for p in run.planned(packing)
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


def compare_shardings(run: Run) -> list[dict[str, Any]]:
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


def means(rows: list[dict[str, Any]], key: str = "speedup") -> dict[str, dict[str, float]]:
    """Of each scheme: mean over all rows, and over those of each window."""
    told: dict[str, dict[str, float]] = {}
    for scheme in SCHEMES:
        told[scheme] = {"all": float(np.mean([row["schemes"][scheme][key] for row in rows]))}
        for window in sorted({row["window"] for row in rows}):
            chosen = [row["schemes"][scheme][key] for row in rows if row["window"] == window]
            told[scheme][f"{window // paper.K}K"] = float(np.mean(chosen))
    return told


def vary(inputs: Inputs, assumed: list[dict[str, Any]], tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Mean speed-ups over the eight configurations under other assumptions; assumed: the rows under these."""
    cases = [
        ("30 % of TP communication exposed", _with_exposed(inputs, 0.3)),
        ("attention kernels 1.6 times as slow", replace(inputs, measured=_slower(inputs.measured, 1.6))),
        ("lengths not stretched to the window", replace(inputs, stretch=False)),
    ]
    rows = [_summary("as assumed", assumed)]
    for name, case in cases:
        table = []
        for setting in paper.CONFIGURATIONS:
            tick()
            table.append(compare_schemes(case, setting))
        rows.append(_summary(name, table))
    return rows


def _summary(case: str, table: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "bound": float(np.mean([r["bound"] for r in table]))}
    row |= {scheme: told["all"] for scheme, told in means(table).items() if scheme != PLAIN}
    for key, name in (("equal_work_speedup", "at equal work"), ("lockstep_speedup", "in lockstep")):
        row |= {f"{scheme} {name}": means(table, key)[scheme]["all"] for scheme in (PAPER, OURS)}
    return row


def _with_exposed(inputs: Inputs, share: float) -> Inputs:
    return replace(inputs, assumptions=replace(inputs.assumptions, tp_exposed=share))


def _slower(table: KernelTable, factor: float) -> KernelTable:
    def grid(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(ns * factor for ns in row) for row in rows)

    return replace(
        table,
        rectangle=grid(table.rectangle),
        bottom_right=grid(table.bottom_right),
        diagonal=tuple(ns * factor for ns in table.diagonal),
        tile_key=table.tile_key * factor,
    )


def large_job(inputs: Inputs, scheme: str) -> dict[str, Any]:
    """Figures of the 8,192-GPU job; `heat`: [dp * pp][cp], each GPU's mean computing time of an iteration (ms,
    tensor ranks alike)."""
    setting = paper.LARGE_JOB
    few = replace(inputs, iterations=min(inputs.iterations, LARGE_JOB_ITERATIONS))
    _, _, simulated = Run(few, setting).scheme(scheme)
    flat = simulated.busy.reshape(len(simulated.busy), -1)
    return {
        "scheme": scheme,
        "gpus": setting.layout.gpus,
        "iterations": len(simulated.steps),
        "step_ms": float(simulated.steps.mean() / 1e6),
        "ns_per_token": simulated.ns_per_token,
        "imbalance": simulated.imbalance,
        "gpu_max_over_min": float((flat.max(axis=1) / flat.min(axis=1)).mean()),
        "heat": np.round(simulated.busy.mean(axis=0).reshape(-1, setting.layout.cp) / 1e6, 3).tolist(),
        "heat_of_one": np.round(simulated.busy[0].reshape(-1, setting.layout.cp) / 1e6, 3).tolist(),
    }
