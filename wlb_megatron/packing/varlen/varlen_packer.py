"""Packs variable-length micro-batches and delays outliers (WLB-LLM, algorithm 1, with what the paper leaves open)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, NamedTuple

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import (
    ONE_RANK,
    Grid,
    Packed,
    Ranks,
    check_settings,
    decode,
    most_per_window,
)
from wlb_megatron.packing.varlen.arrange import arrange, assign_ranks, improve_bins
from wlb_megatron.packing.varlen.items import (
    UNBOUNDED,
    Bins,
    Item,
    ItemPacker,
    Limits,
    OutlierQueues,
    by_falling_work,
)
from wlb_megatron.packing.varlen.release import (
    PackedWork,
    ReleaseChoice,
    Situation,
    choose_height,
    choose_release,
)
from wlb_megatron.plan import MicroBatch, Piece, Waiting
from wlb_megatron.workload.cost_model import CostModel

_WORK, _TOKENS, _PIECE = itemgetter(0), itemgetter(1), itemgetter(4)  # of items; faster than access by name


class _Ready(NamedTuple):
    """What trains in any case, by age.

    due: due items, of which counts[i] are still in level i of the queues. Then leftovers and short items that are not
    due.
    """

    due: list[Item]
    counts: list[int]
    leftovers: list[Item]
    short: list[Item]

    def within(self, room: int) -> tuple[_Ready, list[Item]]:
        """The same with as many leftovers and short items, oldest first, as have at most so many tokens; and the
        rest."""
        other_items = [*self.leftovers, *self.short]
        sums = list(accumulate(map(_TOKENS, other_items), initial=0))
        if sums[-1] <= room:
            return self, []
        count = max(bisect_right(sums, room) - 1, 0)
        short_items = other_items[len(self.leftovers) : count]
        return self._replace(leftovers=self.leftovers[:count], short=short_items), other_items[count:]


def lmax(config: WlbConfig, window: int, alignment: int = 1) -> int:
    """Lmax: config.max_tokens or 1.5 windows, down to a multiple of `alignment`. Raises ValueError below 1.25 windows.

    Documents are not cut, so a micro-batch cannot always be filled: with less, documents would pile up.
    """
    usual = int(1.5 * window)
    asked_tokens = usual if config.max_tokens is None else config.max_tokens
    tokens = asked_tokens // alignment * alignment
    least_tokens = -(-5 * window // 4)
    if tokens < least_tokens:
        whose = "1.5 windows" if asked_tokens == usual else f"max_tokens of {asked_tokens}"
        multiples = "" if tokens == asked_tokens else f" ({tokens} tokens in multiples of {alignment})"
        raise WlbError(
            f"{whose}{multiples} is below 1.25 windows ({least_tokens} tokens), too short to pack uncut documents "
            "without an ever longer queue: set --wlb-max-tokens to "
            f"{-(-least_tokens // alignment) * alignment} or more, or train in chunks (--wlb-chunks on)"
        )
    return tokens


class VarlenPacker(ItemPacker):
    """Packs whole documents into micro-batches of different length and similar work.

    In a call of `pack`, short documents and leftovers are ready, and outliers wait in their queues. First go the
    pieces that the bound on delay demands. Then every level that holds as many as there are micro-batches. Then the
    outliers that balance best (release.py). Then the leftovers, then the short documents, by falling work. What does
    not fit is left over, and ages.

    The bound holds for any lengths: see items.py. If documents arrive faster than micro-batches of `capacity`
    tokens can take uncut ones (for example with lengths just above half of it), the newest are put back.
    """

    def __init__(
        self,
        cost: CostModel,
        limits: Limits,
        thresholds: Sequence[int],
        ranks: Ranks = ONE_RANK,
        *,
        per_window: float | None = 1,
        adopt_thresholds: bool = False,
        adopt_capacity: int = 0,
    ) -> None:
        """`thresholds` are those of the outlier queues (tokens), rising. A loaded state brings its own with
        `adopt_thresholds`, and its own Lmax, too, up to `adopt_capacity` tokens."""
        super().__init__(cost, limits, ranks, per_window)
        self.most_pieces = limits.max_documents * most_per_window(self.law, per_window)
        self._adopt_thresholds = adopt_thresholds
        self._adopt_capacity = adopt_capacity
        self._queues = OutlierQueues(thresholds)
        self._left: list[Item] = []

    @property
    def longest_delay(self) -> int:
        return self._limits.max_delay if self.thresholds else 0

    @property
    def thresholds(self) -> tuple[int, ...]:
        return self._queues.thresholds

    def _by_age(self) -> list[Item]:
        return sorted([*self._left, *self._queues], key=lambda item: item.serial)

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        # Batches only grow, so every piece that was promised to train in time still can.
        self._limits = replace(self._limits, bins=bins)
        due_items = self._limits.must_go(self._by_age(), iteration)
        leftovers, self._left = self._left, []
        short_items = self._take_in(arrived, iteration)
        if draining or not self._limits.max_delay:
            due_items = sorted([*leftovers, *short_items, *self._queues], key=lambda item: item.serial)
        counts = [0] * len(self._queues.levels)
        for item in due_items:
            level = self._queues.level_of(item.tokens)
            if level >= 0:
                counts[level] += 1
        last_due = due_items[-1].serial if due_items else -1
        leftovers = [item for item in leftovers if item.serial > last_due]
        short_items = [item for item in short_items if item.serial > last_due]
        ready = _Ready(due_items, counts, leftovers, short_items)
        one_per_window = [self._limits.bins // self._ranks.dp]
        numbers = self.law.counts(one_per_window[0], self._per_window)
        if self._per_window is None:
            numbers = self.law.worthwhile(numbers, self._price.mean_work() // self._ranks.dp)
        grid, left_over = (
            self._balance(iteration, ready)
            if numbers == one_per_window
            else self._fit(iteration, ready, numbers)
        )
        self._left = self._sort_in(sorted(left_over, key=lambda item: item.serial))
        put_back = self._put_back(iteration)
        self._price.see_waiting(sum(item.tokens for item in self._by_age()))
        return Packed(grid, put_back)

    def _fit(self, iteration: int, ready: _Ready, numbers: Sequence[int]) -> tuple[Grid, list[Item]]:
        """One of these numbers of micro-batches a rank, by the predicted step (release.py, arrange.py)."""
        due_items, counts, leftovers, short_items = ready
        certain = [*due_items, *leftovers, *short_items]
        lot = PackedWork(
            sum(map(_WORK, certain)), sum(map(_TOKENS, certain)), max(map(_WORK, certain), default=0)
        )
        now = self._situation(iteration, leftovers + short_items)
        counts = choose_height(self._queues, counts, lot, now, self.law, numbers, self._ranks.dp)
        due_serials = frozenset(item.serial for item in due_items)
        released = [item for item in self._queues.release(counts) if item.serial not in due_serials]
        while len(due_items) + len(released) + len(leftovers) + len(short_items) < self._limits.bins and len(
            self._queues
        ):
            released.append(self._queues.pop_oldest())
        room = self._most_tokens() - sum(map(_TOKENS, due_items)) - sum(map(_TOKENS, released))
        (_, _, leftovers, short_items), waits = ready.within(room)
        other_items = by_falling_work([*released, *leftovers, *short_items])

        def fill(number: int) -> tuple[Bins, list[Item]]:
            bins, left_over = self._place_due(due_items, number)
            return bins, left_over + bins.add_all(other_items)

        works = [item.work for item in (*due_items, *other_items)]
        grid, left_over = arrange(
            fill,
            numbers,
            (len(works), sum(works), max(works, default=0)),
            self._limits,
            self._ranks,
            self.law,
        )
        return grid, [*left_over, *waits]

    def _balance(self, iteration: int, ready: _Ready) -> tuple[Grid, list[Item]]:
        """Packs as many micro-batches as windows, of similar work."""
        due_items, counts, leftovers, short_items = ready
        bins, left_over = self._place_due(due_items, self._limits.bins)
        now = self._situation(iteration, leftovers + short_items)
        counts, bins = self._choose(ReleaseChoice(counts, bins), now)
        self._queues.release(counts)
        for _ in range(
            min(self._limits.bins - len(bins.items) - len(leftovers) - len(short_items), len(self._queues))
        ):
            bins.add(self._queues.pop_oldest())
        (_, _, leftovers, short_items), waits = ready.within(self._most_tokens() - sum(bins.tokens))
        left_over += [*waits, *bins.add_all(by_falling_work(leftovers))]
        left_over += bins.add_all(by_falling_work(short_items))
        contents = bins.contents()
        improve_bins(contents, bins.work, self._limits.capacity, self._limits.max_documents)
        micro_batches = [
            MicroBatch(tuple(map(_PIECE, items)), w) for items, w in zip(contents, bins.work, strict=True)
        ]
        return assign_ranks(micro_batches, self._ranks), left_over

    def _take_in(self, arrived: Sequence[Piece], iteration: int) -> list[Item]:
        items = self._items([Waiting(piece, iteration) for piece in arrived])
        self._price.see_arrivals(sum(map(_TOKENS, items)), sum(map(_WORK, items)))
        return self._sort_in(items)

    def _sort_in(self, items: Sequence[Item]) -> list[Item]:
        """Queue the outliers, return the others."""
        shortest_outlier = self._queues.thresholds[0] if self._queues.thresholds else UNBOUNDED
        for item in items:
            if item.tokens >= shortest_outlier:
                self._queues.put(item)
        return [item for item in items if item.tokens < shortest_outlier]

    def _place_due(self, due_items: list[Item], number: int) -> tuple[Bins, list[Item]]:
        """Places due items balanced if all fit that way, else oldest first, which fits.

        Returns what is left if even that is impossible.
        """
        bins = Bins(number, self._limits.capacity, self._limits.max_documents)
        left_over = bins.add_all(by_falling_work(due_items))
        if left_over:
            bins = Bins(number, self._limits.capacity, self._limits.max_documents)
            left_over = [item for item in due_items if not bins.add_shortest(item)]
        return bins, left_over

    def _choose(self, must: ReleaseChoice, now: Situation) -> ReleaseChoice:
        """What trains now: the due documents, already placed, what full levels give, and what balances best."""
        full_levels = [len(level) >= self._limits.bins for level in self._queues.levels]
        return choose_release(self._queues, self._release_levels(must, now, full_levels), now)

    def _release_levels(
        self, must: ReleaseChoice, now: Situation, giving_levels: Sequence[bool]
    ) -> ReleaseChoice:
        """These levels give one to each bin, or what they have."""
        counts, bins = must
        room = now.most_tokens - sum(bins.tokens)
        for i, level in enumerate(self._queues.levels):
            wanted_count = self._limits.bins if giving_levels[i] else 0
            for item in islice(level, counts[i], wanted_count):
                if item.tokens > room or not bins.add(item):
                    break
                counts[i] += 1
                room -= item.tokens
        return must

    def _situation(self, iteration: int, short_items: list[Item]) -> Situation:
        return Situation(
            iteration=iteration,
            max_delay=self._limits.max_delay,
            price=self._price.price,
            mean_work=self._price.mean_work(),
            short_work=sum(map(_WORK, short_items)),
            short_tokens=sum(map(_TOKENS, short_items)),
            short_largest=max(map(_WORK, short_items), default=0),
            global_tokens=self._limits.bins * self._limits.window,
            most_tokens=self._most_tokens(),
        )

    def _most_tokens(self) -> int:
        """Of a step, unless the bound on delay demands more."""
        if self.batch_spread is None:
            return UNBOUNDED
        return self._limits.bins * self._limits.window * self.batch_spread // 100

    def _put_back(self, iteration: int) -> tuple[Piece, ...]:
        """Drop those of this iteration's arrivals that cannot be promised to train within their bound."""
        waiting_items = self._by_age()
        count = self._limits.too_many(waiting_items, iteration)
        if not count:
            return ()
        self._queues = OutlierQueues(self._queues.thresholds)
        self._left = self._sort_in(waiting_items[:-count])
        return tuple(item.piece for item in waiting_items[-count:])

    def load_state(self, state: dict[str, Any]) -> None:
        saved = state["settings"]
        own_settings = self._settings()
        if saved.get("chunks"):  # a plan with chunks leaves only waiting documents
            saved = own_settings | {name: saved[name] for name in ("packing", "window")}
        thresholds = saved.get("thresholds", []) if self._adopt_thresholds else self._queues.thresholds
        capacity = saved.get("max_tokens", 0) if self._adopt_capacity else self._limits.capacity
        if capacity > max(self._limits.capacity, self._adopt_capacity):
            raise WlbError(
                f"the saved run's micro-batches hold up to {capacity} tokens, but {self._adopt_capacity} fit the "
                "memory of this layout: raise --context-parallel-size or use --recompute-granularity full; if they "
                f"do fit, set --wlb-max-tokens {capacity}"
            )
        check_settings(saved, self._settings() | {"thresholds": list(thresholds), "max_tokens": capacity})
        self._limits, self.max_tokens = replace(self._limits, capacity=capacity), capacity
        self._queues = OutlierQueues(thresholds)
        self._left = self._sort_in(self._items(decode(state["waiting"])))
        self._price.load_state(state["price"])

    def _settings(self) -> dict[str, Any]:
        return {
            "packing": "varlen",
            "window": self._limits.window,
            "max_tokens": self._limits.capacity,
            "max_delay": self._limits.max_delay,
            "max_documents": self._limits.max_documents,
            "thresholds": list(self._queues.thresholds),
            "release": "balance",  # states of releases before may have another one
        }
