"""The sender's planner: a child process, or this one if the child is gone."""

from __future__ import annotations

import select
import subprocess
import sys

from wlb_megatron.dynamic.__main__ import read_outcome, tell_iteration, tell_settings
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.planner import Outcome, plan_step

PATIENCE = 300
"""Seconds after which a child that neither answers nor ends (stopped, starved) is given up: all ranks wait for it."""


class PlanProcess:
    """Plans iterations in a child that lives as long as its input is open, which is as long as this process."""

    def __init__(self, stage: Stage, cost: GroupCost, sharding: str, pipeline: int = 1) -> None:
        self._stage, self._cost, self._sharding, self._pipeline = stage, cost, sharding, pipeline
        self._child: subprocess.Popen[str] | None = None
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
            self._write(tell_settings(self._stage, self._cost, self._sharding, self._pipeline))
        except OSError as error:
            self._give_up(error)

    def plan(self, tokens: list[int], fixed: StepPlan, seconds: float) -> Outcome:
        """See dynamic.planner.plan_step. Planned here, greedily, where the child does not answer."""
        if self._child is None and not self._broken:
            self.start()
        if not self._broken:
            try:
                return read_outcome(self._ask(tell_iteration(tokens, fixed, seconds)))
            except (OSError, ValueError) as error:
                self._give_up(error)
        return plan_step(
            tokens, self._stage, self._cost, fixed=fixed, sharding=self._sharding, pipeline=self._pipeline
        )

    def _ask(self, line: str) -> str:
        self._write(line)
        assert self._child is not None and self._child.stdout is not None
        answer = select.poll()  # select.select takes no file above 1,023, and sockets to all ranks are open
        answer.register(self._child.stdout, select.POLLIN)
        if not answer.poll(PATIENCE * 1000):
            raise TimeoutError(f"no plan in {PATIENCE} s")
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
