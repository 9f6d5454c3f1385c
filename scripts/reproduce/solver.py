"""Balances fixed windows over several global batches, greedily (fixed-greedy) or with an exact solver, CP-SAT
(fixed-solver): packers to compare others with, not for training.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.baselines import OriginalPacker, cut, cut_windows, freeze, keep_one_window, price
from wlb_megatron.packing.packer import Packed, Packer, PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.arrange import assign_ranks
from wlb_megatron.plan import Piece, Waiting
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

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


class BatchesPlanner(Planner):
    """Takes in the pieces of `batches` global batches at once, in every `batches`-th iteration. It has no states."""

    def __init__(self, *args: Any, batches: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches = batches

    def _take_in(self, bins: int, *, all_left: bool = False) -> list[Piece]:
        return [] if self.iteration % self._batches else super()._take_in(bins * self._batches)


def repeating_batches(lengths: npt.NDArray[np.int64], packer: Packer, global_tokens: int) -> BatchesPlanner:
    """A planner of documents of these lengths, over and over, for packers of one batch at a time or of several."""
    stream = DocumentStream.of_lengths(lengths, Rules(int(lengths.max()), endless=True))
    batches = getattr(packer, "batches", 1)
    return BatchesPlanner(stream, packer, global_tokens=global_tokens, batches=batches)


class FixedGreedyPacker(OriginalPacker):
    """Balances windows of `batches` global batches at once, then returns them over as many iterations. Of an endless
    stream, from a BatchesPlanner.

    It starts from the windows that `original` would make of these batches, with the same cuts (the paper's
    baseline repacks such samples). What crosses the end of the last one waits, so no piece waits forever. Pieces go
    by falling work to the window with the least work that has space, and are cut again if the space is smaller. The
    new windows are grouped by work, so that those of one iteration are similar. The groups are ordered by the id of
    their longest document, which is unrelated to work: no curriculum.
    """

    def __init__(self, job: PackingJob, batches: int) -> None:
        super().__init__(job)
        self.batches = batches
        self._planned: list[list[Waiting]] = []  # windows of the coming iterations, in order

    @property
    def waiting(self) -> tuple[Piece, ...]:
        items = [item for window in self._planned for item in window] + self._waiting
        return tuple(item.piece for item in sorted(items, key=lambda item: item.entry))

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        self._waiting += (Waiting(piece, iteration) for piece in arrived)
        put_back = () if self._planned else self._plan_windows(iteration, bins)
        now, self._planned = self._planned[:bins], self._planned[bins:]
        return Packed(assign_ranks(freeze(now, bins, self._cost), self._ranks), put_back)

    def _plan_windows(self, iteration: int, bins: int) -> tuple[Piece, ...]:
        goods, remainder = cut_windows(self._waiting, self._window, bins * self.batches, self._max_documents)
        items = [item for window in goods for item in window]
        filled, left_over = self._fill(items, len(goods), bins)
        remainder, put_back = keep_one_window(remainder, self._window, iteration)
        self._waiting = left_over + remainder
        self._planned = self._order(filled, bins)
        return put_back

    def _order(self, windows: list[list[Waiting]], bins: int) -> list[list[Waiting]]:
        work = [price([item.piece for item in window], self._cost) for window in windows]
        alike = [windows[i] for i in sorted(range(len(windows)), key=lambda i: (work[i], i))]
        groups = [alike[begin : begin + bins] for begin in range(0, len(alike), bins)]
        groups.sort(
            key=lambda group: max((item.piece.tokens, item.piece) for window in group for item in window)[1]
        )
        return [window for group in groups for window in group]

    def _fill(
        self, items: list[Waiting], windows: int, bins: int
    ) -> tuple[list[list[Waiting]], list[Waiting]]:
        """Items in this many windows, of which an iteration takes `bins`; and what did not fit."""
        empty_windows: list[list[Waiting]] = [[] for _ in range(windows)]
        return fill_greedily(items, empty_windows, self._window, self._max_documents, self._cost)


def fill_greedily(
    items: Sequence[Waiting], windows: list[list[Waiting]], capacity: int, max_documents: int, cost: CostModel
) -> tuple[list[list[Waiting]], list[Waiting]]:
    """Assigns items by falling work, each to the window with the least work that has space, cut if the space is
    smaller.

    What is cut off goes to the next window at once. Windows may already hold items. Also returns what fits in no
    window. Example: capacity 8, items of 6, 5, 5 tokens give [6, 2] and [5, 3]: the last is cut, and its rest is new.
    """
    lengths = [item.piece.tokens for item in items]
    work = cost.work(lengths).tolist()
    heap = []
    for i, window in enumerate(windows):
        room = capacity - sum(item.piece.tokens for item in window)
        if room and len(window) < max_documents:
            heap.append((price([item.piece for item in window], cost), i, room))
    heapq.heapify(heap)
    left_over = []
    for index in sorted(range(len(items)), key=lambda i: (-work[i], i)):
        item, tokens, extra = items[index], lengths[index], work[index]
        while heap:
            total, i, room = heapq.heappop(heap)
            if tokens <= room:
                windows[i].append(item)
                if tokens < room and len(windows[i]) < max_documents:
                    heapq.heappush(heap, (total + extra, i, room - tokens))
                break
            head, tail = cut(item.piece, room)
            windows[i].append(item._replace(piece=head))
            item = item._replace(piece=tail)
            tokens -= room
            extra = int(cost.work(tokens))
        else:
            left_over.append(item)
    return windows, sorted(left_over, key=lambda item: item.entry)


class FixedSolverPacker(FixedGreedyPacker):
    """fixed-greedy, with its windows filled by the solver if that is better, for `seconds` of its deterministic time
    a plan. `gap`: how far from optimal the solver's last answer may be, None if it had none.
    """

    def __init__(self, job: PackingJob, batches: int, seconds: float) -> None:
        super().__init__(job, batches)
        self._seconds = seconds
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
