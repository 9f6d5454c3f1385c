"""A planner in a process of its own, so that planning takes nothing from the training process's Python.

python -m wlb_megatron.dynamic reads JSON lines. The first tells the stage and costs, each of the others one
iteration: {"tokens": [..], "fixed": plan, "seconds": s, "budget": s or null}. Each is answered by a line: {"plan": ..,
"source": .., "priced": .., "bound": .., "predicted": .., "fixed": ..}, plans as dynamic.plan.StepPlan.encode has them.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import Any, TextIO

from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.planner import Outcome, plan_step
from wlb_megatron.workload.kernel_table import KernelTable


def tell_settings(stage: Stage, cost: GroupCost, sharding: str, pipeline: int, multiple: int) -> str:
    """The first line."""
    told = {"sharding": sharding, "pipeline": pipeline, "multiple": multiple}
    return json.dumps({"stage": asdict(stage), "cost": asdict(cost), **told})


def tell_iteration(tokens: list[int], fixed: StepPlan, seconds: float, budget: float | None) -> str:
    """The line of one iteration."""
    told = {"tokens": tokens, "fixed": fixed.encode().tolist(), "seconds": seconds, "budget": budget}
    return json.dumps(told)


def read_outcome(line: str) -> Outcome:
    """The answer to an iteration's line. Raises ValueError for what is no answer."""
    told = json.loads(line)
    return Outcome(**{**told, "plan": StepPlan.decode(told["plan"])})


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer lines until they end."""
    told: dict[str, Any] = json.loads(lines.readline(), object_hook=_tuples)
    tables = tuple(KernelTable(**table) for table in told["cost"].pop("tables"))
    stage, cost = Stage(**told["stage"]), GroupCost(**told["cost"], tables=tables)
    for line in lines:
        asked = json.loads(line)
        made = plan_step(
            asked["tokens"],
            stage,
            cost,
            fixed=StepPlan.decode(asked["fixed"]),
            seconds=asked["seconds"],
            sharding=told["sharding"],
            pipeline=told["pipeline"],
            multiple=told["multiple"],
            budget=math.inf if asked["budget"] is None else asked["budget"],
        )
        told_plan = made.plan.encode().tolist()
        fields = {name: getattr(made, name) for name in ("source", "priced", "bound", "predicted", "fixed")}
        print(json.dumps({"plan": told_plan, **fields}), file=answers, flush=True)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in fields.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
