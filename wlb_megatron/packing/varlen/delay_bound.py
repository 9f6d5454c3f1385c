"""Bounds the delay of documents, for any lengths, and prices it.

A bin refuses a piece only if it holds `max_documents`, or more than capacity - window tokens. So pieces added one by
one to the shortest bin fit, whatever their lengths, as long as the shares of the free space before them sum to at
most the whole. An iteration can always take that much, oldest first. Example: capacity 12, window 8, 2 bins (not
counting documents): any pieces fit until 8 tokens are placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wlb_megatron.packing.varlen.outlier_queues import Item
from wlb_megatron.packing.varlen.release import SCALE


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
