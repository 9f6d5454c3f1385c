"""The sender's planner: a child process, or this one if the child is gone."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

from wlb_megatron.dynamic.__main__ import read_outcome, tell_iteration, tell_settings
from wlb_megatron.dynamic.blocks import Stage
from wlb_megatron.dynamic.cost import GroupCost
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.planner import LATE, Outcome, plan_step

PATIENCE = 300
"""Seconds after which a child that neither reads, answers nor ends (stopped, starved) is given up."""

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
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: float | None = None  # when the child was asked what it has not answered
        self._unsent = self._received = b""  # of the lines to it, and of its answer
        self._broken = False

    def start(self) -> None:
        """Start the child, ahead of the first plan. Says so where it cannot."""
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "wlb_megatron.dynamic"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            self._give_up(error)
            return
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)  # a pipe that nobody reads takes 64 KiB
        self._tell(tell_settings(self._stage, self._cost, self._sharding, self._pipeline, self._multiple))

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
                self._tell(tell_iteration(tokens, fixed, seconds, budget))
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

    def _tell(self, line: str) -> None:
        """Have a line sent, as soon as an answer is asked for."""
        self._unsent += line.encode() + b"\n"

    def _answer(self, hurry: Callable[[], bool]) -> str | None:
        """The child's answer to what it was asked, or None where there is none yet and `hurry` says so."""
        assert self._child is not None and self._child.stdin is not None and self._child.stdout is not None
        while self._unsent:
            if not self._ready(self._child.stdin, select.POLLOUT, hurry):
                return None
            self._unsent = self._unsent[self._child.stdin.write(self._unsent) or 0 :]
        while not self._received.endswith(b"\n"):
            if not self._ready(self._child.stdout, select.POLLIN, hurry):
                return None
            part = self._child.stdout.read(1 << 16)  # what is there, at most so much
            if not part:
                raise OSError("it has ended")
            self._received += part
        line, self._received, self._asked = self._received.decode(), b"", None
        return line

    def _ready(self, pipe: IO[bytes], event: int, hurry: Callable[[], bool]) -> bool:
        """Wait until the pipe takes or has something; False where `hurry` says so before."""
        assert self._asked is not None
        waiting = select.poll()  # select.select takes no file above 1,023: connections of all ranks are open
        waiting.register(pipe, event)
        while not waiting.poll(_SLICE_MS):
            if time.monotonic() - self._asked > PATIENCE:
                raise TimeoutError(f"no plan in {PATIENCE} s")
            if hurry():
                return False
        return True

    def _give_up(self, error: Exception) -> None:
        self._broken, self._asked = True, None
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
