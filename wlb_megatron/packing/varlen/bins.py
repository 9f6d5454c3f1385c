"""The micro-batches of one iteration while the packer fills them, and evens them by moving and swapping pieces."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from wlb_megatron.packing.varlen.outlier_queues import Item
from wlb_megatron.plan import MicroBatch

UNBOUNDED = 1 << 62

_PIECE = itemgetter(4)  # of items; faster than access by name


class Filled(NamedTuple):
    """A planned micro-batch. Several numbers of micro-batches are packed for one plan."""

    items: list[Item]
    work: int
    tokens: int

    def micro_batch(self) -> MicroBatch:
        return MicroBatch(tuple(map(_PIECE, self.items)), self.work)


class Bins:
    """`count` bins of at most `capacity` tokens and `max_documents` pieces.

    `work`, `tokens` and `documents` have a value for each bin, `items` the order of filling, `places` the bin of each
    item. Flat lists, so that a copy is cheap: many fillings are tried for one plan.
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
        self._lightest = [(0, index) for index in range(count)]
        self._shortest = [(0, index) for index in range(count)]

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
        index = self._place_for(item)
        if index < 0 or self.work[index] + item[0] > ceiling:
            return False
        self.place(item, index)
        return True

    def _place_for(self, item: Item) -> int:
        """The bin that `add` takes, -1 if there is none."""
        index = self._least(self._lightest, self.work)
        if index >= 0 and self.tokens[index] + item[1] > self.capacity:
            index = self._least(self._shortest, self.tokens)
            if self.tokens[index] + item[1] > self.capacity:
                return -1
        return index

    def add_all(self, items: Iterable[Item]) -> list[Item]:
        """Adds each item in turn; returns those that fit nowhere.

        This is `add`, inlined for the bin with the least work, because an iteration has tens of thousands of items.
        """
        heap, works, tokens, documents = self._lightest, self.work, self.tokens, self.documents
        capacity, document_limit, replace = self.capacity, self.max_documents, heapq.heapreplace
        items = list(items)
        places: list[int] = []  # -1: nowhere
        note = places.append
        for item in items:
            listed, index = heap[0] if heap else (0, -1)
            if index < 0 or listed != works[index] or documents[index] >= document_limit:
                index = self._least(heap, works)
            length = tokens[index] + item[1]
            if index < 0 or length > capacity:
                note(self._grow(item, self._place_for(item)))
                continue
            work = works[index] = works[index] + item[0]
            tokens[index] = length
            documents[index] += 1
            note(index)
            replace(heap, (work, index))
        if -1 not in places:
            self.items += items
            self.places += places
            return []
        self.items += [item for item, index in zip(items, places, strict=True) if index >= 0]
        self.places += [index for index in places if index >= 0]
        return [item for item, index in zip(items, places, strict=True) if index < 0]

    def add_shortest(self, item: Item) -> bool:
        """Adds to the bin with the fewest tokens, whatever its work."""
        index = self._least(self._shortest, self.tokens)
        if index < 0 or self.tokens[index] + item.tokens > self.capacity:
            return False
        self.place(item, index)
        return True

    def place(self, item: Item, index: int) -> None:
        """Adds to the bin `index`, whatever it holds."""
        self._grow(item, index)
        self.items.append(item)
        self.places.append(index)

    def _grow(self, item: Item, index: int) -> int:
        if index >= 0:
            self.work[index] += item[0]
            self.tokens[index] += item[1]
            self.documents[index] += 1
        return index

    def _least(self, heap: list[tuple[int, int]], now: list[int]) -> int:
        """The bin with the least `now` that can take one more piece, -1 if there is none.

        Bins only grow, so an outdated heap row is too small: it comes up first and is corrected here.
        """
        while heap:
            listed, index = heap[0]
            if listed != now[index]:
                heapq.heapreplace(heap, (now[index], index))
            elif self.documents[index] < self.max_documents:
                return index
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
        room = [(self.capacity - bin_tokens) * work // tokens for bin_tokens in self.tokens]
        if sum(room) <= work:
            return max(map(int.__add__, self.work, room)), total + sum(room)
        # Sweep the level of work upwards: a bin joins at its work and leaves when it is full.
        events = sorted(
            [(w, 1) for w in self.work] + [(w + r, -1) for w, r in zip(self.work, room, strict=True)]
        )
        level, rising, work_left = events[0][0], 0, work
        for event_level, change in events:
            if rising * (event_level - level) >= work_left:
                break
            work_left -= rising * (event_level - level)
            level, rising = event_level, rising + change
        level += work_left // max(rising, 1)
        return max(level, max(self.work)), total + work

    def contents(self) -> list[list[Item]]:
        """The items of each bin, in the order of filling."""
        items: list[list[Item]] = [[] for _ in self.work]
        add = [of_bin.append for of_bin in items]
        for index, item in zip(self.places, self.items, strict=True):
            add[index](item)
        return items


PARTNERS = 4

_NONE = np.iinfo(np.int64).max


class _Bin:
    """A bin's items as arrays, in the order of filling; `ranked`: their places by (work, tokens, serial)."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        work, tokens, serial, _, _ = zip(*items, strict=True) if items else ((),) * 5
        self.work, self.tokens, by_age = (np.array(of, dtype=np.int64) for of in (work, tokens, serial))
        self.total = int(self.tokens.sum())
        self.ranked = np.lexsort((by_age, self.tokens, self.work))


def improve_bins(
    bins: list[list[Item]], work: list[int], capacity: int, max_documents: int, rounds: int = 16
) -> None:
    """Move a piece from the bin with most work to a light one, or swap two, whichever evens them best, while it
    helps; `bins` and their `work` change in place. None gets more work than the largest had, nor breaks a limit."""
    arrays: dict[int, _Bin] = {}
    for _ in range(rounds):
        order = sorted(range(len(bins)), key=work.__getitem__)
        high = order[-1]
        for low in order[: min(PARTNERS, len(bins) - 1)]:
            for index in (high, low):
                if index not in arrays:
                    arrays[index] = _Bin(bins[index])
            trade = _best_trade(arrays[high], arrays[low], work[high] - work[low], capacity, max_documents)
            if trade is not None:
                break
        else:
            break
        for item, source, target in zip(trade, (high, low), (low, high), strict=False):
            bins[source].remove(item)
            bins[target].append(item)
            work[source] -= item.work
            work[target] += item.work
        del arrays[high], arrays[low]


def _best_trade(high: _Bin, low: _Bin, gap: int, capacity: int, max_documents: int) -> list[Item] | None:
    """The item that goes to `low`, and the one that comes back if any, after which two bins, now `gap` apart, are
    closest; None if nothing brings them closer.

    Each item of `high` may move (column 0), or be swapped for one of the three of `low` around (its work - gap / 2).
    Of equal trades the first item's counts, and of that the first column.
    """
    if not high.items:
        return None
    away = np.full((len(high.items), 4), _NONE)
    if len(high.items) > 1 and len(low.items) < max_documents:
        fits = (high.work < gap) & (low.total + high.tokens <= capacity)
        away[fits, 0] = np.abs(gap - 2 * high.work[fits])
    works, tokens = low.work[low.ranked], low.tokens[low.ranked]
    near = np.searchsorted(works, high.work - gap // 2)[:, None] + np.arange(-1, 2)
    if len(works):
        back = near.clip(0, len(works) - 1)
        grow = high.tokens[:, None] - tokens[back]
        remaining = np.abs(gap - 2 * (high.work[:, None] - works[back]))
        fits = (
            (near == back)
            & (low.total + grow <= capacity)
            & (high.total - grow <= capacity)
            & (remaining < gap)
        )
        away[:, 1:][fits] = remaining[fits]
    row, column = divmod(int(away.argmin()), 4)
    if away[row, column] == _NONE:
        return None
    return [high.items[row], *([low.items[low.ranked[near[row, column - 1]]]] if column else ())]
