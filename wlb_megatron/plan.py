"""The plan of an iteration: which pieces of which documents train in which micro-batch.

Everything here is integers, computed alike on every rank from document lengths alone.
The plan of one micro-batch over its context-parallel ranks is sharding/segments.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

PADDING = -1
"""Document id of the padding that makes a micro-batch's token count divide evenly."""


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
