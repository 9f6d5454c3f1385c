"""Variable-length micro-batches with delay of outliers (WLB-LLM, algorithm 1, with what the paper leaves open)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.assign import assign_ranks
from wlb_megatron.packing.bins import Bins
from wlb_megatron.packing.delay_price import DelayPrice
from wlb_megatron.packing.outlier_queues import Item, OutlierQueues
from wlb_megatron.packing.packer import Packed, Waiting, check_settings, decode, encode
from wlb_megatron.packing.release import Choice, Situation, choose_release
from wlb_megatron.plan import Piece
from wlb_megatron.workload.cost_model import CostModel


def longest_micro_batch(config: WlbConfig, window: int, alignment: int = 1) -> int:
    """Lmax: config.max_tokens or 1.5 windows, down to a multiple of `alignment`. Raises ValueError below 1.25 windows.

    Documents are not cut, so a micro-batch cannot always be filled: with less, documents would pile up.
    """
    tokens = int(1.5 * window) if config.max_tokens is None else config.max_tokens
    tokens = tokens // alignment * alignment
    if 4 * tokens < 5 * window:
        raise ValueError(
            f"max_tokens of {tokens} is below 1.25 windows ({-(-5 * window // 4)} tokens), in which uncut documents "
            "cannot be packed without piling up: raise --wlb-max-tokens, or use --wlb-packing fixed-greedy"
        )
    return tokens


class VarlenPacker:
    """Whole documents in micro-batches of different length and like work.

    A call of `pack`: short documents and leftovers are ready; outliers wait in their queues. What its bound on delay
    demands goes first, then every level that holds as many as there are micro-batches, then what balances best
    (release.py; `by_balance=False` leaves this out and is the paper's algorithm); then the leftovers, then the
    short ones, by falling work. What does not fit is left over, and ages.

    The bound holds for any lengths: see `_must_go`. Where documents arrive faster than micro-batches of `capacity`
    tokens can take uncut ones (lengths just above half of it, say), the newest are put back.
    """

    intake_batches = 1

    def __init__(
        self,
        cost: CostModel,
        *,
        window: int,
        bins: int,
        capacity: int,
        thresholds: Sequence[int],
        max_delay: int,
        max_documents: int = 4096,
        dp: int = 1,
        pp: int = 1,
        by_balance: bool = True,
    ) -> None:
        """bins: micro-batches of the global batch. capacity: Lmax (tokens), above the window."""
        self._cost = cost
        self._window = window
        self._count = bins
        self._capacity = capacity
        self._max_delay = max_delay
        self._max_documents = max_documents
        self._dp, self._pp = dp, pp
        self._by_balance = by_balance
        self._queues = OutlierQueues(thresholds)
        self._left: list[Item] = []
        self._price = DelayPrice()
        self._serial = 0

    @classmethod
    def from_config(
        cls,
        config: WlbConfig,
        cost: CostModel,
        *,
        window: int,
        micro_batches: int,
        dp: int,
        pp: int,
        alignment: int,
        sample: Sequence[int] | None,
    ) -> VarlenPacker:
        if config.max_delay < 0:
            raise ValueError(f"max_delay must not be negative, got {config.max_delay}")
        if config.max_documents < 1:
            raise ValueError(f"max_documents must be at least 1, got {config.max_documents}")
        return cls(
            cost,
            window=window,
            bins=micro_batches * dp,
            capacity=longest_micro_batch(config, window, alignment),
            thresholds=read_thresholds(config.thresholds, window),
            max_delay=config.max_delay,
            max_documents=config.max_documents,
            dp=dp,
            pp=pp,
        )

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._by_age())

    def _by_age(self) -> list[Item]:
        return sorted([*self._left, *self._queues], key=lambda item: item.serial)

    def pack(self, iteration: int, arrived: Sequence[Piece], draining: bool = False) -> Packed:
        due = self._must_go(iteration)
        leftovers, self._left = self._left, []
        short = self._take_in(arrived, iteration)
        if draining or not self._max_delay:
            due = sorted([*leftovers, *short, *self._queues], key=lambda item: item.serial)
        counts = [0] * len(self._queues.levels)
        for item in due:
            level = self._queues.level_of(item.tokens)
            if level >= 0:
                counts[level] += 1
        bins, left = self._place_due(due)
        due_serials = frozenset(item.serial for item in due)
        leftovers = [item for item in leftovers if item.serial not in due_serials]
        short = [item for item in short if item.serial not in due_serials]
        choice = self._release_full(Choice(counts, bins))
        if self._by_balance:
            choice = choose_release(self._queues, choice, self._situation(iteration, leftovers + short))
        bins = choice.bins
        self._queues.release(choice.counts)
        placed = sum(map(len, bins.items))
        for _ in range(min(self._count - placed - len(leftovers) - len(short), len(self._queues))):
            bins.add(self._queues.pop_oldest())
        left += bins.add_all(sorted(leftovers, reverse=True))
        left += bins.add_all(sorted(short, reverse=True))
        bins.improve()
        self._left = sorted(left, key=lambda item: item.serial)
        put_back = self._put_back(iteration)
        self._price.see_waiting(sum(item.tokens for item in self._by_age()))
        return Packed(assign_ranks(bins.freeze(), self._dp, self._pp), put_back)

    def _take_in(self, arrived: Sequence[Piece], iteration: int) -> list[Item]:
        """Queue the outliers among the arrivals, return the others."""
        items = self._make_items([(piece, iteration) for piece in arrived])
        self._price.see_arrivals(sum(item.tokens for item in items), sum(item.work for item in items))
        return self._sort_in(items)

    def _sort_in(self, items: Sequence[Item]) -> list[Item]:
        short = []
        for item in items:
            if self._queues.level_of(item.tokens) >= 0:
                self._queues.put(item)
            else:
                short.append(item)
        return short

    def _make_items(self, arrivals: Sequence[tuple[Piece, int]]) -> list[Item]:
        lengths = [piece.end - piece.start for piece, _ in arrivals]
        longest = max(lengths, default=0)
        if longest > self._window:
            piece, _ = arrivals[lengths.index(longest)]
            raise ValueError(
                f"document {piece.document} has {longest} tokens, above the window of {self._window}: "
                "split it before packing"
            )
        work = self._cost.work(lengths).tolist()
        first, self._serial = self._serial, self._serial + len(arrivals)
        return [
            Item(w, n, serial, entry, piece)
            for serial, (w, n, (piece, entry)) in enumerate(zip(work, lengths, arrivals, strict=True), first)
        ]

    def _room(self, item: Item) -> int:
        """The share of an iteration that a piece may take up at worst, of `_rooms`.

        A bin refuses a piece only when it holds max_documents, or more than capacity - window tokens. So whatever
        the lengths, pieces added one by one to the shortest bin fit as long as their shares before it sum to at
        most `_rooms`: an iteration can always take that much, oldest first.
        """
        return item.tokens * self._max_documents + self._capacity - self._window

    @property
    def _rooms(self) -> int:
        return self._count * (self._capacity - self._window) * self._max_documents

    def _must_go(self, iteration: int) -> list[Item]:
        """The oldest pieces, as many as must train now so that each of the others still can before its bound."""
        waiting = self._by_age()
        need, before = 0, 0
        for item in waiting:
            later = item.entry + self._max_delay - iteration  # iterations that remain after this one
            share = self._room(item)
            need = max(need, before + share if later <= 0 else before - later * self._rooms)
            before += share
        gone, due = 0, []
        for item in waiting:
            if gone >= need:
                break
            due.append(item)
            gone += self._room(item)
        return due

    def _place_due(self, due: list[Item]) -> tuple[Bins, list[Item]]:
        """Balanced if all fit that way, else oldest first, which fits; returns what is left of an impossible lot."""
        bins = Bins(self._count, self._capacity, self._max_documents)
        left = bins.add_all(sorted(due, reverse=True))
        if left:
            bins = Bins(self._count, self._capacity, self._max_documents)
            left = [item for item in due if not bins.add_shortest(item)]
        return bins, left

    def _release_full(self, must: Choice) -> Choice:
        """A level that holds as many as there are bins gives one to each."""
        counts, bins = must
        for i, level in enumerate(self._queues.levels):
            while len(level) >= self._count > counts[i] and bins.add(level[counts[i]]):
                counts[i] += 1
        return must

    def _situation(self, iteration: int, short: list[Item]) -> Situation:
        return Situation(
            iteration=iteration,
            max_delay=self._max_delay,
            price=self._price.price,
            mean_work=self._price.mean_work(),
            short_work=sum(item.work for item in short),
            short_tokens=sum(item.tokens for item in short),
        )

    def _put_back(self, iteration: int) -> tuple[Piece, ...]:
        """Drop the newest of this iteration's arrivals until all that wait can train within their bound."""
        waiting = self._by_age()
        total = sum(self._room(item) for item in waiting)
        back: list[Item] = []
        while waiting and waiting[-1].entry == iteration:
            total -= self._room(waiting[-1])
            if self._max_delay and total <= self._max_delay * self._rooms:
                break
            back.append(waiting.pop())
        if back:
            keep = [item for item in waiting]
            self._queues = OutlierQueues(self._queues.thresholds)
            self._left = self._sort_in(keep)
        return tuple(item.piece for item in reversed(back))

    def state(self) -> dict[str, Any]:
        waiting = [Waiting(item.piece, item.entry) for item in self._by_age()]
        return {"settings": self._settings(), "waiting": encode(waiting), "price": self._price.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        check_settings(state["settings"], self._settings())
        self._queues = OutlierQueues(self._queues.thresholds)
        self._left = self._sort_in(self._make_items(decode(state["waiting"])))
        self._price.load_state(state["price"])

    def _settings(self) -> dict[str, Any]:
        return {
            "packing": "varlen",
            "window": self._window,
            "global_micro_batches": self._count,
            "max_tokens": self._capacity,
            "max_delay": self._max_delay,
            "max_documents": self._max_documents,
            "thresholds": list(self._queues.thresholds),
        }


def read_thresholds(text: str, window: int) -> tuple[int, ...]:
    """Thresholds (tokens) of `config.thresholds`: "none", "49152,90112", or "auto"."""
    if text == "none":
        return ()
    if text == "auto":
        return tuple(sorted({max(1, int(window * 2 ** (i / 4 - 2))) for i in range(8)}))
    try:
        thresholds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"thresholds {text!r}: give auto, none, or rising token counts such as 49152,90112") from None
    OutlierQueues(thresholds)  # checks that they rise
    return thresholds
