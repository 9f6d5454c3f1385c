"""Documents as the packers see them, the queues in which they wait, and the bins that become micro-batches.

Long documents (outliers) wait, by level, until enough of similar length can train side by side. How long they wait is
bounded for any lengths, and priced. A bin refuses a piece only if it holds `max_documents`, or more than capacity -
window tokens. So pieces added one by one to the shortest bin fit, whatever their lengths, as long as the shares of the
free space before them sum to at most the whole. An iteration can always take that much, oldest first. Example: capacity
12, window 8, 2 bins (not counting documents): any pieces fit until 8 tokens are placed.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from wlb_megatron.packing.packer import Packer, Ranks, encode
from wlb_megatron.plan import MicroBatch, Piece, Waiting
from wlb_megatron.workload.cost_model import CostModel

SCALE = 1 << 20
"""Imbalance and prices are integers in units of 1 / SCALE."""


class Item(NamedTuple):
    """A piece with what packing needs to know about it.

    work: in the cost model's units. serial: counts arrivals, so that comparisons never tie and sorting by it sorts by
    age. entry: the iteration in which it arrived.
    """

    work: int
    tokens: int
    serial: int
    entry: int
    piece: Piece


class ItemPacker(Packer):
    """What packers of micro-batches of variable length share: limits, a law, and how pieces become items and text."""

    def __init__(self, cost: CostModel, limits: Limits, ranks: Ranks, per_window: float | None) -> None:
        """`per_window` is the number of micro-batches for each window; with None they are as many as give the least
        predicted step."""
        self._cost, self._limits, self._ranks, self._per_window = cost, limits, ranks, per_window
        self.bins, self.max_tokens, self.batch_spread = limits.bins, limits.capacity, limits.spread
        self.law = ranks.law(cost)
        self._price = DelayPrice()
        self._serial = 0

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._by_age())

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        settings, items, price = self._settings(), self._by_age(), self._price.state()
        return lambda: {
            "settings": settings,
            "waiting": encode(Waiting(item.piece, item.entry) for item in items),
            "price": price,
        }

    @abstractmethod
    def _by_age(self) -> list[Item]:
        """What waits, oldest first, in a list that is not changed later."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What a saved state and a run must have in common."""

    def _items(self, waiting_pieces: Sequence[Waiting]) -> list[Item]:
        """Items of pieces in the order in which they arrived. (Same result as Item._make, in half its time.)"""
        pieces, entries = zip(*waiting_pieces, strict=True) if waiting_pieces else ((), ())
        lengths = [end - start for _, _, start, end, _ in pieces]
        serials = range(self._serial, self._serial + len(pieces))
        self._serial += len(pieces)
        columns = self._cost.work(lengths).tolist(), lengths, serials, entries, pieces
        return list(map(tuple.__new__, repeat(Item), zip(*columns, strict=True)))


def by_falling_work(items: list[Item]) -> list[Item]:
    """Sorts by falling work. Ties keep their order in `items` (the older first)."""
    return sorted(items, key=itemgetter(0), reverse=True)


class OutlierQueues:
    """First-in-first-out queues. A document waits in the highest level i with thresholds[i] <= its tokens."""

    def __init__(self, thresholds: Sequence[int]) -> None:
        if min(thresholds, default=1) < 1 or any(low >= high for low, high in pairwise(thresholds)):
            raise ValueError(f"thresholds must be positive and rise, got {list(thresholds)}")
        self.thresholds = tuple(thresholds)
        self.levels: list[deque[Item]] = [deque() for _ in thresholds]

    def level_of(self, tokens: int) -> int:
        """The level of a document of this many tokens, -1 if it does not wait. Thresholds 4, 8: 3 is -1, 4 is 0, 8 is
        1.
        """
        return bisect_right(self.thresholds, tokens) - 1

    def put(self, item: Item) -> None:
        """Inserts by age, also an item that was released and did not fit, because a resumed run sorts what waits by
        age.
        """
        level = self.levels[self.level_of(item.tokens)]
        index = len(level)
        while index and level[index - 1].serial > item.serial:
            index -= 1
        level.insert(index, item)

    def pop_oldest(self) -> Item:
        return min((level for level in self.levels if level), key=lambda level: level[0].serial).popleft()

    def release(self, counts: Sequence[int]) -> list[Item]:
        """Take the first counts[i] items of each level i."""
        return [level.popleft() for level, n in zip(self.levels, counts, strict=True) for _ in range(n)]

    def __iter__(self) -> Iterator[Item]:
        for level in self.levels:
            yield from level

    def __len__(self) -> int:
        return sum(map(len, self.levels))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that every iteration keeps.

    bins: micro-batches of the global batch, none empty. window: tokens of the longest piece. capacity: Lmax, the most
    tokens of a micro-batch, more than the window. max_documents: most pieces of a micro-batch. max_delay: a piece
    that arrives in iteration i trains in iteration i + max_delay at the latest. spread: most tokens of a step, in
    percent of a global batch's; None: no bound.
    """

    bins: int
    window: int
    capacity: int
    max_documents: int
    max_delay: int
    spread: int | None = None

    def share(self, item: Item) -> int:
        """The most of `whole` that a piece may take."""
        return item.tokens * self.max_documents + self.capacity - self.window

    @property
    def whole(self) -> int:
        """What an iteration can take of any pieces."""
        return self.bins * (self.capacity - self.window) * self.max_documents

    def must_go(self, waiting_items: Sequence[Item], iteration: int) -> list[Item]:
        """The oldest pieces, as many as must train in `iteration` so that each of the others still can in time.

        waiting_items: by age. If earlier iterations kept to this, the result fits, added oldest first to the shortest
        bin.
        """
        need, before = 0, 0
        for item in waiting_items:
            iterations_left = item.entry + self.max_delay - iteration  # iterations that remain after this one
            need = max(
                need,
                before + self.share(item) if iterations_left <= 0 else before - iterations_left * self.whole,
            )
            before += self.share(item)
        gone, due_items = 0, []
        for item in waiting_items:
            if gone >= need:
                break
            due_items.append(item)
            gone += self.share(item)
        return due_items

    def too_many(self, waiting_items: Sequence[Item], iteration: int) -> int:
        """How many of the newest pieces, all arrived in `iteration`, cannot be promised to train in time."""
        before = sum(map(self.share, waiting_items))
        count = 0
        for item in reversed(waiting_items):
            before -= self.share(item)
            if item.entry < iteration or (self.max_delay and before <= self.max_delay * self.whole):
                break
            count += 1
        return count


class DelayPrice:
    """The price (1 / SCALE of an iteration's work) and running means over about the last MEMORY iterations.

    By Little's law the mean delay is waiting tokens over arriving tokens, both a mean iteration's. If it is above
    AIM (iterations, in 1 / SCALE) the price rises, below it falls, at most by 1 / STEP an iteration; so it also
    follows a corpus whose lengths drift. All integers.
    """

    MEMORY = 16
    STEP = 8
    AIM = 45 * SCALE // 100
    LEAST = SCALE // 200
    MOST = 2 * SCALE

    def __init__(self) -> None:
        self.price = SCALE // 25
        self.waiting = self.arrived = self.work = self.weight = 0

    def mean_work(self) -> int:
        """Work that arrives in an iteration."""
        return self.work * SCALE // max(self.weight, 1)

    def see_arrivals(self, tokens: int, work: int) -> None:
        self.arrived += tokens - self.arrived // self.MEMORY
        self.work += work - self.work // self.MEMORY
        self.weight += SCALE - self.weight // self.MEMORY

    def see_waiting(self, tokens: int) -> None:
        self.waiting += tokens - self.waiting // self.MEMORY
        delay = self.waiting * SCALE // max(self.arrived, 1)
        error = min(max(delay - self.AIM, -self.AIM), self.AIM)
        self.price += self.price * error // (self.AIM * self.STEP)
        self.price = min(max(self.price, self.LEAST), self.MOST)

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state(self, state: dict[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, int(state[name]))


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
