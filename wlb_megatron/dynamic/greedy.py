"""Longest documents first, each on the least loaded block of a size that makes it no bottleneck: always ready."""

from __future__ import annotations

import heapq

import numpy as np

from wlb_megatron.dynamic.placement import Placement, Problem

SHARES = (1.0, 1.15, 1.4, 0.75, 0.5, 0.3, 0.15)
"""Of the bound, what one document may cost a rank: tried one after another, the best plan counts."""


def place_greedily(problem: Problem, most: int, share: float) -> Placement | None:
    """A placement in at most `most` micro-steps, or None if the documents did not fit.

    Each document takes the smallest block that holds it and on which it costs at most `share` of the bound (or the
    one on which it costs least). Larger blocks are filled first, each with the longest documents first, so that
    when a size's turn comes all ranks of a block are equally loaded.
    """
    placement = Placement(problem, most)
    patience = 16 + problem.stage.ranks // 16
    for level, documents in reversed(list(enumerate(_by_level(problem, int(share * problem.bound))))):
        queue = _Blocks(placement, level)
        for document in documents:
            if queue.place(document):
                continue
            patience -= 1
            if patience < 0 or not _place_above(placement, level, document):
                return None
            queue = _Blocks(placement, level)
    return placement


def _by_level(problem: Problem, allowed: int) -> list[list[int]]:
    """Documents of each size of block, longest first."""
    prices, held = problem.price_array, problem.fitting
    quick = held & (prices <= allowed)
    least = np.where(held, prices, np.iinfo(np.int64).max).argmin(axis=0)
    chosen = np.where(quick.any(axis=0), quick.argmax(axis=0), least)
    order = np.argsort(-np.array(problem.tokens), kind="stable")
    return [order[chosen[order] == level].tolist() for level in range(len(problem.stage.sizes))]


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
            at = placement.find_room(level, block, tokens)
            if at >= 0:
                heapq.heappush(self._open, (load + placement.put(level, block, at, document), block))
                return True
            room = max((bin_.room for bin_ in placement.bins[level][block]), default=-1)
            heapq.heappush(self._full, (-room, load, block))
        return False


def _place_above(placement: Placement, level: int, document: int) -> bool:
    """On a larger block, where no block of the wanted size has room."""
    return any(
        _Blocks(placement, above).place(document)
        for above in range(level + 1, len(placement.problem.stage.sizes))
    )
