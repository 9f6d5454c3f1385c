"""The price of letting a document wait. It follows the mean delay of tokens towards its bound."""

from __future__ import annotations

from typing import Any

from wlb_megatron.packing.varlen.release import SCALE


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

    def __init__(self, price: int = SCALE // 25) -> None:
        self.price = price
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
