"""Moves and swaps of documents after a greedy or a solver's placement, while they shorten it."""

from __future__ import annotations

import math
import time

import numpy as np

from wlb_megatron.dynamic.placement import Placement

PARTNERS = 3
"""Least loaded blocks of a size that are tried as a document's new place."""

Place = tuple[int, int]
"""(level, block)."""

Score = tuple[int, int]
"""Time of the plan, and how many ranks end last: less is better, in this order."""


def improve_placement(placement: Placement, deadline: float = math.inf, rounds: int = 64) -> None:
    """Move a document off the blocks of the last rank to be done, or swap it with a cheaper one, for the least time
    that follows, until nothing shortens the plan, or the time has come (of time.monotonic). `placement` changes in
    place and never gets slower."""
    for _ in range(rounds):
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
