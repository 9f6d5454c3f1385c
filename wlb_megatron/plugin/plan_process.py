"""The sender's planner: a child process, or this one if the child is gone."""

from __future__ import annotations

import math
import select
import subprocess
import sys
import time
from collections.abc import Callable

from wlb_megatron.dynamic.__main__ import read_outcome, tell_iteration, tell_settings
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.planner import LATE, Outcome, plan_step

PATIENCE = 300
"""Seconds after which a child that neither answers nor ends (stopped, starved) is given up."""

_SLICE_MS = 20
"""How often is looked whether training has begun to wait."""


class PlanProcess:
    """Plans iterations in a child that lives as long as its input is open, which is as long as this process.

    pipeline, multiple: see dynamic.planner.plan_step.
    """

    def __init__(
        self, stage: Stage, cost: GroupCost, sharding: str, pipeline: int = 1, multiple: int = 1
    ) -> None:
        self._stage, self._cost = stage, cost
        self._sharding, self._pipeline, self._multiple = sharding, pipeline, multiple
        self._child: subprocess.Popen[str] | None = None
        self._asked: float | None = None  # when the child was asked what it has not answered
        self._broken = False

    def start(self) -> None:
        """Start the child, ahead of the first plan. Says so where it cannot."""
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "wlb_megatron.dynamic"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._write(
                tell_settings(self._stage, self._cost, self._sharding, self._pipeline, self._multiple)
            )
        except OSError as error:
            self._give_up(error)

    def plan(
        self,
        tokens: list[int],
        fixed: StepPlan,
        seconds: float,
        budget: float | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """See dynamic.planner.plan_step; budget None: without one. The fixed groups, marked late, where `hurry` says
        so before the child has answered. Planned here, greedily, where there is no child any more."""
        if self._child is None and not self._broken:
            self.start()
        try:
            if not self._broken and self._asked is not None and self._answer(hurry) is None:
                return late(fixed)  # still busy with an earlier iteration, for which it is too late
            if not self._broken:
                self._write(tell_iteration(tokens, fixed, seconds, budget))
                self._asked = time.monotonic()
                line = self._answer(hurry)
                return late(fixed) if line is None else read_outcome(line)
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

    def _answer(self, hurry: Callable[[], bool]) -> str | None:
        """The child's answer to what it was asked, or None where there is none yet and `hurry` says so."""
        assert self._child is not None and self._child.stdout is not None and self._asked is not None
        answer = (
            select.poll()
        )  # select.select takes no file above 1,023, and connections of all ranks are open
        answer.register(self._child.stdout, select.POLLIN)
        while not answer.poll(_SLICE_MS):
            if time.monotonic() - self._asked > PATIENCE:
                raise TimeoutError(f"no plan in {PATIENCE} s")
            if hurry():
                return None
        self._asked = None
        return self._child.stdout.readline()

    def _write(self, line: str) -> None:
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _give_up(self, error: Exception) -> None:
        self._broken = True
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
