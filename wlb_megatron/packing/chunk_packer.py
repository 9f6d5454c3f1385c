"""Packs documents as they arrive into micro-batches of similar work: long ones in chunks, none delayed.

A chunk [s, e) of a document attends to all of [0, e), so its work is the document's work up to e minus that up to s.
Chunks of equal work get shorter towards the end. Example: with work d + d*d/8, a document of 8 tokens has work 16;
two chunks of 8 are [0, 5) and [5, 8), of 8.1 and 7.9.

Micro-batches that share a document form a group, whose backwards run last first. Each group has one document in
chunks, so groups are not chained. Documents that stay whole fill all micro-batches to the same work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.packing.packer import (
    ONE_RANK,
    Packed,
    Ranks,
    check_settings,
    decode,
    most_per_window,
)
from wlb_megatron.packing.varlen.arrange import TRIED
from wlb_megatron.packing.varlen.items import (
    Bins,
    Filled,
    Item,
    ItemPacker,
    Limits,
    by_falling_work,
)
from wlb_megatron.pipeline.step_law import most_held
from wlb_megatron.plan import Piece, Waiting
from wlb_megatron.workload.cost_model import CostModel

_WORK, _TOKENS = itemgetter(0), itemgetter(1)  # of items; faster than access by name

HELD = 110
"""The most that a stage should hold at once, in percent of the windows in flight (one per stage, interleaved more).
With whole documents and an Lmax of 1.5 windows a schedule may hold 150."""


class _Tried(NamedTuple):
    price: tuple[int, int, int, int]
    grid: Sequence[Sequence[Filled]]


_WORST = (1 << 62, 0, 0, 0)


class ChunkPacker(ItemPacker):
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
        """A micro-batch has at most limits.capacity tokens; longer documents come in chunks. `longest_tokens` is the
        longest document's length if that is above the window."""
        super().__init__(cost, limits, ranks, per_window)
        self.most_pieces = limits.max_documents * most_per_window(self.law, None, always=True)
        self.held_tokens = held(limits.window, limits.bins // ranks.dp, self.law.held_at_once, longest_tokens)
        self._waiting: list[Item] = []

    def _by_age(self) -> list[Item]:
        return self._waiting

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        self._limits = replace(self._limits, bins=bins)
        items = [*self._waiting, *self._items([Waiting(piece, iteration) for piece in arrived])]
        ranks = spread_over_ranks(by_falling_work(items), self._ranks.dp)
        share = max(sum(map(_WORK, rank)) for rank in ranks)
        windows = bins // self._ranks.dp
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


IntArray = npt.NDArray[np.int64]

WHOLE = 115
"""A document stays whole if its work is at most this percentage of a micro-batch's share."""

Unit = tuple[Filled, ...]
"""Micro-batches that stay adjacent, in order: a group, or a single one."""


def spread_over_ranks(items: Sequence[Item], dp: int) -> list[list[Item]]:
    """Assigns whole documents to data-parallel ranks, by falling work, each to the rank with the least work so far."""
    ranks: list[list[Item]] = [[] for _ in range(dp)]
    heap = [(0, rank) for rank in range(dp)]
    for item in items:
        work, rank = heap[0]
        ranks[rank].append(item)
        heapq.heapreplace(heap, (work + item[0], rank))
    return ranks


def fill(
    items: Sequence[Item],
    count: int,
    capacity: int,
    most_documents: int,
    cost: CostModel,
    *,
    all_fit: bool = False,
) -> tuple[list[Unit], list[Item]]:
    """`count` micro-batches of similar work from one rank's documents, and the documents that did not fit.

    items: whole documents by falling work. capacity: tokens of a micro-batch. all_fit: count is enough_for them, and
    none may be left out. There are fewer units than micro-batches if some are groups. A micro-batch may be empty if
    there are fewer documents and chunks than micro-batches.
    """
    works, tokens = (
        np.fromiter(map(column, items), dtype=np.int64, count=len(items)) for column in (_WORK, _TOKENS)
    )
    full_work = int(cost.work([capacity])[0])
    chunks = chunk_counts(works, tokens, count, capacity, full_work, most_documents if all_fit else 0)
    split = np.flatnonzero(chunks > 1).tolist()
    if sum(chunks[split].tolist()) > count:
        return [], list(items)
    bins = Bins(count, capacity, most_documents)
    groups: list[range] = []
    first_bin = 0
    for index in split:
        number = int(chunks[index])
        for place, chunk in enumerate(cut(items[index], number, cost, capacity), start=first_bin):
            bins.place(chunk, place)
        groups.append(range(first_bin, first_bin + number))
        first_bin += number
    left_out = bins.add_all(compress(items, (chunks == 1).tolist()) if split else items)
    micro_batches = list(map(Filled, bins.contents(), bins.work, bins.tokens))
    units = [tuple(micro_batches[place] for place in group) for group in groups]
    return units + [(micro_batch,) for micro_batch in micro_batches[first_bin:]], left_out


def enough_for(tokens: IntArray, chunks: IntArray, capacity: int, most_documents: int) -> int:
    """So many micro-batches hold documents of these tokens, each in so many chunks, whatever their lengths.

    Each chunk has its own. Whole documents go by falling work, so by falling length, to the micro-batch with the fewest
    tokens if no lighter one has space. If one does not fit there either, every micro-batch has `most_documents`, or
    documents at least as long as this one and no space for it: more than half of `capacity`. Twice the tokens over
    `capacity`, and one for each `most_documents`, thus suffice; or one for each document. Example: capacity 3, tokens 2
    11 15 in 1 4 5 chunks: 10. Chunks 1 1 1 1 of tokens 1 1 1 1: 3 + 1, with most_documents 4096.
    """
    whole_tokens = tokens[chunks == 1]
    sharing = -(-2 * int(whole_tokens.sum()) // capacity) + -(-len(whole_tokens) // most_documents)
    return int(chunks[chunks > 1].sum()) + min(len(whole_tokens), sharing)


def chunk_counts(
    works: npt.ArrayLike,
    tokens: npt.ArrayLike,
    count: int,
    capacity: int,
    full_work: int = 1 << 62,
    most_documents: int = 0,
) -> IntArray:
    """int64[n]: into how many chunks each document is cut; 1: it stays whole. works, tokens: int64[n].

    The number is the one whose chunks come closest to a micro-batch's share of the work, but at least what `capacity`
    requires. With chunks of equal work the first is the longest and has at most `full_work`, a document of `capacity`
    tokens. If all chunks are more than `count`, the documents whose chunks grow least give up one, if any can.
    `most_documents` is the limit of a micro-batch, if `count` must be enough_for all documents; with 0 small ones are
    not counted.
    """
    works, tokens = np.asarray(works, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    share = max(1, int(works.sum()) // count)
    by_tokens, by_capacity = -(-tokens // capacity), -(-works // full_work)
    by_work = np.where(
        100 * works <= WHOLE * share, 1, np.maximum(2, np.rint(works / share).astype(np.int64))
    )
    counts = np.minimum(tokens, np.maximum.reduce((by_tokens, by_capacity, by_work)))
    # Small documents share a micro-batch with chunks; the others need their own.
    large = np.flatnonzero((2 * works >= share) | (counts > 1)).tolist()

    def needed() -> int:
        if most_documents:
            return enough_for(tokens, counts, capacity, most_documents)
        return int(counts[large].sum())

    while needed() > count:
        open_to = [i for i in large if counts[i] > max(1, by_tokens[i])]
        if not open_to:
            break
        i = min(open_to, key=lambda i: (works[i] / (counts[i] - 1), i))
        counts[i] -= 1
    # Every micro-batch gets something: if there are too few chunks, cut one more document, or one into more chunks.
    while len(counts) and counts.sum() < count:
        open_to = np.flatnonzero(counts < tokens).tolist()
        if not open_to:
            break
        counts[max(open_to, key=lambda i: (works[i] / counts[i], -i))] += 1
    return counts


def cut(item: Item, number: int, cost: CostModel, capacity: int = 1 << 62) -> list[Item]:
    """The document in `number` chunks of about equal work, in order, none empty or longer than `capacity` tokens.

    Chunks end at whole tokens.
    """
    length = item.tokens
    document_work = length + length * length / cost.quadratic_at
    ends: list[int] = []
    for chunk in range(1, number):
        # Solve d + d*d/q = w for d. Sums, products and square roots round the same on every host.
        work = document_work * chunk / number
        end = int((math.sqrt(cost.quadratic_at * (cost.quadratic_at + 4 * work)) - cost.quadratic_at) / 2)
        before, after = (ends[-1] if ends else 0), number - chunk
        earliest = max(before + 1, length - after * capacity)
        ends.append(min(max(end, earliest), length - after, before + capacity))
    ends.append(length)
    works = cost.work(ends).tolist()
    # A document's own cost, for each chunk.
    own_cost = int(cost.work([1])[0] - CostModel(cost.quadratic_at).work([1])[0])
    chunks, start = [], 0
    for end, upto, before in zip(ends, works, [own_cost, *works], strict=False):
        piece = item.piece._replace(
            start=item.piece.start + start, end=item.piece.start + end, prefix=item.piece.prefix + start
        )
        chunks.append(item._replace(work=upto - before + own_cost, tokens=end - start, piece=piece))
        start = end
    return chunks


def in_order(units: Sequence[Unit]) -> tuple[list[Filled], tuple[int, ...]]:
    """Micro-batches with the least work first and last and groups adjacent, and the sizes of the groups."""
    mean_works = [sum(micro_batch.work for micro_batch in unit) // len(unit) for unit in units]
    rising = sorted(range(len(units)), key=lambda i: (mean_works[i], i))
    order = [units[i] for i in rising[::2] + rising[1::2][::-1]]
    return [micro_batch for unit in order for micro_batch in unit], tuple(map(len, order))
