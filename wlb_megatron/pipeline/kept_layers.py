"""Chooses how many layers of each micro-batch a pipeline stage recomputes, so that the step fits its memory.

A stage runs forwards and backwards in a known order (pipeline/orders.py). From a micro-batch's forward to its backward
the stage holds what its layers keep: all activations of a kept layer, only the input of a recomputed one. So what it
holds at each event is known before the step, and so is how many more layers each micro-batch can keep.

Example: 2 stages, micro-batches of 4, 4, 8 tokens, one layer a stage, 10 bytes a kept token, 1 a recomputed one. The
first stage runs F0 F1 B0 F2 B1 B2. With all recomputed it holds at most 4 + 8 = 12 bytes. With 90 bytes to use, it can
keep micro-batches 0 and 2 (40 + 4, then 4 + 80), but not 1 and 2 (40 + 80); micro-batch 1 is recomputed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import Step, documents_in_chunks, grouped_orders
from wlb_megatron.plan import MicroBatch
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.memory import StageMemory

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ROUNDS = 5
"""How often layers are kept in another order; the best is taken. The first order prices all events alike, the next by
how full they were. The last goes by what is saved alone: where little fits, one large item can be worth more than all
that fit beside it. More gained nothing on 400 random steps."""


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch on the fullest rank of those that must keep the same layers.

    Args:
        tokens: held by the rank.
        work: the micro-batch's, in the cost model's units; what recomputing one of its layers costs is proportional to
            it.
        chunk_tokens: those of the tokens that are in chunks of documents.
        earlier: tokens before these chunks, held by the rank.
        linear: the part of the work that does not grow with the square of a document's length.
    """

    tokens: int
    work: int
    chunk_tokens: int = 0
    earlier: int = 0
    linear: int = 0


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """recomputed[m][c]: layers of model chunk c that micro-batch m recomputes. peak: bytes at the fullest event. If
    that is more than was given, `fits` is False and every micro-batch has the user's flags."""

    recomputed: tuple[tuple[int, ...], ...]
    peak: int
    fits: bool


def plan_kept_layers(
    order: Sequence[Step], loads: Sequence[Load], memory: StageMemory, available: int
) -> KeptLayers:
    """The layers that each micro-batch recomputes on one stage, at most as many as the user's flags do.

    order: the stage's forwards and backwards (pipeline.orders). available: bytes that the step's activations may take.
    Layers that save most time for what they hold, weighed by how full those events are, are kept first.
    """
    return _Stage(order, loads, memory).plan(available)


class _Stage:
    """The step's events on one stage. Items are (micro-batch, model chunk), numbered m * chunks + c."""

    def __init__(self, order: Sequence[Step], loads: Sequence[Load], memory: StageMemory) -> None:
        self.chunks = memory.chunks
        self.more, self.saved = [c.more() for c in memory.chunks], [c.saved() for c in memory.chunks]
        count, number = len(loads), len(memory.chunks)
        steps = np.array(order, dtype=np.int64)
        item, events = steps[:, 0] * number + steps[:, 1], np.arange(len(steps))
        backward = steps[:, 2].astype(bool)
        self.begin, self.end = (np.empty(count * number, dtype=np.int64) for _ in range(2))
        self.begin[item[~backward]], self.end[item[backward]] = events[~backward], events[backward]
        tokens, work, chunk_tokens, earlier_tokens, linear = np.array([astuple(load) for load in loads]).T
        self.tokens, self.linear = np.repeat(tokens, number), np.repeat(linear, number)
        self.quadratic = np.repeat(work - linear, number)
        floors = np.array([chunk.floor for chunk in memory.chunks])
        keyed = np.array([chunk.keyed for chunk in memory.chunks])
        fixed = np.multiply.outer(tokens, floors) + np.multiply.outer(chunk_tokens, keyed * memory.keys)
        fixed[:, 0] += tokens * memory.ends
        self.filled = self._held(fixed.ravel())
        bytes_of = np.array([(c.forward, c.working, c.remade) for c in memory.chunks], dtype=np.int64)
        forward, working, remade = bytes_of[steps[:, 1]].T
        at_work, loss = tokens[steps[:, 0]], memory.loss * (steps[:, 1] == number - 1)
        read = earlier_tokens[steps[:, 0]] * memory.attended
        need = np.maximum(at_work * np.where(backward, working, forward) + read, at_work * loss)
        remade_more = np.maximum(at_work * (working + remade) + read, at_work * loss) - need
        self.filled += need + remade_more * backward
        # What the backward of an item needs less if it begins with a layer that is kept.
        self.freed = np.empty_like(self.begin)
        self.freed[item[backward]] = remade_more[backward]

    def _held(self, sizes: IntArray) -> IntArray:
        """Bytes held at each event, if each item holds its size from its forward to its backward."""
        change = np.zeros(2 * len(sizes) + 1, dtype=np.int64)
        change[self.begin] += sizes
        change[self.end + 1] -= sizes
        return np.cumsum(change[:-1])

    def plan(self, available: int) -> KeptLayers:
        number = len(self.chunks)
        recomputed = [chunk.recomputed for chunk in self.chunks] * (len(self.tokens) // number)
        floor = int(self.filled.max())
        if floor > available:
            return KeptLayers(_rows(recomputed, number), floor, False)
        saved = -1
        price = np.ones(len(self.filled))
        for turn in range(ROUNDS):
            slack, candidate = self._keep(self._worth(price if turn + 1 < ROUNDS else None), available)
            kept_counts = (
                self.chunks[item % number].recomputed - layers for item, layers in enumerate(candidate)
            )
            time = sum(map(self._time, range(len(candidate)), kept_counts))
            if turn == 0 or time > saved:
                recomputed, saved, peak = candidate, time, available - int(slack.min())
            # Only sums, products and quotients, which round alike on every processor.
            fullness = np.square(np.clip(1 - slack / max(1, available), 0, 1))
            price *= 0.25 + fullness * fullness
            price /= price.max()
        return KeptLayers(_rows(recomputed, number), peak, True)

    def _worth(self, price: FloatArray | None) -> FloatArray:
        """What keeping a layer of each item saves for the price of the bytes that it holds. Without a price, what
        keeping all layers of the item saves, whatever they hold."""
        number = len(self.chunks)
        time = np.array([self._time(i, self.chunks[i % number].recomputed) for i in range(len(self.tokens))])
        if price is None:
            return time.astype(np.float64)
        price_before = np.concatenate(([0.0], np.cumsum(price)))
        size = self.tokens * np.resize([sizes[-1] for sizes in self.more], len(self.tokens))
        return time / np.maximum(size * (price_before[self.end + 1] - price_before[self.begin]), 1e-9)

    def _time(self, item: int, layers: int) -> int:
        """Work that keeping so many of the item's recomputed layers saves."""
        linear, quadratic = self.saved[item % len(self.chunks)][layers]
        return (linear * int(self.linear[item]) + quadratic * int(self.quadratic[item])) // 1000

    def _keep(self, worth: FloatArray, available: int) -> tuple[IntArray, list[int]]:
        """What is left at each event, and the recomputed layers of each item, if items keep as many layers as fit,
        those of most worth first."""
        slack = available - self.filled
        first = np.lexsort((np.arange(len(worth)), -worth))
        numbers = [0] * len(worth)
        number = len(self.chunks)
        for item in first.tolist():
            chunk, tokens = self.chunks[item % number], int(self.tokens[item])
            begin, end = int(self.begin[item]), int(self.end[item])
            numbers[item] = chunk.recomputed
            sizes = self.more[item % number]
            switched = tokens * chunk.switched
            during = int(slack[begin:end].min()) - switched
            freed = int(self.freed[item])
            after = int(slack[end]) + freed - switched
            room = min(during, after)
            layers = bisect(sizes, room // tokens if tokens else sizes[-1]) - 1 if room >= 0 else 0
            if layers > 0:
                slack[begin : end + 1] -= switched + tokens * sizes[layers]
                slack[end] += freed
                numbers[item] -= layers
        return slack, numbers


def _rows(recomputed: Sequence[int], number: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(recomputed[start : start + number]) for start in range(0, len(recomputed), number))


def loads_of(column: Sequence[MicroBatch], alignment: int, context: int) -> list[Load]:
    """What each of a data-parallel rank's micro-batches asks of one of `context` ranks that share it.

    alignment: tokens are padded to a multiple of it. A document in chunks of 6 and 4 tokens on 2 ranks: the second has
    2 of its tokens and 3 earlier ones.
    """
    chunked = documents_in_chunks([micro_batch.pieces for micro_batch in column])
    loads = []
    for micro_batch, document in zip(column, chunked, strict=True):
        tokens = -(-micro_batch.tokens // alignment) * alignment
        chunk_tokens = earlier_tokens = 0
        if document >= 0:
            # Pieces with a prefix, or the first chunk of the document, which has none yet.
            shared = [p for p in micro_batch.pieces if p.prefix or p.document == document]
            chunk_tokens, earlier_tokens = sum(p.tokens for p in shared), sum(p.prefix for p in shared)
        tokens, chunk_tokens, earlier_tokens = (
            -(-size // context) for size in (tokens, chunk_tokens, earlier_tokens)
        )
        linear = micro_batch.tokens * UNITS_PER_TOKEN
        loads.append(Load(tokens, micro_batch.work, chunk_tokens, earlier_tokens, linear))
    return loads


def joined_loads(ranks: Sequence[Sequence[Load]]) -> list[Load]:
    """The loads by which ranks that must keep the same layers plan: of each micro-batch the largest, and all work."""
    return [
        Load(
            max(load.tokens for load in row),
            sum(load.work for load in row),
            max(load.chunk_tokens for load in row),
            max(load.earlier for load in row),
            sum(load.linear for load in row),
        )
        for row in zip(*ranks, strict=True)
    ]


def plan_step_layers(
    columns: Sequence[Sequence[Load]],
    groups: Sequence[tuple[int, ...] | None],
    stages: Sequence[StageMemory],
    available: Sequence[int],
    *,
    in_step: bool = False,
) -> list[list[KeptLayers]]:
    """Kept layers [dp][stage] of one step.

    Args:
        columns, groups: each data-parallel rank's loads, and the sizes of its groups of micro-batches.
        stages, available: each stage's memory, and the bytes that it may use.
        in_step: all ranks must keep the same layers.
    """
    if in_step:
        joint = plan_step_layers([joined_loads(columns)], groups[:1], stages, available)
        return joint * len(columns)
    plans = []
    for loads, sizes in zip(columns, groups, strict=True):
        orders = grouped_orders(len(stages), sizes or (1,) * len(loads), len(stages[0].chunks))
        plans.append(
            [
                plan_kept_layers(order, loads, memory, size)
                for order, memory, size in zip(orders, stages, available, strict=True)
            ]
        )
    return plans


def recomputed_array(plans: Sequence[Sequence[KeptLayers]]) -> IntArray:
    """int[dp, P, V, m]: recomputed layers, as the simulator takes them."""
    return np.array([[np.transpose(stage.recomputed) for stage in rank] for rank in plans], dtype=np.int64)
