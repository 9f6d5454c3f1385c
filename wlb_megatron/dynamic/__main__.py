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


def settings_message(stage: Stage, cost: GroupCost, sharding: str, pipeline: int, multiple: int) -> str:
    """The first message."""
    others = {"sharding": sharding, "pipeline": pipeline, "multiple": multiple}
    return json.dumps({"stage": asdict(stage), "cost": asdict(cost), **others})


def iteration_message(tokens: list[int], fixed: StepPlan, seconds: float, budget: float | None) -> str:
    """The message of one iteration."""
    message = {"tokens": tokens, "fixed": fixed.encode().tolist(), "seconds": seconds, "budget": budget}
    return json.dumps(message)


def read_outcome(answer: str) -> Outcome:
    """The answer to an iteration's message. Raises ValueError for what is no answer."""
    outcome = json.loads(answer)
    return Outcome(**{**outcome, "plan": StepPlan.decode(outcome["plan"])})


def serve(messages: BinaryIO, answers: BinaryIO) -> None:
    """Answer messages until they end."""
    job: dict[str, Any] = json.loads(read_message(messages) or b"", object_hook=_tuples)
    tables = tuple(KernelTable(**table) for table in job["cost"].pop("tables"))
    stage, cost = Stage(**job["stage"]), GroupCost(**job["cost"], tables=tables)
    while (message := read_message(messages)) is not None:
        step = json.loads(message)
        outcome = plan_step(
            step["tokens"],
            stage,
            cost,
            fixed=StepPlan.decode(step["fixed"]),
            seconds=step["seconds"],
            sharding=job["sharding"],
            pipeline=job["pipeline"],
            multiple=job["multiple"],
            budget=math.inf if step["budget"] is None else step["budget"],
        )
        encoded = outcome.plan.encode().tolist()
        fields = {
            name: getattr(outcome, name) for name in ("source", "priced", "bound", "predicted", "fixed")
        }
        write_message(answers, json.dumps({"plan": encoded, **fields}).encode())


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in fields.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    serve(*pipes())
