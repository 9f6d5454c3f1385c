"""Planning in a process of its own, so that it leaves the interpreter to the thread that launches kernels.

With fixed groups the child gets the planner as it stands, and sends iterations as fast as the pipe takes them. A thread
of the parent takes them a micro-batch at a time, so that no call holds the interpreter for long. With dynamic groups
rank 0's child places one iteration's documents after the other, as it is asked. Nothing here decides anything.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from wlb_megatron.child import Child
from wlb_megatron.config import WlbConfig
from wlb_megatron.dynamic.plan import StepPlan
from wlb_megatron.dynamic.plan_step import LATE, Outcome
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.micro_batches.planning import (
    PlannedIteration,
    PlannedMicroBatch,
    ShardSettings,
    plan_iterations,
)

LEAST_DOCUMENTS = 1000
"""Documents of an iteration from which a process plans. Fewer are planned in some 15 ms, which a step does not feel."""


def in_a_process(planner: Planner, config: WlbConfig, mean_length: float) -> bool:
    """Whether a process plans. mean_length: tokens of a piece.

    Not with dynamic groups, whose ranks talk to each other as they plan.
    """
    if config.cp_mode == "dynamic" or config.plan_process == "never":
        return False
    return config.plan_process == "always" or planner.global_tokens / mean_length >= LEAST_DOCUMENTS


def plan_in_a_process(
    planner: Planner,
    settings: ShardSettings,
    *,
    keeps_plans: bool = False,
    started: Callable[[Child], None] = lambda _: None,
) -> Iterator[PlannedIteration]:
    """What `plan_iterations` gives, made by a child; this process's planner stays as it is.

    keeps_plans: iterations come with the plan of all data-parallel ranks. started: gets the child. Raises what planning
    raises, and WlbError if the child ends before the plans do. If none can be started, this process plans, after a
    warning.
    """
    try:
        child = Child(partial(_planned_parts, planner, settings, keeps_plans))
    except OSError as error:
        print(
            f"WARNING: wlb_megatron: no process can be started to plan ({error}): a thread does", flush=True
        )
        yield from plan_iterations(planner, settings)
        return
    atexit.register(child.kill)
    started(child)
    answers = iter(child.receive, None)
    try:
        for iteration, count in answers:
            yield replace(iteration, micro_batches=tuple(islice(answers, count)))
    except OSError as error:
        raise _silent(error) from None
    except RuntimeError as error:
        raise RuntimeError(f"wlb_megatron: planning failed\n{error}") from None
    finally:
        child.kill()
        atexit.unregister(child.kill)


def _planned_parts(
    planner: Planner, settings: ShardSettings, keeps_plans: bool, _: Iterator[Any]
) -> Iterator[tuple[PlannedIteration, int] | PlannedMicroBatch]:
    """The child's work: each iteration with the number of its micro-batches, which follow one by one."""
    for iteration in plan_iterations(planner, settings):
        state = partial(json.loads, json.dumps(iteration.state()))
        plan = iteration.plan if keeps_plans else None
        yield replace(iteration, micro_batches=(), state=state, plan=plan), len(iteration.micro_batches)
        yield from iteration.micro_batches


def check_alive(children: Sequence[Child]) -> None:
    """Raise what the planning thread raises only once it has taken all plans from the pipe, often hundreds."""
    for child in children:
        if (ending := child.failure()) is not None:
            raise _silent(ending)


def _silent(why: object) -> WlbError:
    return WlbError(
        f"the process that plans iterations does not answer ({why}): see whether the node ran out of memory, and start "
        "again from the last checkpoint"
    )


class GroupPlanner:
    """Rank 0's planner of dynamic groups: a child, or this process once there is none any more."""

    def __init__(self, plan: Callable[..., Outcome]) -> None:
        """plan: dynamic.plan_step.plan_step with what stays the same in all iterations."""
        self._plan = plan
        self._asked = False  # the child has not answered yet
        self._child: Child | None = None
        try:
            self._child = Child(partial(_outcomes, plan))
        except OSError as error:
            self._give_up(error)

    def plan(
        self,
        tokens: list[int],
        fixed: StepPlan,
        seconds: float,
        budget: float = math.inf,
        hurry: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """See dynamic.plan_step.plan_step. The fixed groups, marked late, if `hurry` says so before the child has
        answered. Planned here, greedily, if there is no child."""
        request = {"tokens": tokens, "fixed": fixed, "budget": budget}
        try:
            if self._child is not None:
                if self._asked and self._child.receive(hurry) is None:
                    return late(fixed)  # still busy with an earlier iteration, for which it is too late
                self._child.send({**request, "seconds": seconds})
                self._asked = True
                outcome: Outcome | None = self._child.receive(hurry)
                self._asked = outcome is None
                return late(fixed) if outcome is None else outcome
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        return self._plan(**request)

    def _give_up(self, error: Exception) -> None:
        if self._child is not None:
            self._child.kill()
        self._child, self._asked = None, False
        print(
            f"WARNING: wlb_megatron: the planning process does not answer ({error}); groups are planned without a "
            "solver, by the training process",
            flush=True,
        )


def _outcomes(plan: Callable[..., Outcome], requests: Iterator[dict[str, Any]]) -> Iterator[Outcome]:
    """The child's work: an outcome for each request."""
    return (plan(**request) for request in requests)


def late(fixed: StepPlan) -> Outcome:
    """The groups that are always ready; nothing is predicted of them."""
    return Outcome(fixed, LATE, priced=0, bound=0, predicted=1, fixed=1)
