"""Cuts long documents into chunks of similar work, each in its own micro-batch, in order.

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
from itertools import compress
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.packing.varlen.bins import Bins
from wlb_megatron.packing.varlen.outlier_queues import Item
from wlb_megatron.plan import MicroBatch
from wlb_megatron.workload.cost_model import CostModel

IntArray = npt.NDArray[np.int64]

WHOLE = 115
"""A document stays whole if its work is at most this percentage of a micro-batch's share."""


_WORK, _TOKENS, _PIECE = itemgetter(0), itemgetter(1), itemgetter(4)  # of items; faster than access by name


class Filled(NamedTuple):
    """A planned micro-batch. Several numbers of micro-batches are packed for one plan."""

    items: list[Item]
    work: int
    tokens: int

    def micro_batch(self) -> MicroBatch:
        return MicroBatch(tuple(map(_PIECE, self.items)), self.work)


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
