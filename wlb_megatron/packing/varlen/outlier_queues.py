"""Outlier queues: long documents wait, by level, until enough of similar length can train side by side.

How long they wait is bounded for any lengths, and priced. A bin refuses a piece only if it holds `max_documents`, or
more than capacity - window tokens. So pieces added one by one to the shortest bin fit, whatever their lengths, as long
as the shares of the free space before them sum to at most the whole. An iteration can always take that much, oldest
first. Example: capacity 12, window 8, 2 bins (not counting documents): any pieces fit until 8 tokens are placed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from wlb_megatron.packing.packer import Waiting
from wlb_megatron.plan import Piece
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


def items_of(cost: CostModel, waiting_pieces: Sequence[Waiting], first_serial: int) -> list[Item]:
    """Items of pieces in the order in which they arrived. (Same result as Item._make, in half its time.)"""
    pieces, entries = zip(*waiting_pieces, strict=True) if waiting_pieces else ((), ())
    lengths = [end - start for _, _, start, end, _ in pieces]
    serials = range(first_serial, first_serial + len(pieces))
    columns = cost.work(lengths).tolist(), lengths, serials, entries, pieces
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
