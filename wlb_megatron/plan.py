"""The plan of an iteration: which pieces of which documents train in which micro-batch.

A plan is integers, computed alike on every rank from document lengths alone. Its figures (balance, delay, size) are for
log lines and TensorBoard. The plan of one micro-batch over its context-parallel ranks is sharding/segments.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

PADDING = -1
"""Document id of the padding that makes a micro-batch's token count divide evenly."""

UNITS_PER_TOKEN = 1024
"""Work is counted in 1/1024 of the linear cost of a token; int64 holds 9e15 tokens of it."""


class Piece(NamedTuple):
    """Tokens [start, end) of a document: a whole one, or a part where a packer had to cut.

    prefix: how many tokens of the document right before `start` the piece attends to. They belong to earlier
    micro-batches of the same iteration and data-parallel rank, and its positions count from the first of them. With
    prefix 0 a piece is attended as a document of its own: own mask, positions from 0. A piece that arrives or waits has
    none. (A named tuple rather than a dataclass: an iteration of a large job makes tens of thousands, and these cost a
    third.)
    """

    epoch: int
    document: int
    start: int
    end: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Waiting(NamedTuple):
    """A piece that waits, and the iteration in which it arrived."""

    piece: Piece
    entry: int


_START, _END = itemgetter(2), itemgetter(3)  # of pieces; faster than access by name


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Pieces packed into one sequence, in order. `work` is in the cost model's integer units."""

    pieces: tuple[Piece, ...]
    work: int

    @property
    def tokens(self) -> int:
        """Tokens without end padding."""
        return sum(map(_END, self.pieces)) - sum(map(_START, self.pieces))


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One global batch. `micro_batches[m][d]` is micro-batch m of data-parallel rank d.

    arrived: pieces taken from the stream for this iteration; waiting: queues and leftovers after it,
    oldest first. predicted: the step by the packer's law (pipeline/step_law.py), in the cost model's units; ideal: the
    same documents' work without bubble, waiting and what micro-batches cost by themselves.
    """

    iteration: int
    arrived: tuple[Piece, ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    waiting: tuple[Piece, ...]
    predicted: int = 0
    ideal: int = 0

    @property
    def step_over_ideal(self) -> float:
        """Predicted step time over that of the same work spread evenly with no bubble; 1 where nothing trains."""
        return self.predicted / self.ideal if self.ideal else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """One iteration's figures.

    * work: of all data-parallel ranks (tokens of linear work).
    * imbalance: work, max/mean over all micro-batches of all data-parallel ranks. dp_imbalance: the same over
      data-parallel ranks.
    * step_over_ideal: predicted time of the step over that of the same work spread evenly, with no bubble.
    * micro_batches: of each data-parallel rank. documents: a document in chunks counts once.
    * documents_in_chunks: how many of them. chunks: all of their chunks. longest_group: the most micro-batches that
      share one.
    * delayed: documents that train later than they arrived. token_delay: mean over all tokens (iterations).
    """

    iteration: int
    tokens: int
    documents: int
    largest_micro_batch: int
    imbalance: float
    dp_imbalance: float
    step_over_ideal: float
    micro_batches: int
    delayed: int
    token_delay: float
    waiting_documents: int
    waiting_tokens: int
    documents_in_chunks: int = 0
    chunks: int = 0
    longest_group: int = 1
    work: float = 0.0


class Summariser:
    """Summaries of consecutive plans; remembers only when what waits arrived."""

    def __init__(self, waiting_pieces: Iterable[Waiting] = ()) -> None:
        """`waiting_pieces` wait before the first of the plans, as when a run is resumed."""
        self._arrived: dict[tuple[int, int], dict[int, int]] = {}  # of a document's pieces: start, iteration
        self._wait(waiting_pieces)

    def _wait(self, waiting_pieces: Iterable[Waiting]) -> None:
        self._arrived = {}
        for piece, iteration in waiting_pieces:
            self._arrived.setdefault((piece.epoch, piece.document), {})[piece.start] = iteration

    def _arrival(self, piece: Piece, default: int) -> int:
        """When the piece arrived, or the one that it was cut from: the last one that does not begin after it. It is
        `default` where that is not known."""
        starts = self._arrived.get((piece.epoch, piece.document), {})
        return starts.get(max((start for start in starts if start <= piece.start), default=-1), default)

    def summarise(self, plan: IterationPlan) -> PlanSummary:
        # If no piece of a document waited, its pieces arrived now. That is usual, so a piece costs one look-up here.
        before = self._arrived
        for piece in plan.arrived if before else ():
            if piece[:2] in before:
                before[piece[:2]][piece.start] = plan.iteration
        grid = plan.micro_batches
        works = [micro_batch.work for row in grid for micro_batch in row]
        sizes = [micro_batch.tokens for row in grid for micro_batch in row]
        by_rank = [sum(column) for column in zip(*([m.work for m in row] for row in grid), strict=True)]
        pieces = [micro_batch.pieces for row in grid for micro_batch in row]
        late = (
            [piece for of_micro_batch in pieces for piece in of_micro_batch if piece[:2] in before]
            if before
            else []
        )
        delays = [(plan.iteration - self._arrival(p, plan.iteration), p) for p in late]
        # A document in n chunks has n - 1 pieces with a prefix; the last one's is the longest.
        chunks = [piece for of_micro_batch in pieces for piece in of_micro_batch if piece[4]]
        later_chunks = Counter((p.epoch, p.document, p.start - p.prefix) for p in chunks)
        self._wait([Waiting(p, self._arrival(p, plan.iteration)) for p in plan.waiting])
        return PlanSummary(
            iteration=plan.iteration,
            tokens=sum(sizes),
            documents=sum(map(len, pieces)) - len(chunks),
            largest_micro_batch=max(sizes, default=0),
            imbalance=_max_over_mean(works),
            dp_imbalance=_max_over_mean(by_rank),
            step_over_ideal=plan.step_over_ideal,
            micro_batches=len(grid),
            delayed=sum(delay > 0 and not piece.prefix for delay, piece in delays),
            token_delay=sum(delay * piece.tokens for delay, piece in delays) / max(sum(sizes), 1),
            waiting_documents=len(plan.waiting),
            waiting_tokens=sum(piece.tokens for piece in plan.waiting),
            documents_in_chunks=len(later_chunks),
            chunks=sum(later_chunks.values()) + len(later_chunks),
            longest_group=max(later_chunks.values(), default=0) + 1,
            work=sum(works) / UNITS_PER_TOKEN,
        )


def _max_over_mean(values: list[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
