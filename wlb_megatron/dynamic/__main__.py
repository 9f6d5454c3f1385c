"""A planner in a process of its own, so that planning takes nothing from the training process's Python.

python -m wlb_megatron.dynamic reads messages (wlb_megatron/child.py) of JSON. The first tells the stage and costs, each
of the others one iteration: {"tokens": [..], "fixed": plan, "seconds": s, "budget": s or null}. Each is answered:
{"plan": .., "source": .., "priced": .., "bound": .., "predicted": .., "fixed": ..}, plans as
dynamic.plan.StepPlan.encode has them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, BinaryIO

from wlb_megatron.child import pipes, read_message, write_message
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.plan_step import Outcome, plan_step
from wlb_megatron.workload.kernel_table import KernelTable


def tell_settings(stage: Stage, cost: GroupCost, sharding: str, pipeline: int, multiple: int) -> str:
    """The first message."""
    told = {"sharding": sharding, "pipeline": pipeline, "multiple": multiple}
    return json.dumps({"stage": asdict(stage), "cost": asdict(cost), **told})


def tell_iteration(tokens: list[int], fixed: StepPlan, seconds: float, budget: float | None) -> str:
    """The message of one iteration."""
    told = {"tokens": tokens, "fixed": fixed.encode().tolist(), "seconds": seconds, "budget": budget}
    return json.dumps(told)


def read_outcome(answer: str) -> Outcome:
    """The answer to an iteration's message. Raises ValueError for what is no answer."""
    told = json.loads(answer)
    return Outcome(**{**told, "plan": StepPlan.decode(told["plan"])})


def serve(messages: BinaryIO, answers: BinaryIO) -> None:
    """Answer messages until they end."""
    told: dict[str, Any] = json.loads(read_message(messages) or b"", object_hook=_tuples)
    tables = tuple(KernelTable(**table) for table in told["cost"].pop("tables"))
    stage, cost = Stage(**told["stage"]), GroupCost(**told["cost"], tables=tables)
    while (message := read_message(messages)) is not None:
        asked = json.loads(message)
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
        write_message(answers, json.dumps({"plan": told_plan, **fields}).encode())


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in fields.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    serve(*pipes())
