"""One corpus, gone through document by document: order of an epoch, over-long documents cut, empty ones dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.config import OVERLONG
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.blocks import Lengths, blocks
from wlb_megatron.packing.epoch_order import epoch_order

IntArray = npt.NDArray[np.int64]

EPOCH, DOCUMENT, START, END, CURSOR, RESUME, TOKENS, EMPTY, OVERLONG_COUNT, LOST = range(10)
"""Columns of a walk's rows: the piece (first four), then the walk's place and counts once it is taken."""

STATE = {
    "epoch": EPOCH,
    "cursor": CURSOR,
    "resume": RESUME,
    "tokens": TOKENS,
    "empty": EMPTY,
    "overlong": OVERLONG_COUNT,
    "lost_tokens": LOST,
}
"""A walk's state by column: documents passed in this epoch, tokens already out of the next one, running counts."""

_BLOCK = 4096


@dataclass(frozen=True)
class Corpus:
    """Documents of one entry of a blend.

    name: for messages. lengths: integers[n], tokens of each document, kept as they come: an index maps them from its
    file. first_id: id of the first one, ids run on. weight: share of the blend's tokens, relative to the other entries.
    """

    name: str
    lengths: Lengths
    first_id: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
            raise WlbError(
                f"{self.name}: lengths must be a list of integers, got {lengths.dtype}{lengths.shape}"
            )
        if not 0 < self.weight < float("inf"):
            raise WlbError(
                f"{self.name}: weight must be positive, got {self.weight}; leave the corpus out for 0"
            )
        if len(lengths) and lengths.min() < 0:
            at = int((lengths < 0).argmax())
            raise WlbError(f"{self.name}: document {at} has a negative length ({int(lengths[at])})")
        if lengths.sum(dtype=np.float64) >= 2**62:
            raise WlbError(f"{self.name}: more tokens than 64-bit counts can hold; check the lengths")
        object.__setattr__(self, "lengths", lengths if len(lengths) else lengths.astype(np.int64))


@dataclass(frozen=True)
class Rules:
    """How a corpus becomes pieces. window: most tokens of a piece. overlong: one of config.OVERLONG.

    seed: shuffles each epoch anew; None keeps the corpus's order. endless: epoch after epoch, or one pass.
    """

    window: int
    overlong: str = "split"
    seed: int | None = None
    endless: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise WlbError(f"window must be at least 1 token, got {self.window}")
        if self.overlong not in OVERLONG:
            raise WlbError(
                f"unknown policy {self.overlong!r} for over-long documents; choose {', '.join(OVERLONG)}"
            )
        if self.seed is not None and self.seed < 0:
            raise WlbError(f"seed must not be negative, got {self.seed}")

    def kept(self, lengths: IntArray) -> IntArray:
        """Tokens that are given out of documents of these lengths."""
        if self.overlong == "split":
            return lengths
        return (
            np.minimum(lengths, self.window)
            if self.overlong == "truncate"
            else lengths * (lengths <= self.window)
        )

    def predict(self, lengths: Lengths) -> bool:
        """Whether any document of these lengths has a token that predicts another."""
        return any(((block > 1) & (self.kept(block) > 0)).any() for block in blocks(lengths))


class CorpusWalk:
    """Goes through a corpus by the rules, a block of pieces at a time. `position`: the corpus's in the blend."""

    def __init__(self, corpus: Corpus, rules: Rules, position: int) -> None:
        if not any(rules.kept(lengths).any() for lengths in blocks(corpus.lengths)):
            raise WlbError(
                f"{corpus.name}: no token to train on in {len(corpus.lengths)} documents "
                f"(window {rules.window}, over-long documents: {rules.overlong}); give another corpus or window"
            )
        self._corpus, self._rules, self._position = corpus, rules, position
        self._shuffled: tuple[int, bool] | None = None  # epoch that the order is of, and whether by version 1
        self.place(np.zeros(10, dtype=np.int64))

    def place(self, row: IntArray, *, stored: bool = False) -> None:
        """Go on after this row; only its STATE columns matter. stored: see epoch_order."""
        self._row, self._stored = row.copy(), stored
        self._shuffle(int(row[EPOCH]))

    @property
    def row(self) -> IntArray:
        """int64[10]: where the walk stands; DOCUMENT, START and END mean nothing."""
        return self._row

    @property
    def finished(self) -> bool:
        return not self._rules.endless and int(self._row[CURSOR]) == len(self._corpus.lengths)

    def advance(self) -> IntArray:
        """int64[k, 10]: the next pieces, k >= 1, or k = 0 after the last one of a single pass."""
        while not self.finished:
            if self._row[CURSOR] == len(self._corpus.lengths):
                self._row[[EPOCH, CURSOR]] = self._row[EPOCH] + 1, 0
                self._shuffle(int(self._row[EPOCH]))
            cursor = int(self._row[CURSOR])
            rows = self._cut(self._order(cursor, cursor + _BLOCK))
            if len(rows):
                return rows
        return np.empty((0, 10), dtype=np.int64)

    def _shuffle(self, epoch: int) -> None:
        if self._shuffled == (epoch, self._stored):
            return
        seed = self._rules.seed
        seeds = None if seed is None else [seed, self._position, epoch]
        self._order = epoch_order(len(self._corpus.lengths), seeds, stored=self._stored)
        self._shuffled = epoch, self._stored

    def _cut(self, documents: IntArray) -> IntArray:
        """Rows of these documents, the next ones; moves the walk behind them.

        Window 4, split, lengths [0, 10, 3]: pieces (1, 0, 4), (1, 4, 8), (1, 8, 10), (2, 0, 3).
        """
        lengths = self._corpus.lengths[documents].astype(np.int64)
        window, before = self._rules.window, self._row
        kept = self._rules.kept(lengths)
        pieces = -(-kept // window)
        which = np.repeat(np.arange(len(documents)), pieces)
        start = (np.arange(len(which)) - (np.cumsum(pieces) - pieces)[which]) * window
        ahead = (which > 0) | (start >= before[RESUME])
        which, start = which[ahead], start[ahead]
        end = np.minimum(start + window, kept[which])
        last = end == kept[which]

        def count(each: IntArray) -> IntArray:
            """Running sum over the documents behind each row's piece; the total is the last entry."""
            running = np.concatenate(([0], np.cumsum(each)))
            return np.append(running[which + last], running[-1])

        rows = np.zeros((len(which) + 1, 10), dtype=np.int64)  # the last row: behind all the documents
        rows[:, EPOCH] = before[EPOCH]
        rows[:-1, DOCUMENT] = self._corpus.first_id + documents[which]
        rows[:-1, START], rows[:-1, END] = start, end
        rows[:, CURSOR] = before[CURSOR] + np.append(which + last, len(documents))
        rows[:-1, RESUME] = np.where(last, 0, end)
        rows[:-1, TOKENS] = before[TOKENS] + np.cumsum(end - start)
        rows[-1, TOKENS] = before[TOKENS] + int((end - start).sum())
        rows[:, EMPTY] = before[EMPTY] + count((lengths == 0).astype(np.int64))
        rows[:, OVERLONG_COUNT] = before[OVERLONG_COUNT] + count((lengths > window).astype(np.int64))
        rows[:, LOST] = before[LOST] + count(lengths - kept)
        self._row = rows[-1].copy()
        return rows[:-1]
