"""Plans of FlexSP's released solver, priced like the other planners of bench_dynamic. Times are simulated.

python -m scripts.bench.dynamic.flexsp_plans problems problems.json --wikipedia LENGTHS.npy
python scripts/bench/dynamic/flexsp_solver.py Hetu-Galvatron problems.json plans.json    # its docstring tells more
python -m scripts.bench.dynamic.flexsp_plans price plans.json --out docs/results/simulated/dynamic_flexsp.csv

problems: the global batches of `bench_dynamic --sections gains` and prices as FlexSP states them, fitted to ours.
price: seconds to plan, and speed-ups over the best static degree on the same batches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.dynamic.bench_dynamic import (
    RANK_TOKENS,
    WINDOWS,
    batches,
    corpora,
    costs,
    stage_of,
)
from scripts.bench.dynamic.dynamic_baselines import WITHOUT_HYBRID, planned_ns, static_plan
from wlb_megatron.documents.synthetic import cut_overlong
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import Group, StepPlan
from wlb_megatron.dynamic.plan_step import plan_step
from wlb_megatron.report.files import write_csv

LAYERS, HIDDEN = 32, 4096
"""Of the 7B model, whose times FlexSP tells in milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("problems", "price"))
    parser.add_argument("file", type=Path, help="problems to write, or plans to price (JSON)")
    parser.add_argument("--wikipedia", type=Path, help=".npy of document lengths (problems)")
    parser.add_argument("--iterations", type=int, default=16, help="global batches of each case (problems)")
    parser.add_argument("--out", type=Path, help="CSV of the prices (default: none)")
    options = parser.parse_args()
    if options.action == "problems":
        options.file.write_text(json.dumps(problems(options.wikipedia, options.iterations)))
        return
    rows = price(json.loads(options.file.read_text()))
    if options.out is not None:
        write_csv(options.out, rows)


def problems(wikipedia: Path | None, iterations: int) -> dict[str, Any]:
    """What flexsp_solver.py reads: by corpus and window, lengths of documents and FlexSP's prices."""
    cases = []
    for window in WINDOWS:
        stage = stage_of(window)
        for name, lengths in corpora(wikipedia).items():
            cut = cut_overlong(lengths, window)
            drawn = [tokens for _, tokens in batches(cut, window, iterations)]
            prices = fitted(costs(stage), [d for tokens in drawn for d in tokens])
            cases.append({"corpus": name, "window": window, "prices": prices, "batches": drawn})
    return {"gpus": 64, "rank_tokens": RANK_TOKENS, "cases": cases}


def fitted(cost: GroupCost, lengths: Sequence[int]) -> dict[str, Any]:
    """Our prices in FlexSP's form, milliseconds of all layers forward + backward.

    A document of s tokens on g GPUs: (alpha1 s^2 + alpha2 s) / g, fitted on one GPU over powers of two, plus s tokens
    over a bandwidth of each g (MB a ms), which is fitted to what else these documents cost. beta1: a micro-batch.
    """
    scale = LAYERS / 1e6
    probe = 2.0 ** np.arange(8, np.log2(max(lengths)) + 1)
    whole = cost.prices(probe)[0] * scale
    form = np.stack([probe**2, probe], axis=1)
    alpha = np.linalg.lstsq(form / whole[:, None], np.ones(len(probe)), rcond=None)[0]
    tokens = np.asarray(lengths, dtype=np.float64)
    ours = cost.prices(lengths).sum(axis=1) * scale
    computed = alpha @ [(tokens**2).sum(), tokens.sum()]
    bandwidth = {1: 1e10}
    for at, size in enumerate(cost.sizes[1:], 1):
        # FlexSP divides 4 tensors x 2 directions x 2 bytes of every token, and the number of GPUs, by it.
        moved = 16 * LAYERS * HIDDEN / 2**20 / size * tokens.sum()
        bandwidth[size] = float(moved / max(ours[at] - computed / size, 1e-3 * ours[at]))
    return {
        "layers": LAYERS,
        "hidden_size": HIDDEN,
        "alpha1": float(alpha[0]),
        "alpha2": float(alpha[1]),
        "beta1": float((cost.step_ns + np.mean(cost.opening()[1:])) * scale),
        "bandwidth": bandwidth,
    }


def step_plan(micro_steps: Sequence[Sequence[tuple[int, Sequence[int]]]], tokens: Sequence[int]) -> StepPlan:
    """FlexSP's groups on 64 ranks, the largest on the first ones. ValueError for a document that is not in one group,
    or a GPU with more tokens than it holds; a group may hold more than Lmax, as in FlexSP."""
    placed = sorted(d for groups in micro_steps for _, held in groups for d in held)
    if placed != list(range(len(tokens))):
        raise ValueError(f"{len(placed)} documents are placed, not each of {len(tokens)} once")
    steps = []
    for groups in micro_steps:
        at, step = 0, []
        for size, held in sorted(groups, key=lambda group: -group[0]):
            if sum(tokens[d] for d in held) > size * RANK_TOKENS:
                raise ValueError(f"{sum(tokens[d] for d in held)} tokens on {size} GPUs")
            step.append(Group(at, size, tuple(sorted(held))))
            at += size
        if at > 64:
            raise ValueError(f"groups of {at} GPUs")
        steps.append(tuple(step))
    return StepPlan(64, tuple(steps))


def price(plans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each corpus and window. Raises ValueError for a batch without a plan."""
    rows = []
    for name, window in dict.fromkeys((plan["corpus"], plan["window"]) for plan in plans):
        stage = stage_of(window)
        cost = costs(stage)
        of_case = [plan for plan in plans if (plan["corpus"], plan["window"]) == (name, window)]
        static: dict[int, list[int]] = {}
        flexsp, ours, predicted = [], [], 0.0
        degrees: set[int] = set()
        for plan in of_case:
            tokens = plan["lengths"]
            if plan["micro_steps"] is None:
                raise ValueError(f"no plan for batch {plan['batch']} of {name}, window {window}")
            theirs = step_plan(plan["micro_steps"], tokens)
            degrees |= {group.size for groups in theirs.micro_steps for group in groups}
            flexsp.append(planned_ns(theirs, tokens, cost, WITHOUT_HYBRID))
            # FlexSP tells milliseconds of all layers.
            predicted += plan["tried"][str(len(plan["micro_steps"]))] * 1e6 / LAYERS
            ours.append(plan_step(tokens, stage, cost).predicted)
            for size, ns in static_ns(tokens, stage, cost, window).items():
                static.setdefault(size, []).append(ns)
        best = min(static, key=lambda size: sum(static[size]))
        row = {
            "corpus": name,
            "window": window,
            "gpus": 64,
            "batches": len(of_case),
            "best_static_degree": best,
            "degrees_used": " ".join(map(str, sorted(degrees))),
            "speedup": round(sum(static[best]) / sum(flexsp), 4),
            "dynamic_speedup": round(sum(static[best]) / sum(ours), 4),
            "predicted_over_simulated": round(predicted / sum(flexsp), 4),
            "micro_batches": " ".join(str(len(plan["micro_steps"])) for plan in of_case),
            "cpu_seconds_mean": round(float(np.mean([plan["seconds"] for plan in of_case])), 1),
            "cpu_seconds_of_one_micro_batch_most": max(plan["longest"] for plan in of_case),
        }
        rows.append(row)
        print(row, flush=True)
    for column in ("speedup", "dynamic_speedup"):
        mean = np.exp(np.mean(np.log([row[column] for row in rows])))
        print(f"{column}: {mean:.3f} in geometric mean (simulated, 64 GPUs)")
    return rows


def static_ns(tokens: Sequence[int], stage: Stage, cost: GroupCost, window: int) -> dict[int, int]:
    """Nanoseconds of a layer by each degree that holds a window."""
    ns_by_size = {}
    for level, size in enumerate(stage.sizes):
        plan = static_plan(tokens, stage, cost, level) if stage.tokens[level] >= window else None
        if plan is not None:
            ns_by_size[size] = planned_ns(plan, tokens, cost, WITHOUT_HYBRID)
    return ns_by_size


if __name__ == "__main__":
    main()
