"""Documents being placed on blocks: each block runs some micro-steps, each of them within its tokens.

Blocks are nested and micro-steps run from the largest to the smallest, so no rank waits for another: a rank's time
is what all blocks that hold it cost, and the plan's time is the largest over ranks. Sizes 1 2 4 with [A] on ranks
0-3, [B] on 0-1, [C] on 2, [D] on 3 run as micro-step 0: A, micro-step 1: B | C | D.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.plan import STEP_NS, Group, Stage, StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class Bin:
    """One micro-step of a block: its documents, and the tokens that still fit."""

    room: int
    documents: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """One iteration's documents: their `tokens`, int64[n], and nanoseconds as in plan.GroupCost: `prices`,
    int64[sizes, n], and `opening`, [sizes]. ValueError if a document fits no group."""

    stage: Stage
    tokens: list[int]
    prices: list[list[int]]
    opening: tuple[int, ...]

    def __post_init__(self) -> None:
        longest_tokens = max(self.tokens, default=0)
        if longest_tokens > max(self.stage.tokens):  # Lmax is at least the window, so none should be
            raise ValueError(
                f"a document of {longest_tokens} tokens exceeds Lmax of {max(self.stage.tokens)}: raise "
                "--wlb-max-tokens"
            )

    @cached_property
    def price_array(self) -> IntArray:
        """`prices` as int64[sizes, n]."""
        return np.array(self.prices, dtype=np.int64)

    @cached_property
    def fitting(self) -> npt.NDArray[np.bool_]:
        """bool[sizes, n]: which documents a group of each size holds."""
        return np.array(self.tokens) <= np.array(self.stage.tokens)[:, None]

    @cached_property
    def bound(self) -> int:
        """Nanoseconds that no plan goes below: the least T at which all documents, each on the size of group that
        costs least in all (ranks x time) among those on which it takes at most T, fill the ranks no more than T;
        and the micro-steps that their tokens take."""
        if not self.tokens:
            return STEP_NS
        prices, fits_group = self.price_array, self.fitting
        never = np.iinfo(np.int64).max // (len(self.tokens) + 1)
        summed = np.where(fits_group, prices * np.array(self.stage.sizes)[:, None], never)
        low = int(np.where(fits_group, prices, never).min(axis=0).max())
        high = max(low, -(-int(summed.min(axis=0).sum()) // self.stage.ranks))

        def fits(time: int) -> bool:
            return int(np.where(prices <= time, summed, never).min(axis=0).sum()) <= self.stage.ranks * time

        while not fits(high):
            low, high = high + 1, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low + STEP_NS * self.least_steps()

    def least_steps(self) -> int:
        """Micro-steps that the tokens take, if ranks were filled to the last."""
        return max(1, -(-sum(self.tokens) // (self.stage.tokens[0] * self.stage.ranks)))


class Placement:
    """bins[level][block]: micro-steps of each block. load, steps: int64[ranks], nanoseconds and micro-steps of the
    blocks that hold a rank, which must stay at most `most`."""

    def __init__(self, problem: Problem, max_steps: int) -> None:
        stage = problem.stage
        self.problem, self.most = problem, max_steps
        self.bins: list[list[list[Bin]]] = [[[] for _ in range(stage.ranks // size)] for size in stage.sizes]
        self.load = np.zeros(stage.ranks, dtype=np.int64)
        self.steps = np.zeros(stage.ranks, dtype=np.int64)

    def ranks(self, level: int, block: int) -> slice:
        size = self.problem.stage.sizes[level]
        return slice(block * size, block * size + size)

    def find_room(self, level: int, block: int, tokens: int) -> int:
        """The bin of the block with the least room that holds these tokens; one past the last where a new one may
        be opened; -1 where none can."""
        best_index, least_room = -1, self.problem.stage.tokens[level] + 1
        for bin_index, bin_ in enumerate(self.bins[level][block]):
            if tokens <= bin_.room < least_room:
                best_index, least_room = bin_index, bin_.room
        if best_index >= 0 or tokens > self.problem.stage.tokens[level]:
            return best_index
        may_open = int(self.steps[self.ranks(level, block)].max()) < self.most
        return len(self.bins[level][block]) if may_open else -1

    def put(self, level: int, block: int, bin_index: int, document: int) -> int:
        """Place a document in a bin that `find_room` found; returns what the block's ranks pay for it."""
        bins, block_ranks = self.bins[level][block], self.ranks(level, block)
        paid = self.problem.prices[level][document]
        if bin_index == len(bins):
            bins.append(Bin(self.problem.stage.tokens[level]))
            paid += self.problem.opening[level]
            self.steps[block_ranks] += 1
        bins[bin_index].room -= self.problem.tokens[document]
        bins[bin_index].documents.append(document)
        self.load[block_ranks] += paid
        return paid

    def take(self, level: int, block: int, document: int) -> tuple[int, bool]:
        """Take a document off its block. Its bin closes when it is empty. Returns what `put_back` needs."""
        bins, block_ranks = self.bins[level][block], self.ranks(level, block)
        bin_index = next(i for i, bin_ in enumerate(bins) if document in bin_.documents)
        bins[bin_index].documents.remove(document)
        bins[bin_index].room += self.problem.tokens[document]
        self.load[block_ranks] -= self.problem.prices[level][document]
        was_last = not bins[bin_index].documents
        if was_last:
            del bins[bin_index]
            self.load[block_ranks] -= self.problem.opening[level]
            self.steps[block_ranks] -= 1
        return bin_index, was_last

    def put_back(self, level: int, block: int, document: int, undo: tuple[int, bool]) -> None:
        """Undo `take`, if nothing else on the block has changed since: the same bin, opened again if it closed."""
        bin_index, was_last = undo
        self.put(level, block, len(self.bins[level][block]) if was_last else bin_index, document)

    def time(self) -> int:
        """Nanoseconds until the last rank is done."""
        return int(self.load.max()) + STEP_NS * int(self.steps.max())

    def plan(self) -> StepPlan:
        """Micro-steps in falling order of their group's size, on every rank."""
        stage = self.problem.stage
        micro_steps: list[list[Group]] = [[] for _ in range(int(self.steps.max()))]
        next_step = np.zeros(stage.ranks, dtype=np.int64)
        for level in reversed(range(len(stage.sizes))):
            for block, bins in enumerate(self.bins[level]):
                block_ranks = self.ranks(level, block)
                for bin_ in bins:
                    group = Group(
                        block_ranks.start, block_ranks.stop - block_ranks.start, tuple(sorted(bin_.documents))
                    )
                    micro_steps[int(next_step[block_ranks.start])].append(group)
                    next_step[block_ranks] += 1
        return StepPlan(
            stage.ranks, tuple(tuple(sorted(groups, key=lambda g: g.start)) for groups in micro_steps)
        )


PARTNERS = 3
"""Least loaded blocks of a size that are tried as a document's new place."""

ROUNDS = 64
"""Changes made to a placement at most."""

Place = tuple[int, int]
"""(level, block)."""

Score = tuple[int, int]
"""Time of the plan, and how many ranks end last: less is better, in this order."""


def improve_placement(placement: Placement, deadline: float) -> None:
    """Move a document off the blocks of the last rank to be done, or swap it with a cheaper one, for the least time
    that follows, until nothing shortens the plan, or the time has come (of time.monotonic). `placement` changes in
    place and never gets slower."""
    for _ in range(ROUNDS):
        if time.monotonic() > deadline or not _improve_once(placement):
            return


def _improve_once(placement: Placement) -> bool:
    """The first of the last rank's documents, dearest first, whose best change helps."""
    worst_rank = int(placement.load.argmax())
    problem = placement.problem
    held_documents = [
        ((level, worst_rank // size), document)
        for level, size in enumerate(problem.stage.sizes)
        for bin_ in placement.bins[level][worst_rank // size]
        for document in bin_.documents
    ]
    held_documents.sort(key=lambda item: (-problem.prices[item[0][0]][item[1]], item[1]))
    return any(_relocate(placement, place, document) for place, document in held_documents[:48])


def _score(placement: Placement) -> Score:
    last = placement.load.max()
    return placement.time(), int((placement.load == last).sum())


def _relocate(placement: Placement, home: Place, document: int) -> bool:
    """Move the document to where the plan's time is least, or swap it; False, and no change, if nothing helps."""
    best_score = _score(placement)
    choice: tuple[Place, int | None] | None = None
    undo = placement.take(*home, document)
    for target in _targets(placement, home):
        score = _try_put(placement, target, document)
        if score is not None and score < best_score:
            best_score, choice = score, (target, None)
    if choice is None:
        best_score, choice = _best_swap(placement, home, document, best_score)
    if choice is None:
        placement.put_back(*home, document, undo)
        return False
    target, back = choice
    if back is not None:
        placement.take(*target, back)
    placement.put(*target, placement.find_room(*target, placement.problem.tokens[document]), document)
    if back is not None:
        placement.put(*home, placement.find_room(*home, placement.problem.tokens[back]), back)
    return True


def _best_swap(
    placement: Placement, home: Place, document: int, best_score: Score
) -> tuple[Score, tuple[Place, int | None] | None]:
    """The best exchange for a document that costs less on `home`. The document itself is off all blocks."""
    prices = placement.problem.prices[home[0]]
    choice: tuple[Place, int | None] | None = None
    for target in _targets(placement, home):
        partners = [d for bin_ in placement.bins[target[0]][target[1]] for d in bin_.documents]
        cheaper = [d for d in partners if prices[d] < prices[document]]
        for back in sorted(cheaper, key=lambda d: (-prices[d], d))[:8]:
            undo = placement.take(*target, back)
            bin_index = placement.find_room(*target, placement.problem.tokens[document])
            if bin_index >= 0:
                placement.put(*target, bin_index, document)
                score = _try_put(placement, home, back)
                if score is not None and score < best_score:
                    best_score, choice = score, (target, back)
                placement.take(*target, document)
            placement.put_back(*target, back, undo)
    return best_score, choice


def _try_put(placement: Placement, place: Place, document: int) -> Score | None:
    """The score with the document there, which it then leaves; None without room."""
    bin_index = placement.find_room(*place, placement.problem.tokens[document])
    if bin_index < 0:
        return None
    placement.put(*place, bin_index, document)
    score = _score(placement)
    placement.take(*place, document)
    return score


def _targets(placement: Placement, home: Place) -> list[Place]:
    """The least loaded blocks of each size."""
    targets = []
    for level, size in enumerate(placement.problem.stage.sizes):
        loads = placement.load.reshape(-1, size).max(axis=1)
        least_loaded = np.argsort(loads, kind="stable")[:PARTNERS].tolist()
        targets += [(level, block) for block in least_loaded if (level, block) != home]
    return targets
