"""Runs one job under several packings and shardings, and compares the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.reproduce import paper
from scripts.reproduce.paper import Setting
from scripts.reproduce.schemes import plan_run, shard_run
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.pipeline.orders import Step, grouped_orders
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.cut import orders_of
from wlb_megatron.simulator.iteration import Shards, Simulated, perfectly_balanced, simulate
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import SHAPES
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.kernel_table import KernelTable, h100

IntArray = npt.NDArray[np.int64]

PLAIN, FIXED, PAPER, OURS = "plain-4D", "fixed-4D", "WLB-LLM", "ours"
ONE = "ours, 1 micro-batch a window"
SCHEMES = {
    PLAIN: ("original", ("per-sequence",)),
    FIXED: ("fixed-greedy-1", ("per-sequence", "per-document")),
    PAPER: ("paper-2", ("paper-adaptive",)),
    ONE: ("varlen-1", ("adaptive",)),
    OURS: ("varlen", ("adaptive",)),
}
"""Packings, each with the shardings to try; the sharding that is faster over the whole run counts."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a comparison simulates.

    iterations: use 100 or more, because with few iterations different documents are compared (outliers are rare).
    lengths: integers[n] of documents for a window of lengths_of tokens; None: seeded ones. per_window: micro-batches
    per window in this project's plans, auto or a number.
    """

    lengths: Lengths | None = None
    lengths_of: int = 128 * paper.K
    stretch: bool = True
    iterations: int = 300
    warm_up: int = 16
    seed: int = 1234
    per_window: str = "auto"
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: KernelTable = field(default_factory=h100)

    def lengths_for(self, window: int) -> Lengths:
        """Stretched to the window, or as they are (those above the window are split at it)."""
        if self.lengths is None:
            return long_tailed(window if self.stretch else self.lengths_of)
        return rescale(self.lengths, window, self.lengths_of) if self.stretch else self.lengths


@dataclass
class SettingRuns:
    """One setting under several packings and shardings; each is planned once."""

    inputs: Inputs
    setting: Setting
    plans: dict[str, list[IterationPlan]] = field(default_factory=dict)
    simulations: dict[tuple[str, str], Simulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = LayerModel(
            shape=SHAPES[self.setting.model],
            layout=self.setting.layout,
            assumptions=self.inputs.assumptions,
            measured=self.inputs.measured,
        )
        self.cost = self.model.cost()

    def planned(self, packing: str) -> list[IterationPlan]:
        if packing not in self.plans:
            inputs = self.inputs
            self.plans[packing] = plan_run(
                packing,
                inputs.lengths_for(self.setting.window),
                self.setting,
                self.cost,
                iterations=inputs.iterations,
                warm_up=inputs.warm_up,
                seed=inputs.seed,
                per_window=inputs.per_window,
            )
        return self.plans[packing]

    def shards(self, packing: str, sharding: str) -> Shards:
        return shard_run(self.planned(packing), sharding, self.model)

    def simulated(self, packing: str, sharding: str) -> Simulated:
        if (packing, sharding) not in self.simulations:
            self.simulations[packing, sharding] = simulate(
                self.shards(packing, sharding), self.model, orders=orders_of(self.planned(packing))
            )
        return self.simulations[packing, sharding]

    def scheme(self, name: str) -> tuple[str, str, Simulated]:
        """The packing, the sharding that is faster over the run, and the result."""
        packing, shardings = SCHEMES[name]
        sharding = min(shardings, key=lambda kind: self.simulated(packing, kind).ns_per_token)
        return packing, sharding, self.simulated(packing, sharding)

    def speedup(self, packing: str, sharding: str) -> float:
        """Plain 4D's time per token over this one's."""
        plain = self.simulated("original", "per-sequence").ns_per_token
        return plain / self.simulated(packing, sharding).ns_per_token

    def work_per_token(self, packing: str) -> float:
        """Tokens of linear work per trained token. Less if documents are cut, because pieces do not attend to each
        other.
        """
        micro_batches = [
            micro_batch for plan in self.planned(packing) for row in plan.micro_batches for micro_batch in row
        ]
        work = sum(micro_batch.work for micro_batch in micro_batches) / UNITS_PER_TOKEN
        return work / sum(micro_batch.tokens for micro_batch in micro_batches)

    def bound(self) -> float:
        """Speed-up of the perfectly balanced plan of our documents."""
        plain = self.simulated("original", "per-sequence").ns_per_token
        return plain / perfectly_balanced(self.planned("varlen"), self.model).ns_per_token


def compare_schemes(inputs: Inputs, setting: Setting) -> dict[str, Any]:
    """One row of the table. Speed-ups are over plain 4D, by time per trained token."""
    run = SettingRuns(inputs, setting)
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
            "step_over_ideal": simulated.step_over_ideal,
            "micro_batches": micro_batch_count(simulated),
            **held(run.planned(packing), setting),
            "equal_work_speedup": speedup * run.work_per_token(packing) / run.work_per_token("original"),
            "lockstep_speedup": lockstep(run.simulated("original", "per-sequence"), setting.layout.pipeline)
            / lockstep(simulated, setting.layout.pipeline),
        }
    layout = setting.layout
    return {
        "name": setting.name,
        "model": setting.model,
        "window": setting.window,
        "layout": {"tp": layout.tensor, "cp": layout.context, "pp": layout.pipeline, "dp": layout.data},
        "gpus": layout.gpus,
        "quadratic_at": run.cost.quadratic_at,
        "paper_speedup": setting.speedup,
        "bound": bound,
        "schemes": schemes,
    }


def held(plans: Sequence[IterationPlan], setting: Setting) -> dict[str, float]:
    """The largest micro-batch, and the most whose activations the first stage holds at once, in windows."""
    layout, peak, peak_sum = setting.layout, 0, 0.0
    for plan, together in zip(plans, orders_of(plans), strict=True):
        for column, sizes in zip(zip(*plan.micro_batches, strict=True), together, strict=True):
            tokens = [micro_batch.tokens for micro_batch in column]
            peak = max(peak, *tokens)
            orders = grouped_orders(layout.pipeline, sizes or (1,) * len(tokens), layout.virtual)
            peak_sum = max(peak_sum, in_flight(orders[:1], tokens)[0] / layout.virtual)
    return {"largest_windows": peak / setting.window, "held_windows": peak_sum / setting.window}


def in_flight(orders: Sequence[Sequence[Step]], tokens: Sequence[int]) -> list[int]:
    """For each stage the most tokens held at once, from their forward to the end of their backward.

    tokens: each micro-batch's. Steps of an interleaved stage count a micro-batch once for each model chunk.
    """
    peaks = []
    for order in orders:
        running = peak = 0
        for step in order:
            running += -tokens[step.micro_batch] if step.backward else tokens[step.micro_batch]
            peak = max(peak, running)
        peaks.append(peak)
    return peaks


def micro_batch_count(simulated: Simulated) -> float:
    """Micro-batches of a data-parallel rank, mean over iterations."""
    return float(np.mean([len(times) for times in simulated.micro_batches]))


def lockstep(simulated: Simulated, stages: int) -> float:
    """Nanoseconds per token if all stages of all pipelines advanced together, at the largest micro-batch's pace.

    A pipeline of m micro-batches then takes (m + P - 1) x the largest; 1F1B takes about sum + (P - 1) x largest.
    """
    took = sum((len(times) + stages - 1) * float(times.max()) for times in simulated.micro_batches)
    return took / float(simulated.tokens.sum())


def rescale(lengths: Lengths, window: int, of: int) -> IntArray:
    """Lengths of a corpus for a window of `of` tokens, stretched to another window: [8, 3] of 8 to 4 are [4, 2]."""
    return np.maximum(np.rint(lengths * (window / of)), 1).astype(np.int64)


def means(rows: list[dict[str, Any]], key: str = "speedup") -> dict[str, dict[str, float]]:
    """For each scheme, the mean over all rows and over the rows of each window."""
    by_scheme: dict[str, dict[str, float]] = {}
    for scheme in SCHEMES:
        by_scheme[scheme] = {"all": float(np.mean([row["schemes"][scheme][key] for row in rows]))}
        for window in sorted({row["window"] for row in rows}):
            figures = [row["schemes"][scheme][key] for row in rows if row["window"] == window]
            by_scheme[scheme][f"{window // paper.K}K"] = float(np.mean(figures))
    return by_scheme
