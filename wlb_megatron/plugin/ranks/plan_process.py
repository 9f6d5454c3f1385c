"""The sender's planner: a child process, or this one if the child is gone."""

from __future__ import annotations

import math
from collections.abc import Callable

from wlb_megatron.child import Child
from wlb_megatron.dynamic.__main__ import iteration_message, read_outcome, settings_message
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.plan_step import LATE, Outcome, plan_step


class PlanProcess:
    """Plans iterations in a child that lives as long as its input is open, which is as long as this process.

    pipeline, multiple: see dynamic.plan_step.plan_step.
    """

    def __init__(
        self, stage: Stage, cost: GroupCost, sharding: str, pipeline: int = 1, multiple: int = 1
    ) -> None:
        self._stage, self._cost = stage, cost
        self._sharding, self._pipeline, self._multiple = sharding, pipeline, multiple
        self._child: Child | None = None
        self._asked = False  # the child has not answered yet
        self._broken = False

    def start(self) -> None:
        """Start the child, ahead of the first plan. Says so where it cannot."""
        try:
            self._child = Child("wlb_megatron.dynamic")
        except OSError as error:
            self._give_up(error)
            return
        message = settings_message(self._stage, self._cost, self._sharding, self._pipeline, self._multiple)
        self._child.send(message.encode())

    def plan(
        self,
        tokens: list[int],
        fixed: StepPlan,
        seconds: float,
        budget: float | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """See dynamic.plan_step.plan_step; budget None: without one. The fixed groups, marked late, where `hurry` says
        so before the child has answered. Planned here, greedily, where there is no child any more."""
        if self._child is None and not self._broken:
            self.start()
        try:
            if self._child is not None and not self._broken:
                if self._asked and self._child.receive(hurry) is None:
                    return late(fixed)  # still busy with an earlier iteration, for which it is too late
                self._child.send(iteration_message(tokens, fixed, seconds, budget).encode())
                self._asked = True
                answer = self._child.receive(hurry)
                self._asked = answer is None
                return late(fixed) if answer is None else read_outcome(answer.decode())
        except (OSError, ValueError) as error:
            self._give_up(error)
        return plan_step(
            tokens,
            self._stage,
            self._cost,
            fixed=fixed,
            sharding=self._sharding,
            pipeline=self._pipeline,
            multiple=self._multiple,
            budget=math.inf if budget is None else budget,
        )

    def _give_up(self, error: Exception) -> None:
        self._broken, self._asked = True, False
        if self._child is not None:
            self._child.kill()
        print(
            f"WARNING: wlb_megatron: the planning process does not answer ({error}); groups are planned without a "
            "solver, by the training process",
            flush=True,
        )


def late(fixed: StepPlan) -> Outcome:
    """The groups that are always ready; nothing is predicted of them."""
    return Outcome(fixed, LATE, priced=0, bound=0, predicted=1, fixed=1)
