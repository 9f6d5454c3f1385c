"""The plan of an iteration over the ranks of a stage: the best of greedy placements, or the fixed groups."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb_megatron.dynamic.placement import Placement, Problem, improve_placement
from wlb_megatron.dynamic.plan import STEP_NS, Group, GroupCost, Stage, StepPlan, finish_times, in_multiples
from wlb_megatron.sharding.cut import predict_all, shard_all
from wlb_megatron.sharding.slots import padded

MORE_STEPS = 5
"""Numbers of micro-steps tried: the least that is possible, and four more."""

CLOSE = 1.01
"""A plan this near to the bound is not improved any further."""

FEW = 64
"""So few documents are worth improving every placement that was tried, not the best alone."""

GREEDY, FIXED, LATE = "greedy", "fixed", "late"
"""Whose a plan is; late: fixed groups, as training was about to wait for another."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """plan, and whose it is (greedy, fixed, late).

    With all groups sharded as the executor will, a layer takes `predicted` nanoseconds with the plan chosen and `fixed`
    with the fixed groups (0 without any to compare with).
    """

    plan: StepPlan
    source: str
    predicted: int
    fixed: int


def plan_step(
    tokens: Sequence[int],
    stage: Stage,
    cost: GroupCost,
    *,
    fixed: StepPlan | None = None,
    pipeline: int = 1,
    multiple: int = 1,
    budget: float = math.inf,
) -> Outcome:
    """Plan one iteration's documents (tokens of each).

    Raises ValueError where a document fits no group.

    Args:
        fixed: groups of the fixed context-parallel size, which are kept where they are predicted to be as fast.
        pipeline: stages, which all use the same groups; micro-steps of a half and a quarter of the tokens are then
            tried as well.
        multiple: the number of micro-steps is a multiple of it, as interleaved schedules take them.
        budget: seconds after which nothing more is tried than one placement: the clock decides then, so that one rank
            must plan for all.
    """
    deadline = time.monotonic() + budget
    prices, opening = cost.prices(tokens).tolist(), cost.opening()
    outcomes: list[Outcome] = []
    for parts in (1,) if pipeline == 1 else (1, 2, 4):
        if outcomes and time.monotonic() > deadline:
            break
        problem = Problem(stage.divided(parts), list(tokens), prices, opening)
        plan = in_multiples(place(problem, deadline).plan(), tokens, multiple)
        outcomes.append(Outcome(plan, GREEDY, predicted_time(plan, tokens, cost, pipeline), 0))
    best_outcome = min(outcomes, key=lambda outcome: outcome.predicted)
    if fixed is None:
        return best_outcome
    fixed_ns = predicted_time(fixed, tokens, cost, pipeline)
    if fixed_ns <= best_outcome.predicted:
        return Outcome(fixed, FIXED, fixed_ns, fixed_ns)
    return replace(best_outcome, fixed=fixed_ns)


def outcomes(plan: Callable[..., Outcome], requests: Iterator[dict[str, Any]]) -> Iterator[Outcome]:
    """The work of a process that plans: an outcome for each request. plan: plan_step with what stays the same."""
    return (plan(**request) for request in requests)


def place(problem: Problem, deadline: float = math.inf) -> Placement:
    """The best greedy placement over numbers of micro-steps (the most allowed), improved; one, if that takes until then
    (of time.monotonic)."""
    placements: list[Placement] = []
    max_steps = problem.least_steps()
    shares: tuple[float, ...] = SHARES
    while len(placements) < MORE_STEPS and not (placements and time.monotonic() > deadline):
        found_placements = []
        for share in shares:
            placement = place_greedily(problem, max_steps, share)
            if placement is not None:
                if len(problem.tokens) <= FEW:
                    improve_placement(placement, deadline)
                found_placements.append((placement.time(), share, placement))
                if placement.time() <= CLOSE * problem.bound or time.monotonic() > deadline:
                    break
        max_steps += 1
        if not found_placements:
            continue
        found_placements.sort(key=lambda item: item[:2])
        best_placement = found_placements[0][2]
        placements.append(best_placement)
        if int(best_placement.steps.max()) < max_steps - 1 or best_placement.time() <= CLOSE * problem.bound:
            break  # more micro-steps than it uses change nothing
        if len(found_placements) == len(shares):
            # None lacked room: what served best serves for one more.
            shares = tuple(share for _, share, _ in found_placements[:2])
    best_placement = min(placements, key=Placement.time)
    if best_placement.time() > CLOSE * problem.bound:
        improve_placement(best_placement, deadline)
    return best_placement


SHARES = (1.0, 1.15, 1.4, 0.75, 0.5, 0.3, 0.15)
"""Of the bound, what one document may cost a rank: tried one after another, the best plan counts."""


def place_greedily(problem: Problem, max_steps: int, share: float) -> Placement | None:
    """A placement in at most `max_steps` micro-steps, or None if the documents did not fit.

    Each document takes the smallest block that holds it and on which it costs at most `share` of the bound (or the
    one on which it costs least). Larger blocks are filled first, each with the longest documents first, so that
    when a size's turn comes all ranks of a block are equally loaded.
    """
    placement = Placement(problem, max_steps)
    patience = 16 + problem.stage.ranks // 16
    for level, documents in reversed(list(enumerate(_by_level(problem, int(share * problem.bound))))):
        queue = _Blocks(placement, level)
        for document in documents:
            if queue.place(document):
                continue
            patience -= 1
            # No block of the wanted size has room: a larger one.
            larger = range(level + 1, len(problem.stage.sizes))
            if patience < 0 or not any(_Blocks(placement, above).place(document) for above in larger):
                return None
            queue = _Blocks(placement, level)
    return placement


def _by_level(problem: Problem, max_price: int) -> list[list[int]]:
    """Documents of each size of block, longest first."""
    prices, fits = problem.price_array, problem.fitting
    quick = fits & (prices <= max_price)
    cheapest = np.where(fits, prices, np.iinfo(np.int64).max).argmin(axis=0)
    level_of = np.where(quick.any(axis=0), quick.argmax(axis=0), cheapest)
    order = np.argsort(-np.array(problem.tokens), kind="stable")
    return [order[level_of[order] == level].tolist() for level in range(len(problem.stage.sizes))]


class _Blocks:
    """The blocks of one size by load. One that lacked room waits for a document that it holds."""

    def __init__(self, placement: Placement, level: int) -> None:
        self._placement, self._level = placement, level
        size = placement.problem.stage.sizes[level]
        loads = placement.load.reshape(-1, size).max(axis=1).tolist()
        self._open = [(load, block) for block, load in enumerate(loads)]
        heapq.heapify(self._open)
        self._full: list[tuple[int, int, int]] = []  # (-room, load, block)

    def place(self, document: int) -> bool:
        """On the least loaded block with room; False if none has."""
        placement, level = self._placement, self._level
        tokens = placement.problem.tokens[document]
        while self._full and -self._full[0][0] >= tokens:
            heapq.heappush(self._open, heapq.heappop(self._full)[1:])
        while self._open:
            load, block = heapq.heappop(self._open)
            bin_index = placement.find_room(level, block, tokens)
            if bin_index >= 0:
                heapq.heappush(self._open, (load + placement.put(level, block, bin_index, document), block))
                return True
            room = max((bin_.room for bin_ in placement.bins[level][block]), default=-1)
            heapq.heappush(self._full, (-room, load, block))
        return False


def predicted_time(plan: StepPlan, tokens: Sequence[int], cost: GroupCost, pipeline: int = 1) -> int:
    """Nanoseconds of a layer until the last rank is done. `tokens` has each document's. The stages of `pipeline` fill
    and drain at the pace of the largest micro-step."""
    times = group_times([group for groups in plan.micro_steps for group in groups], tokens, cost)
    flat = iter(times)
    by_step = [[next(flat) for _ in groups] for groups in plan.micro_steps]
    return int(finish_times(plan, by_step).max()) + (pipeline - 1) * max(times, default=0)


def group_times(groups: Sequence[Group], tokens: Sequence[int], cost: GroupCost) -> list[int]:
    """Nanoseconds of each group's micro-step: its slowest rank's attention, its tokens, and what any takes."""
    times = [0] * len(groups)
    for size, table in zip(cost.sizes, cost.tables, strict=True):
        of_size = [index for index, group in enumerate(groups) if group.size == size]
        if not of_size:
            continue
        lengths = [[tokens[d] for d in groups[index].documents] for index in of_size]
        plans = shard_all([padded(row, size) for row in lengths], size, cost.sharding, table)
        attention = predict_all(plans, table).max(axis=1).tolist()
        for index, plan, ns in zip(of_size, plans, attention, strict=True):
            times[index] = ns + round(cost.token_ns * plan.tokens / size) + STEP_NS
    return times
