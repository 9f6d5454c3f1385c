"""The micro-batches of one iteration while the packer fills them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from wlb_megatron.packing.varlen.outlier_queues import Item

UNBOUNDED = 1 << 62


class Bins:
    """`count` bins of at most `capacity` tokens and `max_documents` pieces.

    work, tokens, documents: of each bin. items: in the order of filling; `places` has the bin of each. Flat lists, so
    that a copy is cheap: many fillings are tried for one plan.
    """

    def __init__(self, count: int, capacity: int, max_documents: int) -> None:
        self.capacity = capacity
        self.max_documents = max_documents
        self.work = [0] * count
        self.tokens = [0] * count
        self.documents = [0] * count
        self.items: list[Item] = []
        self.places: list[int] = []
        # Heaps of (work, bin) and (tokens, bin). Rows become outdated when a bin grows, see _least.
        self._lightest = [(0, at) for at in range(count)]
        self._shortest = [(0, at) for at in range(count)]

    def copy(self) -> Bins:
        twin = Bins(0, self.capacity, self.max_documents)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(twin, name, value.copy())
        return twin

    def add(self, item: Item, ceiling: int = UNBOUNDED) -> bool:
        """Adds to the bin with the least work if the item fits there, else to the bin with the fewest tokens, else to
        none.

        (WLB-LLM, algorithm 1.) It fits if the bin then has at most `capacity` tokens and `ceiling` work.
        """
        at = self._place_for(item)
        if at < 0 or self.work[at] + item[0] > ceiling:
            return False
        self._put(item, at)
        return True

    def _place_for(self, item: Item) -> int:
        """The bin that `add` takes, -1 if there is none."""
        at = self._least(self._lightest, self.work)
        if at >= 0 and self.tokens[at] + item[1] > self.capacity:
            at = self._least(self._shortest, self.tokens)
            if self.tokens[at] + item[1] > self.capacity:
                return -1
        return at

    def add_all(self, items: Iterable[Item]) -> list[Item]:
        """Adds each item in turn; returns those that fit nowhere.

        This is `add`, inlined for the bin with the least work, because an iteration has tens of thousands of items.
        """
        heap, works, tokens, documents = self._lightest, self.work, self.tokens, self.documents
        capacity, most, replace = self.capacity, self.max_documents, heapq.heapreplace
        items = list(items)
        places: list[int] = []  # -1: nowhere
        note = places.append
        for item in items:
            seen, at = heap[0] if heap else (0, -1)
            if at < 0 or seen != works[at] or documents[at] >= most:
                at = self._least(heap, works)
            length = tokens[at] + item[1]
            if at < 0 or length > capacity:
                note(self._grow(item, self._place_for(item)))
                continue
            work = works[at] = works[at] + item[0]
            tokens[at] = length
            documents[at] += 1
            note(at)
            replace(heap, (work, at))
        if -1 not in places:
            self.items += items
            self.places += places
            return []
        self.items += [item for item, at in zip(items, places, strict=True) if at >= 0]
        self.places += [at for at in places if at >= 0]
        return [item for item, at in zip(items, places, strict=True) if at < 0]

    def add_shortest(self, item: Item) -> bool:
        """Adds to the bin with the fewest tokens, whatever its work."""
        at = self._least(self._shortest, self.tokens)
        if at < 0 or self.tokens[at] + item.tokens > self.capacity:
            return False
        self._put(item, at)
        return True

    def place(self, item: Item, at: int) -> None:
        """Adds to the bin `at`, whatever it holds."""
        self._put(item, at)

    def _put(self, item: Item, at: int) -> None:
        self._grow(item, at)
        self.items.append(item)
        self.places.append(at)

    def _grow(self, item: Item, at: int) -> int:
        if at >= 0:
            self.work[at] += item[0]
            self.tokens[at] += item[1]
            self.documents[at] += 1
        return at

    def _least(self, heap: list[tuple[int, int]], now: list[int]) -> int:
        """The bin with the least `now` that can take one more piece, -1 if there is none.

        Bins only grow, so an outdated heap row is too small: it comes up first and is corrected here.
        """
        while heap:
            seen, at = heap[0]
            if seen != now[at]:
                heapq.heapreplace(heap, (now[at], at))
            elif self.documents[at] < self.max_documents:
                return at
            else:
                heapq.heappop(heap)
        return -1

    def poured(self, work: int, tokens: int) -> tuple[int, int]:
        """(largest, sum) of the bins' work if short documents of that work and tokens were spread like a liquid.

        Each bin takes up to its capacity in tokens; what does not fit is left out. Example: bins of 6 and 2 work with
        space for more than 4 tokens each, 8 tokens of 8 work: both rise to 8, so (8, 16).
        """
        total = sum(self.work)
        if not work:
            return max(self.work), total
        room = [(self.capacity - held) * work // tokens for held in self.tokens]
        if sum(room) <= work:
            return max(map(int.__add__, self.work, room)), total + sum(room)
        # Sweep the level of work upwards: a bin joins at its work and leaves when it is full.
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

    def contents(self) -> list[list[Item]]:
        """The items of each bin, in the order of filling."""
        items: list[list[Item]] = [[] for _ in self.work]
        add = [of_bin.append for of_bin in items]
        for at, item in zip(self.places, self.items, strict=True):
            add[at](item)
        return items
