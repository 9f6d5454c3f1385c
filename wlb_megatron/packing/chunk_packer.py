"""Packs documents as they arrive into micro-batches of similar work: long ones in chunks, none delayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from wlb_megatron.packing.chunked import Filled, enough_for, fill, in_order, spread_over_ranks
from wlb_megatron.packing.packer import (
    ONE_RANK,
    Batch,
    Packed,
    Packer,
    Ranks,
    check_settings,
    most_per_window,
)
from wlb_megatron.packing.saved_pieces import Waiting, decode, encode
from wlb_megatron.packing.varlen.delay_bound import DelayPrice, Limits
from wlb_megatron.packing.varlen.outlier_queues import Item, by_falling_work, items_of
from wlb_megatron.pipeline.step_law import most_held
from wlb_megatron.plan import Piece
from wlb_megatron.workload.cost_model import CostModel

_WORK, _TOKENS = itemgetter(0), itemgetter(1)  # of items; faster than access by name

TRIED = 3
"""The most numbers of micro-batches that are packed and compared; a rough estimate chooses them."""

HELD = 110
"""The most that a stage should hold at once, in percent of the windows in flight (one per stage, interleaved more).
With whole documents and an Lmax of 1.5 windows a schedule may hold 150."""


class _Tried(NamedTuple):
    price: tuple[int, int, int, int]
    grid: Sequence[Sequence[Filled]]


_WORST = (1 << 62, 0, 0, 0)


class ChunkPacker(Packer):
    """Trains everything that arrived in its iteration, in the number of micro-batches with the least predicted step.

    If Lmax or the limit on documents is so low that something does not fit, there are as many micro-batches as surely
    hold all. All chunks of a document are in one iteration, on one data-parallel rank, in order. Its states are the
    varlen packer's; only a loaded one has pieces that wait.
    """

    def __init__(
        self,
        cost: CostModel,
        limits: Limits,
        ranks: Ranks = ONE_RANK,
        *,
        per_window: float | None = None,
        longest_tokens: int = 0,
    ) -> None:
        """A micro-batch has at most limits.capacity tokens; longer documents come in chunks. `per_window` is the
        number of micro-batches for each window, by default as many as give the least predicted step. `longest_tokens`
        is the longest document's length if that is above the window."""
        self._cost = cost
        self._limits = limits
        self.batch_spread = limits.spread
        self._ranks = ranks
        self._per_window = per_window
        self.bins, self.max_tokens = limits.bins, limits.capacity
        self.law = ranks.law(cost)
        self.most_pieces = limits.max_documents * most_per_window(self.law, None, always=True)
        self.held_tokens = held(limits.window, limits.bins // ranks.dp, self.law.held_at_once, longest_tokens)
        self._waiting: list[Item] = []
        self._serial = 0

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._waiting)

    def pack(self, iteration: int, arrived: Sequence[Piece], batch: Batch, draining: bool = False) -> Packed:
        self._limits = replace(self._limits, bins=batch.bins)
        items = [*self._waiting, *self._items([Waiting(piece, iteration) for piece in arrived])]
        ranks = spread_over_ranks(by_falling_work(items), self._ranks.dp)
        share = max(sum(map(_WORK, rank)) for rank in ranks)
        windows = batch.bins // self._ranks.dp
        counts = self.law.counts(windows, self._per_window)
        rough = sorted(counts, key=lambda count: (self.law.estimate(count, share), count))[:TRIED]
        best_try = _Tried(_WORST, ())
        for count in rough:
            # Uneven works take longer than the estimate's even ones, of which no layer is recomputed at best.
            if best_try.price > (0, 0, 0, self.law.ideal(self.law.estimate(count, share))):
                best_try = self._better(best_try, ranks, count)
        if best_try.price[:3] > (0, 0, 0):
            # Documents longer than a micro-batch may need more micro-batches than requested.
            for count in self.law.counts(windows, None, always=True):
                if count not in rough:
                    best_try = self._better(best_try, ranks, count)
        left_out, empty_count, *_ = best_try.price
        if left_out:
            count = self._enough_for(ranks, self._limits.max_documents)
            best_try = self._better(best_try, ranks, count)
            if best_try.price[0]:
                best_try = self._better(best_try, ranks, count, all_fit=True)
        elif empty_count:  # one micro-batch for each document or chunk may be fewer
            best_try = self._better(best_try, ranks, self._enough_for(ranks, 1))
        self._waiting = []
        return Packed(tuple(tuple(bin_.micro_batch() for bin_ in row) for row in best_try.grid))

    def _enough_for(self, ranks: Sequence[Sequence[Item]], most_documents: int) -> int:
        """Micro-batches of a rank that hold each rank's documents, cut only if they are too long (see enough_for)."""
        capacity, enough = self._limits.capacity, 1
        for rank in ranks:
            tokens = np.fromiter(map(_TOKENS, rank), dtype=np.int64, count=len(rank))
            enough = max(enough, enough_for(tokens, -(-tokens // capacity), capacity, most_documents))
        return -(-enough // self.law.group) * self.law.group

    def _better(
        self, best_try: _Tried, ranks: Sequence[Sequence[Item]], count: int, *, all_fit: bool = False
    ) -> _Tried:
        """The best so far, or the grid of `count` micro-batches per rank if its price is lower. all_fit: see fill.

        price: documents left out, empty micro-batches, tokens held above the limit, and the predicted step, in this
        order. None of them falls as ranks are added, so remaining ranks are skipped once it is too high.
        """
        columns: list[list[Filled]] = []
        left_out = 0
        price = (0, 0, 0, 0)
        limits = self._limits.capacity, self._limits.max_documents
        for items in ranks:
            units, out = fill(items, count, *limits, self._cost, all_fit=all_fit)
            left_out += len(out)
            column, groups = in_order(units)
            columns.append(column)
            if len(column) == count:
                _, empty_count, excess, step = price
                tokens = [bin_.tokens for bin_ in column]
                step = max(step, self.law.rank([bin_.work for bin_ in column], groups, tokens))
                peak = most_held(tokens, groups, self.law)
                empty_count += sum(not bin_.items for bin_ in column)
                price = left_out, empty_count, max(excess, peak - self.held_tokens), step
            else:
                price = _WORST
            if price >= best_try.price:
                return best_try
        return _Tried(price, tuple(zip(*columns, strict=True)))

    def _items(self, waiting_pieces: Sequence[Waiting]) -> list[Item]:
        first, self._serial = self._serial, self._serial + len(waiting_pieces)
        return items_of(self._cost, waiting_pieces, first)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        settings, items = self._settings(), self._waiting  # a list that is not changed, but replaced
        return lambda: {
            "settings": settings,
            "waiting": encode(Waiting(item.piece, item.entry) for item in items),
            "price": DelayPrice().state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Everything that waited trains in the next iteration, whatever its bound on delay."""
        check_settings(state["settings"], {name: self._settings()[name] for name in ("packing", "window")})
        self._waiting = self._items(decode(state["waiting"]))

    def _settings(self) -> dict[str, Any]:
        return {
            "packing": "varlen",
            "window": self._limits.window,
            "max_tokens": self._limits.capacity,
            "max_documents": self._limits.max_documents,
            "chunks": True,
        }


def held(window: int, windows: int, at_once: int, longest_tokens: int = 0) -> int:
    """The most tokens that a stage should hold at once.

    A data-parallel rank has `windows` in an iteration; the schedule by itself holds `at_once` of them
    (StepLaw.held_at_once). The longest document has `longest_tokens`. A document longer than the window has a group
    that spans most of the iteration, and what ran before it is also held. The document may cross the end of the rank's
    share, and then adds to it. Both are then in flight.
    """
    return (
        windows * window + longest_tokens
        if longest_tokens > window
        else min(windows, at_once) * window * HELD // 100
    )
