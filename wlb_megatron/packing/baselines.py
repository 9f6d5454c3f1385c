"""Packs fixed windows as Megatron does (original), or balanced over K global batches (fixed-greedy).

Every window holds exactly `window` tokens. A document that crosses a window's end is cut there. The rest is a new
piece, with its own mask and positions from 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from wlb_megatron.packing.packer import (
    Batch,
    Packed,
    Packer,
    PackingJob,
    check_settings,
    decode,
    decode_windows,
    encode,
    encode_windows,
)
from wlb_megatron.packing.varlen.arrange import assign_ranks, in_given_order
from wlb_megatron.plan import MicroBatch, Piece, Waiting
from wlb_megatron.workload.cost_model import CostModel


def cut(piece: Piece, tokens: int) -> tuple[Piece, Piece]:
    """The first `tokens` tokens of a piece, and the rest: [2, 10) cut at 3 is [2, 5) and [5, 10)."""
    cut_token = piece.start + tokens
    return piece._replace(end=cut_token), piece._replace(start=cut_token)


def price(pieces: Sequence[Piece], cost: CostModel) -> int:
    """Work of a micro-batch of these pieces."""
    return int(cost.work([piece.end - piece.start for piece in pieces]).sum())


def cut_windows(
    items: Sequence[Waiting], window: int, count: int, max_documents: int
) -> tuple[list[list[Waiting]], list[Waiting]]:
    """At most `count` windows of `window` tokens, in order, cutting the piece that crosses an end; and what remains.

    Example: window 8, pieces of 6, 5, 5 tokens: [6, 2], [3, 5], nothing remains. Only the last window may be short,
    or one that reached max_documents pieces.
    """
    windows: list[list[Waiting]] = []
    room = 0
    for index, item in enumerate(items):
        while True:
            if not room:
                if len(windows) == count:
                    return windows, [item, *items[index + 1 :]]
                windows.append([])
                room = window
            fits = item.piece.tokens <= room
            head, tail = (item.piece, item.piece) if fits else cut(item.piece, room)
            windows[-1].append(item._replace(piece=head))
            room = 0 if len(windows[-1]) == max_documents else room - head.tokens
            if fits:
                break
            item = item._replace(piece=tail)
    return windows, []


def keep_one_window(
    remainder: list[Waiting], window: int, iteration: int
) -> tuple[list[Waiting], tuple[Piece, ...]]:
    """What waits after a cut, at most a window's tokens, and what is put back beyond that.

    Only this iteration's arrivals, which come last, are put back; earlier ones have been counted, and stay. More than
    a window's tokens remain only if windows were closed by their number of documents.
    """
    tokens = 0
    for index, item in enumerate(remainder):
        if tokens >= window and item.entry == iteration:
            return remainder[:index], tuple(item.piece for item in remainder[index:])
        tokens += item.piece.tokens
    return remainder, ()


def freeze(windows: Sequence[Sequence[Waiting]], count: int, cost: CostModel) -> list[MicroBatch]:
    """Micro-batches of these windows, with empty ones added up to `count`."""
    contents = [tuple(item.piece for item in window) for window in windows]
    contents += [()] * (count - len(windows))
    return [MicroBatch(pieces, price(pieces, cost)) for pieces in contents]


class WindowPacker(Packer):
    """What packers of fixed windows share: a step has a global batch's tokens, so nothing bounds them."""

    name = "original"

    def __init__(self, job: PackingJob) -> None:
        self._cost = job.cost
        self._max_documents = self.most_pieces = job.config.max_documents
        self._window = self.max_tokens = job.window
        self.bins = job.bins
        self._ranks = job.ranks
        self.law = job.ranks.law(job.cost)
        self._waiting: list[Waiting] = []  # in no window yet

    @property
    def waiting(self) -> tuple[Piece, ...]:
        return tuple(item.piece for item in self._waiting)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        settings, waiting_pieces = self._settings(), tuple(self._waiting)
        return lambda: {"settings": settings, "waiting": encode(waiting_pieces)}

    def load_state(self, state: dict[str, Any]) -> None:
        check_settings(state["settings"], self._settings())
        self._waiting = decode(state["waiting"])

    def _settings(self) -> dict[str, Any]:
        return {"packing": self.name, "window": self._window, "max_documents": self._max_documents}


class OriginalPacker(WindowPacker):
    """Windows filled in arrival order, given to ranks in that order."""

    def pack(self, iteration: int, arrived: Sequence[Piece], batch: Batch, draining: bool = False) -> Packed:
        self._waiting += (Waiting(piece, iteration) for piece in arrived)
        windows, remainder = cut_windows(self._waiting, self._window, batch.bins, self._max_documents)
        self._waiting, put_back = keep_one_window(remainder, self._window, iteration)
        return Packed(in_given_order(freeze(windows, batch.bins, self._cost), self._ranks.dp), put_back)


class FixedGreedyPacker(WindowPacker):
    """Balances windows of K global batches at once, then returns them over K iterations. K = config.balance_batches.

    It starts from the windows that `original` would make of K global batches, with the same cuts (the paper's
    baseline repacks such samples). What crosses the end of the last one waits, so no piece waits forever. Pieces go
    by falling work to the window with the least work that has space, and are cut again if the space is smaller. The
    new windows are grouped by work, so that those of one iteration are similar. The groups are ordered by the id of
    their longest document, which is unrelated to work: no curriculum.
    """

    name = "fixed-greedy"

    def __init__(self, job: PackingJob) -> None:
        super().__init__(job)
        self.intake_batches = job.config.balance_batches
        self._planned: list[list[Waiting]] = []  # windows of the coming iterations, in order

    @property
    def waiting(self) -> tuple[Piece, ...]:
        items = [item for window in self._planned for item in window] + self._waiting
        return tuple(item.piece for item in sorted(items, key=lambda item: item.entry))

    def pack(self, iteration: int, arrived: Sequence[Piece], batch: Batch, draining: bool = False) -> Packed:
        self._waiting += (Waiting(piece, iteration) for piece in arrived)
        put_back: tuple[Piece, ...] = ()
        if len(self._planned) < batch.bins:  # none, or the short end of a finite stream
            self._waiting = [item for window in self._planned for item in window] + self._waiting
            put_back = self._plan_windows(iteration, batch)
        now, self._planned = self._planned[: batch.bins], self._planned[batch.bins :]
        return Packed(assign_ranks(freeze(now, batch.bins, self._cost), self._ranks), put_back)

    def _plan_windows(self, iteration: int, batch: Batch) -> tuple[Piece, ...]:
        count = batch.bins * max(batch.iterations, 1)  # 0 where a finite stream ended before
        goods, remainder = cut_windows(self._waiting, self._window, count, self._max_documents)
        items = [item for window in goods for item in window]
        filled, left_over = self._fill(items, len(goods), batch.bins)
        # Pieces that are cut again may exceed the windows' limit on documents. Where a finite stream ends there are
        # spare windows for them: no piece may wait while a window is empty.
        for windows in range(len(goods) + 1, count + 1):
            if not left_over:
                break
            filled, left_over = self._fill(items, windows, batch.bins)
        remainder, put_back = keep_one_window(remainder, self._window, iteration)
        self._waiting = left_over + remainder
        self._planned = self._order(filled, batch.bins)
        return put_back

    def _order(self, windows: list[list[Waiting]], bins: int) -> list[list[Waiting]]:
        work = [price([item.piece for item in window], self._cost) for window in windows]
        alike = [windows[i] for i in sorted(range(len(windows)), key=lambda i: (work[i], i))]
        groups = [alike[begin : begin + bins] for begin in range(0, len(alike), bins)]
        short_group = groups.pop() if groups and len(groups[-1]) < bins else []  # the end of a finite stream
        groups.sort(
            key=lambda group: max((item.piece.tokens, item.piece) for window in group for item in window)[1]
        )
        return [window for group in groups for window in group] + short_group

    def _fill(
        self, items: list[Waiting], windows: int, bins: int
    ) -> tuple[list[list[Waiting]], list[Waiting]]:
        """Items in this many windows, of which an iteration takes `bins`; and what did not fit."""
        empty_windows: list[list[Waiting]] = [[] for _ in range(windows)]
        return fill_greedily(items, empty_windows, self._window, self._max_documents, self._cost)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        # Windows are not changed once they are planned.
        state, planned_windows = super().snapshot(), tuple(self._planned)
        return lambda: {**state(), "planned": encode_windows(planned_windows)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._planned = decode_windows(state["planned"])

    def _settings(self) -> dict[str, Any]:
        return {
            "packing": self.name,
            "window": self._window,
            "balance_batches": self.intake_batches,
            "max_documents": self._max_documents,
        }


def fill_greedily(
    items: Sequence[Waiting], windows: list[list[Waiting]], capacity: int, max_documents: int, cost: CostModel
) -> tuple[list[list[Waiting]], list[Waiting]]:
    """Assigns items by falling work, each to the window with the least work that has space, cut if the space is
    smaller.

    What is cut off goes to the next window at once. Windows may already hold items. Also returns what fits in no
    window. Example: capacity 8, items of 6, 5, 5 tokens give [6, 2] and [5, 3]: the last is cut, and its rest is new.
    """
    lengths = [item.piece.tokens for item in items]
    work = cost.work(lengths).tolist()
    heap = []
    for i, window in enumerate(windows):
        room = capacity - sum(item.piece.tokens for item in window)
        if room and len(window) < max_documents:
            heap.append((price([item.piece for item in window], cost), i, room))
    heapq.heapify(heap)
    left_over = []
    for index in sorted(range(len(items)), key=lambda i: (-work[i], i)):
        item, tokens, extra = items[index], lengths[index], work[index]
        while heap:
            total, i, room = heapq.heappop(heap)
            if tokens <= room:
                windows[i].append(item)
                if tokens < room and len(windows[i]) < max_documents:
                    heapq.heappush(heap, (total + extra, i, room - tokens))
                break
            head, tail = cut(item.piece, room)
            windows[i].append(item._replace(piece=head))
            item = item._replace(piece=tail)
            tokens -= room
            extra = int(cost.work(tokens))
        else:
            left_over.append(item)
    return windows, sorted(left_over, key=lambda item: item.entry)
