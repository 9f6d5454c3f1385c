"""The same placement by a solver (CP-SAT): counts of each bucket's documents on each block, from a warm start.

Blocks of one size are alike and documents of one bucket too, so a plan is a table of counts (FlexSP's MILP, over
nested blocks). A block's tokens must fit its micro-steps together; that they also fit one by one is seen when the
documents are dealt out, and the answer is dropped if not.

Lengths are gathered into a few buckets, so that the solver counts documents instead of naming them (FlexSP).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.placement import Placement, Problem

LARGEST = 12_000
"""Counts (buckets x blocks) above which the solver finds nothing in the time that a step leaves it."""

_UNIT = 1000
"""Nanoseconds of the solver's unit."""


def place_exactly(
    problem: Problem, buckets: Buckets, max_steps: int, hint: Placement | None, seconds: float
) -> Placement | None:
    """The best placement found in at most `max_steps` micro-steps and about `seconds` (deterministic time of one
    worker: the same answer everywhere); None if none was found, or ortools is not installed."""
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


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    """Documents by length, each counted as the mean of its bucket, rounded up: their tokens are right in sum.

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
