"""Balances fixed windows with an exact solver (CP-SAT): a packer to compare others with, not for training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.baselines import FixedGreedyPacker, fill_greedily, price
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.plan import Waiting
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN

LONG_PER_WINDOW = 12
"""The solver places this many of the longest pieces per window. The rest is treated as divisible."""


class Solution(NamedTuple):
    """bin_of: bin of each piece, -1 if it was left to the divisible rest. objective, bound: summed largest work of the
    iterations, in the works' units, and what no assignment can go below. They are equal where the optimum was
    proved."""

    bin_of: list[int]
    objective: int
    bound: int

    @property
    def gap(self) -> float:
        """How far above the optimum this may be at most: 0.02 is 2 %."""
        return (self.objective - self.bound) / max(self.bound, 1)


def solve(
    work: Sequence[int],
    tokens: Sequence[int],
    *,
    bins: int,
    capacity: int,
    per_iteration: int,
    divisible: tuple[int, int] = (0, 0),
    hint: Sequence[int] | None = None,
    seconds: float = 10.0,
) -> Solution | None:
    """Pieces to bins of at most `capacity` tokens for the least sum over iterations of the largest bin's work.

    Bins are dealt out `per_iteration` at a time. divisible: (tokens, work) of short pieces that may be divided at will.
    seconds: about this long, in the solver's deterministic time: one worker, the same answer everywhere.
    None if no assignment was found in that time. Raises WlbError without ortools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise WlbError(
            "fixed-solver needs ortools, which is not installed: pip install 'ortools>=9.10'"
        ) from None
    model = cp_model.CpModel()
    in_bin = [[model.new_bool_var("") for _ in range(bins)] for _ in work]
    divisible_tokens, divisible_work = divisible
    left_out = []
    for row in in_bin:
        if divisible_tokens:
            out = model.new_bool_var("")
            model.add_exactly_one(*row, out)
            left_out.append(out)
        else:
            model.add_exactly_one(row)
    total = sum(work) + divisible_work
    ceilings = [model.new_int_var(0, total, "") for _ in range(-(-bins // per_iteration))]
    divisible_in = [model.new_int_var(0, capacity, "") for _ in range(bins)]
    for bin_index in range(bins):
        bin_tokens = sum(row[bin_index] * n for row, n in zip(in_bin, tokens, strict=True))
        weight = sum(row[bin_index] * w for row, w in zip(in_bin, work, strict=True))
        model.add(bin_tokens + divisible_in[bin_index] <= capacity)
        density = divisible_work // max(divisible_tokens, 1)
        model.add(weight + density * divisible_in[bin_index] <= ceilings[bin_index // per_iteration])
    model.add(
        sum(divisible_in) == divisible_tokens + sum(out * n for out, n in zip(left_out, tokens, strict=False))
    )
    for low, high in pairwise(ceilings):
        model.add(low <= high)
    # A piece left to the divisible rest costs extra: count all of its work once more.
    model.minimize(sum(ceilings) + sum(out * w for out, w in zip(left_out, work, strict=False)))
    for row, bin_ in zip(in_bin, hint or [], strict=False):
        for bin_index, variable in enumerate(row):
            model.add_hint(variable, bin_index == bin_)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = seconds
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    bin_of = [
        next((bin_index for bin_index, v in enumerate(row) if solver.boolean_value(v)), -1) for row in in_bin
    ]
    return Solution(bin_of, round(solver.objective_value), round(solver.best_objective_bound))


class FixedSolverPacker(FixedGreedyPacker):
    """fixed-greedy, with its windows filled by the solver if that is better. `gap`: how far from optimal the solver's
    last answer may be, None if it had none.
    """

    name = "fixed-solver"

    def __init__(self, job: PackingJob) -> None:
        super().__init__(job)
        self._seconds = job.config.solver_seconds
        self.gap: float | None = None

    def _fill(
        self, items: list[Waiting], windows: int, bins: int
    ) -> tuple[list[list[Waiting]], list[Waiting]]:
        greedy, left_over = super()._fill(items, windows, bins)
        if not windows or left_over:
            return greedy, left_over
        by_length = sorted(range(len(items)), key=lambda i: (-items[i].piece.tokens, i))
        long_items = [items[i] for i in by_length[: LONG_PER_WINDOW * windows]]
        short_items = [items[i] for i in by_length[LONG_PER_WINDOW * windows :]]
        where = {item.piece: index for index, window in enumerate(greedy) for item in window}
        solution = solve(
            [price([item.piece], self._cost) // UNITS_PER_TOKEN for item in long_items],
            [item.piece.tokens for item in long_items],
            bins=windows,
            capacity=self._window,
            per_iteration=bins,
            divisible=(
                sum(item.piece.tokens for item in short_items),
                price([item.piece for item in short_items], self._cost) // UNITS_PER_TOKEN,
            ),
            hint=[where.get(item.piece, -1) for item in long_items],
            seconds=self._seconds,
        )
        self.gap = None if solution is None else solution.gap
        if solution is None:
            return greedy, left_over
        filled: list[list[Waiting]] = [[] for _ in range(windows)]
        for item, index in zip(long_items, solution.bin_of, strict=True):
            (filled[index] if index >= 0 else short_items).append(item)
        filled, left_over = fill_greedily(short_items, filled, self._window, self._max_documents, self._cost)
        if left_over or not all(window and len(window) <= self._max_documents for window in filled):
            # The solver does not count documents, and may leave a window to the divisible rest alone.
            return greedy, []
        return min((filled, greedy), key=lambda windows: self._summed_largest(windows, bins)), []

    def _summed_largest(self, windows: Sequence[Sequence[Waiting]], bins: int) -> int:
        work = sorted(price([item.piece for item in window], self._cost) for window in windows)
        return sum(work[min(begin + bins, len(work)) - 1] for begin in range(0, len(work), bins))

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"solver_seconds": self._seconds}
