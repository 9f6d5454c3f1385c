"""Summarizes a plan in figures (balance, delay, size) for log lines, TensorBoard and the analyze command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from wlb_megatron.packing.packer import Waiting
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN


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
