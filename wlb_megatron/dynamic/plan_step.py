"""The plan of an iteration over the ranks of a stage: the best of greedy placements, a solver's, and fixed groups."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.placement import Placement, Problem, improve_placement
from wlb_megatron.dynamic.plan import Group, GroupCost, Stage, StepPlan, finish_times, in_multiples
from wlb_megatron.sharding.cut import predict_all, shard_all
from wlb_megatron.sharding.slots import padded

IntArray = npt.NDArray[np.int64]

MORE_STEPS = 5
"""Numbers of micro-steps tried: the least that is possible, and four more."""

BUCKETS = 16
THREADS = 2
CLOSE = 1.01
"""A plan this near to the bound is not improved any further."""

NEAR = 1.03
"""A greedy plan this near to the bound is not worth a solver's time."""

FEW = 64
"""So few documents are worth improving every placement that was tried, not the best alone."""

GREEDY, SOLVER, FIXED, LATE = "greedy", "solver", "fixed", "late"
"""Whose a plan is; late: fixed groups, as training was about to wait for another."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """plan, what it is predicted to take, and whose it is (greedy, solver, fixed, late). Nanoseconds of a layer.

    No plan of groups goes below `bound` by the planner's prices. With all groups sharded as the executor will, the
    plan chosen takes `predicted` and the fixed groups `fixed` (0 without any to compare with).
    """

    plan: StepPlan
    source: str
    priced: int
    bound: int
    predicted: int
    fixed: int


def plan_step(
    tokens: Sequence[int],
    stage: Stage,
    cost: GroupCost,
    *,
    fixed: StepPlan | None = None,
    seconds: float = 0.0,
    pipeline: int = 1,
    multiple: int = 1,
    budget: float = math.inf,
) -> Outcome:
    """Plan one iteration's documents (tokens of each).

    Raises ValueError where a document fits no group.

    Args:
        fixed: groups of the fixed context-parallel size, which are kept where they are predicted to be as fast.
        seconds: time for the solver, in all; 0 leaves it out.
        pipeline: stages, which all use the same groups; micro-steps of a half and a quarter of the tokens are then
            tried as well.
        multiple: the number of micro-steps is a multiple of it, as interleaved schedules take them.
        budget: seconds after which nothing more is tried than one placement: the clock decides then, so that one rank
            must plan for all.
    """
    deadline = time.monotonic() + budget
    prices, opening = cost.prices(tokens).tolist(), cost.opening()
    stages = [stage.divided(parts) for parts in ((1,) if pipeline == 1 else (1, 2, 4))]
    problems = [Problem(divided, list(tokens), prices, opening, cost.step_ns) for divided in stages]
    outcomes: list[Outcome] = []
    for problem in problems:
        if outcomes and time.monotonic() > deadline:
            break
        placement, source = _place(problem, seconds / len(stages), deadline)
        plan = in_multiples(placement.plan(), tokens, multiple)
        predicted_ns = predicted_time(plan, tokens, cost, pipeline)
        outcomes.append(Outcome(plan, source, placement.time(), problems[0].bound, predicted_ns, 0))
    best_outcome = min(outcomes, key=lambda outcome: outcome.predicted)
    if fixed is None:
        return best_outcome
    fixed_ns = predicted_time(fixed, tokens, cost, pipeline)
    if fixed_ns <= best_outcome.predicted:
        return replace(best_outcome, plan=fixed, source=FIXED, predicted=fixed_ns, fixed=fixed_ns)
    return replace(best_outcome, fixed=fixed_ns)


def outcomes(plan: Callable[..., Outcome], requests: Iterator[dict[str, Any]]) -> Iterator[Outcome]:
    """The work of a process that plans: an outcome for each request. plan: plan_step with what stays the same."""
    return (plan(**request) for request in requests)


def _place(problem: Problem, seconds: float, deadline: float) -> tuple[Placement, str]:
    greedy = place_all_greedily(problem, deadline)
    best_placement = min(greedy.values(), key=Placement.time)
    if best_placement.time() > CLOSE * problem.bound:
        improve_placement(best_placement, deadline)
    seconds = min(seconds, deadline - time.monotonic())
    if seconds <= 0 or best_placement.time() <= NEAR * problem.bound:
        return best_placement, GREEDY
    solved = _place_by_solver(problem, greedy, seconds)
    if solved is not None and solved.time() < best_placement.time():
        return solved, SOLVER
    return best_placement, GREEDY


def place_all_greedily(problem: Problem, deadline: float = math.inf) -> dict[int, Placement]:
    """The best greedy placement of each number of micro-steps (the most allowed) at which one was found; one, if that
    takes until then (of time.monotonic)."""
    placements: dict[int, Placement] = {}
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
        placements[max_steps - 1] = best_placement
        if int(best_placement.steps.max()) < max_steps - 1 or best_placement.time() <= CLOSE * problem.bound:
            break  # more micro-steps than it uses change nothing
        if len(found_placements) == len(shares):
            # None lacked room: what served best serves for one more.
            shares = tuple(share for _, share, _ in found_placements[:2])
    return placements


def _place_by_solver(problem: Problem, greedy: dict[int, Placement], seconds: float) -> Placement | None:
    """The best of the solver's placements over the numbers of micro-steps, solved side by side."""
    tokens = np.array(problem.tokens)
    buckets = bucket(tokens, len(tokens) if len(tokens) <= 2 * BUCKETS else BUCKETS)
    blocks = sum(problem.stage.ranks // size for size in problem.stage.sizes)
    if blocks * len(buckets.members) > LARGEST:
        return None
    # The micro-steps below the first that greedy managed are tried too: a solver packs tighter.
    counts = sorted({*greedy, max(problem.least_steps(), min(greedy) - 1)})
    seconds_each = seconds * min(THREADS, len(counts)) / len(counts)
    with ThreadPoolExecutor(THREADS) as pool:
        hints = map(greedy.get, counts)
        solved = list(pool.map(partial(place_exactly, problem, buckets, seconds=seconds_each), counts, hints))
    placements = [solution for solution in solved if solution is not None]
    for placement in placements:
        improve_placement(placement)
    return min(placements, key=Placement.time, default=None)


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
    return int(finish_times(plan, by_step, cost.step_ns).max()) + (pipeline - 1) * max(times, default=0)


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
            times[index] = ns + round(cost.token_ns * plan.tokens / size) + cost.step_ns
    return times


LARGEST = 12_000
"""Counts (buckets x blocks) above which the solver finds nothing in the time that a step leaves it."""

_UNIT = 1000
"""Nanoseconds of the solver's unit."""


def place_exactly(
    problem: Problem, buckets: Buckets, max_steps: int, hint: Placement | None, seconds: float
) -> Placement | None:
    """The same placement by a solver (CP-SAT): counts of each bucket's documents on each block, from a warm start.

    It is the best found in at most `max_steps` micro-steps and about `seconds` (deterministic time of one worker: the
    same answer everywhere); None if none was found, or ortools is not installed.

    Blocks of one size are alike and documents of one bucket too, so a plan is a table of counts (FlexSP's MILP, over
    nested blocks). A block's tokens must fit its micro-steps together; that they also fit one by one is seen when the
    documents are dealt out, and the answer is dropped if not.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    stage, counts = problem.stage, [len(members) for members in buckets.members]
    longest_tokens = [problem.tokens[members[0]] for members in buckets.members]
    model = cp_model.CpModel()
    placed: list[list[dict[int, cp_model.IntVar]]] = []
    steps: list[list[cp_model.IntVar]] = []
    hinted = _counts(hint, buckets) if hint is not None else None
    for level, size in enumerate(stage.sizes):
        blocks = range(stage.ranks // size)
        fitting_buckets = [
            k for k, most_tokens in enumerate(longest_tokens) if most_tokens <= stage.tokens[level]
        ]
        placed.append([{k: model.new_int_var(0, counts[k], "") for k in fitting_buckets} for _ in blocks])
        steps.append([model.new_int_var(0, max_steps, "") for _ in blocks])
        for block in blocks:
            row, open_steps = placed[level][block], steps[level][block]
            tokens = sum(int(buckets.tokens[k]) * variable for k, variable in row.items())
            model.add(tokens <= stage.tokens[level] * open_steps)
            big = [row[k] for k in fitting_buckets if 2 * buckets.tokens[k] > stage.tokens[level]]
            if big:  # no two of them share a micro-step
                model.add(sum(big) <= open_steps)
            if hinted is not None and hint is not None:
                model.add_hint(open_steps, len(hint.bins[level][block]))
                for k, variable in row.items():
                    model.add_hint(variable, hinted[level][block].get(k, 0))
    for k, count in enumerate(counts):
        model.add(sum(row[k] for blocks in placed for row in blocks if k in row) == count)
    unit = [
        [sum(prices[d] for d in members) // len(members) // _UNIT for members in buckets.members]
        for prices in problem.prices
    ]
    most_load = model.new_int_var(0, sum(c * u for c, u in zip(counts, unit[0], strict=True)) + 10**6, "")
    for rank in range(stage.ranks):
        path = [(level, rank // size) for level, size in enumerate(stage.sizes)]
        model.add(sum(steps[level][block] for level, block in path) <= max_steps)
        load = sum(
            sum(unit[level][k] * variable for k, variable in placed[level][block].items())
            + -(-problem.opening[level] // _UNIT) * steps[level][block]
            for level, block in path
        )
        model.add(load <= most_load)
    model.minimize(most_load)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = seconds  # should the machine be busy: one rank plans for all
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    solution = [[{k: solver.value(v) for k, v in row.items()} for row in blocks] for blocks in placed]
    return _deal(problem, buckets, max_steps, solution)


def _counts(placement: Placement, buckets: Buckets) -> list[list[dict[int, int]]]:
    bucket_of = {d: k for k, members in enumerate(buckets.members) for d in members}
    return [
        [
            dict(Counter(bucket_of[document] for bin_ in bins for document in bin_.documents))
            for bins in blocks
        ]
        for blocks in placement.bins
    ]


def _deal(
    problem: Problem, buckets: Buckets, max_steps: int, solution: list[list[dict[int, int]]]
) -> Placement | None:
    """Documents to blocks by these counts, longest buckets first; of a bucket the longest to the least loaded."""
    placement = Placement(problem, max_steps)
    for k in reversed(range(len(buckets.members))):
        places = [
            (level, block)
            for level in reversed(range(len(solution)))
            for block, row in enumerate(solution[level])
            for _ in range(row.get(k, 0))
        ]
        loads = [int(placement.load[placement.ranks(*place)].max()) for place in places]
        order = sorted(range(len(places)), key=lambda slot: (-places[slot][0], loads[slot], places[slot][1]))
        for document, slot in zip(buckets.members[k], order, strict=True):
            level, block = places[slot]
            bin_ = placement.find_room(level, block, problem.tokens[document])
            if bin_ < 0:
                return None
            placement.put(level, block, bin_, document)
    return placement


@dataclass(frozen=True)
class Buckets:
    """Documents gathered by length, so that a solver counts them instead of naming them (FlexSP).

    Each counts as the mean of its bucket, rounded up: their tokens are right in sum.

    tokens: int64[k], ascending. members: indices of the documents of each bucket, longest first.
    """

    tokens: IntArray
    members: tuple[tuple[int, ...], ...]


def bucket(lengths: npt.ArrayLike, count: int = 16) -> Buckets:
    """At most `count` buckets, by dynamic programming, with the least sum of (longest of the bucket - length).

    FlexSP (arXiv 2412.01523) bounds its buckets so, 16 for each micro-batch of consecutive documents of a sorted
    batch, and counts the longest. Lengths 1 2 9 10, two buckets: [1 2] [9 10], which is 2 tokens of 22 too many,
    counted as 2 and 10.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    values, occurrences = _thin(*np.unique(tokens, return_counts=True))
    n = len(values)
    running_count, total = (
        np.concatenate(([0], np.cumsum(row))) for row in (occurrences, values * occurrences)
    )
    best_error = np.full(n + 1, np.iinfo(np.int64).max // 2)
    best_error[0] = 0
    begins = []
    for _ in range(min(count, n)):
        # new[j]: least error of values 0 .. j - 1 in one bucket more, whose longest is values[j - 1].
        new_error, begin = best_error.copy(), np.arange(n + 1)
        for j in range(1, n + 1):
            error = (
                best_error[:j]
                + values[j - 1] * (running_count[j] - running_count[:j])
                - (total[j] - total[:j])
            )
            best_index = int(np.argmin(error))
            if error[best_index] < new_error[j]:
                new_error[j], begin[j] = error[best_index], best_index
        best_error = new_error
        begins.append(begin)
    cuts, best_index = [n], n
    for begin in reversed(begins):
        best_index = int(begin[best_index])
        if best_index < cuts[-1]:
            cuts.append(best_index)
    cuts.reverse()
    where = np.searchsorted(values[np.array(cuts[1:]) - 1], tokens)
    order = np.lexsort((np.arange(len(tokens)), -tokens))
    members = tuple(tuple(order[where[order] == k].tolist()) for k in range(len(cuts) - 1))
    mean_tokens = np.array(
        [-(-int(tokens[list(bucket_members)].sum()) // len(bucket_members)) for bucket_members in members]
    )
    return Buckets(mean_tokens, members)


_FINE = 512
"""Lengths told apart at most; more are first rounded up to quantiles of the tokens."""


def _thin(values: IntArray, occurrences: IntArray) -> tuple[IntArray, IntArray]:
    """At most about _FINE of the values, each of the others counted as the next larger one kept."""
    if len(values) <= _FINE:
        return values, occurrences
    # Half of those kept are spread over the values, half over the tokens: both tails are told apart.
    share = np.cumsum(values * occurrences)
    marks = np.linspace(0, share[-1], _FINE // 2)
    kept_index = np.union1d(
        np.searchsorted(share, marks), np.linspace(0, len(values) - 1, _FINE // 2).astype(int)
    )
    kept_index = np.union1d(np.minimum(kept_index, len(values) - 1), [len(values) - 1])
    starts = np.concatenate(([0], kept_index[:-1] + 1))
    return values[kept_index], np.add.reduceat(occurrences, starts)
