"""The micro-batches of one iteration while they are filled."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from wlb_megatron.packing.outlier_queues import Item
from wlb_megatron.plan import MicroBatch


class Bins:
    """`count` bins of at most `capacity` tokens and `max_documents` pieces; work, tokens and items by bin."""

    def __init__(self, count: int, capacity: int, max_documents: int) -> None:
        self.capacity = capacity
        self.max_documents = max_documents
        self.work = [0] * count
        self.tokens = [0] * count
        self.items: list[list[Item]] = [[] for _ in range(count)]

    def add(self, at: int, item: Item) -> None:
        self.work[at] += item.work
        self.tokens[at] += item.tokens
        self.items[at].append(item)

    def place(self, items: Iterable[Item]) -> list[Item]:
        """Each item, in the given order, to the bin with least work if it fits there, else to the one with least
        tokens if it fits there; returns those that fit in neither (WLB-LLM, algorithm 1)."""
        tokens, capacity = self.tokens, self.capacity
        lightest = [(w, i) for i, w in enumerate(self.work)]
        shortest = [(t, i) for i, t in enumerate(tokens)]
        heapq.heapify(lightest)
        heapq.heapify(shortest)
        left = []
        for item in items:
            at = self._least(lightest, self.work)
            if at >= 0 and tokens[at] + item.tokens > capacity:
                at = self._least(shortest, tokens)
            if at < 0 or tokens[at] + item.tokens > capacity:
                left.append(item)
            else:
                self.add(at, item)
        return left

    def _least(self, heap: list[tuple[int, int]], now: list[int]) -> int:
        """The bin with least `now` that may take one more piece, -1 if none.

        Rows of the heap go stale when a bin grows; a stale row is too small, so it comes up and is mended here.
        """
        while heap:
            seen, at = heap[0]
            if len(self.items[at]) >= self.max_documents:
                heapq.heappop(heap)
            elif seen != now[at]:
                heapq.heapreplace(heap, (now[at], at))
            else:
                return at
        return -1

    def freeze(self) -> list[MicroBatch]:
        return [
            MicroBatch(tuple(item.piece for item in items), work)
            for items, work in zip(self.items, self.work, strict=True)
        ]
