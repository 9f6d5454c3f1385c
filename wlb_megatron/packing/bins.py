"""The micro-batches of one iteration while they are filled."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable

from wlb_megatron.packing.outlier_queues import Item
from wlb_megatron.plan import MicroBatch

UNBOUNDED = 1 << 62


class Bins:
    """`count` bins of at most `capacity` tokens and `max_documents` pieces."""

    def __init__(self, count: int, capacity: int, max_documents: int) -> None:
        self.capacity = capacity
        self.max_documents = max_documents
        self.work = [0] * count
        self.tokens = [0] * count
        self.items: list[list[Item]] = [[] for _ in range(count)]
        # Heaps of (work, bin) and (tokens, bin); rows go stale when a bin grows, see _least.
        self._lightest = [(0, at) for at in range(count)]
        self._shortest = [(0, at) for at in range(count)]

    def copy(self) -> Bins:
        twin = Bins(0, self.capacity, self.max_documents)
        twin.work, twin.tokens = self.work.copy(), self.tokens.copy()
        twin.items = [held.copy() for held in self.items]
        twin._lightest, twin._shortest = self._lightest.copy(), self._shortest.copy()
        return twin

    def add(self, item: Item, ceiling: int = UNBOUNDED) -> bool:
        """To the bin with least work if it fits there, else to the one with least tokens if it fits there, else
        nowhere (WLB-LLM, algorithm 1). It fits if the bin then has at most `capacity` tokens and `ceiling` work."""
        at = self._least(self._lightest, self.work)
        if at < 0:
            return False
        if self.tokens[at] + item.tokens > self.capacity:
            at = self._least(self._shortest, self.tokens)
            if self.tokens[at] + item.tokens > self.capacity:
                return False
        if self.work[at] + item.work > ceiling:
            return False
        self._put(item, at)
        return True

    def add_all(self, items: Iterable[Item]) -> list[Item]:
        """Add each in turn; returns those that fit nowhere."""
        return [item for item in items if not self.add(item)]

    def add_shortest(self, item: Item) -> bool:
        """To the bin with least tokens, whatever its work."""
        at = self._least(self._shortest, self.tokens)
        if at < 0 or self.tokens[at] + item.tokens > self.capacity:
            return False
        self._put(item, at)
        return True

    def _put(self, item: Item, at: int) -> None:
        self.work[at] += item.work
        self.tokens[at] += item.tokens
        self.items[at].append(item)

    def _least(self, heap: list[tuple[int, int]], now: list[int]) -> int:
        """The bin with least `now` that may take one more piece, -1 if none.

        Bins only grow, so a stale row is too small: it comes up first and is mended here.
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

    def poured(self, work: int, tokens: int) -> tuple[int, int]:
        """(largest, sum) of the bins' work if short documents of that work and tokens were poured in like water.

        Each bin takes water up to its capacity in tokens; water that finds no room is left out. Bins of 6 and 2
        work with room for more than 4 tokens each, 8 tokens of 8 work: both rise to 8, so (8, 16).
        """
        total = sum(self.work)
        if not work:
            return max(self.work), total
        room = [(self.capacity - held) * work // tokens for held in self.tokens]
        if sum(room) <= work:
            return max(map(int.__add__, self.work, room)), total + sum(room)
        # Sweep the water level upwards: a bin joins at its work and leaves when it is full.
        events = sorted(
            [(w, 1) for w in self.work] + [(w + r, -1) for w, r in zip(self.work, room, strict=True)]
        )
        level, rising, left = events[0][0], 0, work
        for at, change in events:
            if rising * (at - level) >= left:
                break
            left -= rising * (at - level)
            level, rising = at, rising + change
        level += left // max(rising, 1)
        return max(level, max(self.work)), total + work

    def improve(self, rounds: int = 16) -> None:
        """Move or swap pieces between the bin with most work and a lighter one while that lowers the larger of the
        two; never makes the largest larger. Ends the filling."""
        for _ in range(rounds):
            order = sorted(range(len(self.work)), key=self.work.__getitem__)
            high = order[-1]
            if not any(self._trade(high, low) for low in order[:4] if low != high):
                break

    def _trade(self, high: int, low: int) -> bool:
        """The best single move or swap of pieces from bin `high` to bin `low`; False if none helps."""
        gap = self.work[high] - self.work[low]
        mine = sorted(self.items[high])
        theirs = sorted(self.items[low])
        works = [item.work for item in theirs]
        best: tuple[int, Item, Item | None] | None = None
        moves = len(mine) > 1 and len(theirs) < self.max_documents
        for item in mine:
            if moves and item.work < gap and self.tokens[low] + item.tokens <= self.capacity:
                away = abs(gap - 2 * item.work)  # what remains between the two bins
                if best is None or away < best[0]:
                    best = (away, item, None)
            at = bisect_left(works, item.work - gap // 2)
            for partner in theirs[max(at - 1, 0) : at + 2]:
                shift, grow = item.work - partner.work, item.tokens - partner.tokens
                fits = self.tokens[low] + grow <= self.capacity and self.tokens[high] - grow <= self.capacity
                if fits and 0 < shift < gap:
                    away = abs(gap - 2 * shift)
                    if best is None or away < best[0]:
                        best = (away, item, partner)
        if best is None or best[0] >= gap:
            return False
        _, item, other = best
        self._shift(item, high, low)
        if other is not None:
            self._shift(other, low, high)
        return True

    def _shift(self, item: Item, source: int, target: int) -> None:
        self.items[source].remove(item)
        self.items[target].append(item)
        for held, sign in ((source, -1), (target, 1)):
            self.work[held] += sign * item.work
            self.tokens[held] += sign * item.tokens

    def freeze(self) -> list[MicroBatch]:
        return [
            MicroBatch(tuple(item.piece for item in items), work)
            for items, work in zip(self.items, self.work, strict=True)
        ]
