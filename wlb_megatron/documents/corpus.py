"""Goes through one corpus document by document: an epoch's order, over-long documents cut, empty ones dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.blocks import Lengths, blocks
from wlb_megatron.documents.piece_order import EarlierWindow, PieceOrder
from wlb_megatron.errors import WlbError

IntArray = npt.NDArray[np.int64]

EPOCH, DOCUMENT, START, END, CURSOR, RESUME, TOKENS, EMPTY, OVERLONG_COUNT, LOST = range(10)
"""Columns of a walk's rows: the piece (first four), then the walk's place and counts once it is taken."""

VERSION = 3
"""Version of a stream's state, and of the order in which its run continues. 2, of release 0.1.0: the
pieces of a split document followed one another."""

STATE = {
    "epoch": EPOCH,
    "cursor": CURSOR,
    "resume": RESUME,
    "tokens": TOKENS,
    "empty": EMPTY,
    "overlong": OVERLONG_COUNT,
    "lost_tokens": LOST,
}
"""A walk's state by column: places passed in this epoch, pieces already out of the next one, running counts. (Where a
document's pieces come after each other: the tokens that are out of them.)"""

_BLOCK = 4096


@dataclass(frozen=True)
class Corpus:
    """Documents of one entry of a blend.

    name: for messages. lengths: integers[n], tokens of each document, kept as they come: an index maps them from its
    file. first_id: id of the first one, ids run on. weight: share of the blend's tokens, relative to the other entries.
    targets: digest of which tokens are trained, "" where all are.
    """

    name: str
    lengths: Lengths
    first_id: int = 0
    weight: float = 1.0
    targets: str = ""

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
            raise WlbError(
                f"{self.name}: lengths must be a list of integers, got {lengths.dtype}{lengths.shape}"
            )
        if len(lengths) and lengths.min() < 0:
            document = int((lengths < 0).argmax())
            raise WlbError(
                f"{self.name}: document {document} has a negative length ({int(lengths[document])})"
            )
        if lengths.sum(dtype=np.float64) >= 2**62:
            raise WlbError(f"{self.name}: more tokens than 64-bit counts can hold; check the lengths")
        object.__setattr__(self, "lengths", lengths if len(lengths) else lengths.astype(np.int64))


@dataclass(frozen=True)
class Rules:
    """How a corpus becomes pieces.

    Args:
        window: most tokens of a piece (with overlong "chunk", of the longest document that trains whole).
        overlong: one of config.OVERLONG, for longer documents.
        seed: shuffles each epoch anew; None keeps the corpus's order.
        endless: epoch after epoch, or one pass.
        epochs: an endless run ends after so many.
    """

    window: int
    overlong: str = "split"
    seed: int | None = None
    endless: bool = False
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise WlbError(f"seed must not be negative, got {self.seed}")

    @property
    def splits(self) -> bool:
        """Whether a document longer than the window becomes several pieces."""
        return self.overlong in ("split", "chunk")

    def kept(self, lengths: IntArray) -> IntArray:
        """Tokens that are given out from documents of these lengths."""
        if self.splits:
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
        self._corpus, self._rules, self.position = corpus, rules, position
        # Only where they are split is a document several pieces.
        window = rules.window if rules.splits else np.iinfo(np.int64).max
        self._order = PieceOrder(corpus.lengths, window)
        self._begun: tuple[object, ...] | None = None  # what the order is of
        self.place(np.zeros(10, dtype=np.int64), VERSION)

    def place(self, row: IntArray, version: int, earlier_windows: Sequence[EarlierWindow] = ()) -> None:
        """Go on after this row; only its STATE columns matter. `version` is the state's, see VERSION.
        `earlier_windows` are those of the row's epoch before this one."""
        self.row, self._version = row.copy(), version  # where the walk stands
        self._changed = int(row[EPOCH]), tuple(earlier_windows)
        self._begin_epoch()
        self._fill(int(row[CURSOR]), int(row[RESUME]) // self._piece_unit)

    def earlier(self, epoch: int) -> tuple[EarlierWindow, ...]:
        """The windows with which the epoch began, if the window changed within it."""
        return self._changed[1] if epoch == self._changed[0] else ()

    def rest_of_place(self) -> IntArray:
        """int64[k, 10]: takes the pieces left at the place where the walk stands; none where it is between places."""
        epoch, place, has_more = int(self.row[EPOCH]), int(self.row[CURSOR]), bool(self.row[RESUME])
        blocks_of_rows = [np.empty((0, 10), dtype=np.int64)]
        while has_more:
            rows = self.advance()
            of_place = rows[:, CURSOR] - (rows[:, RESUME] == 0) == place
            blocks_of_rows.append(rows[of_place & (rows[:, EPOCH] == epoch)])
            has_more = 0 < len(blocks_of_rows[-1]) == len(rows)  # a place's last entry may be empty
        return np.concatenate(blocks_of_rows)

    @property
    def finished(self) -> bool:
        last = self._rules.epochs if self._rules.endless else 1
        return last is not None and int(self.row[EPOCH]) + 1 >= last and self._epoch_is_out

    @property
    def _epoch_is_out(self) -> bool:
        return self._taken >= len(self._ahead.place) and self._end >= len(self._corpus.lengths)

    def advance(self) -> IntArray:
        """int64[k, 10]: the next pieces, k >= 1, or k = 0 after the last one of a single pass."""
        while not self.finished:
            if self._epoch_is_out:
                self.row[[EPOCH, CURSOR, RESUME]] = self.row[EPOCH] + 1, 0, 0
                self._begin_epoch()
                self._fill(0)
            elif self._taken >= len(self._ahead.place):
                self._fill(self._end)
            else:
                rows = self._next_rows()
                if len(rows):
                    return rows
        self.row[CURSOR] = len(self._corpus.lengths)
        return np.empty((0, 10), dtype=np.int64)

    def _begin_epoch(self) -> None:
        epoch, seed = int(self.row[EPOCH]), self._rules.seed
        is_spread = self._version >= 3 and seed is not None
        self._piece_unit = 1 if is_spread else self._rules.window
        order_key = epoch, self._version, self.position, self.earlier(epoch)
        if self._begun != order_key:
            seeds = None if seed is None else [seed, self.position, epoch]
            earlier_windows = self.earlier(epoch) if is_spread else ()
            self._order.begin(seeds, is_spread=is_spread, earlier_windows=earlier_windows)
            self._begun = order_key

    def _fill(self, begin: int, out: int = 0) -> None:
        """Take the epoch's next places, from `begin` on. out: entries of the first one that are given out already."""
        self._end = min(begin + self._order.width(_BLOCK), len(self._corpus.lengths))
        self._ahead, self._taken = self._order.between(begin, self._end), out

    def _next_rows(self) -> IntArray:
        """Rows of the next block of entries; moves the walk behind them.

        Window 4, split, lengths [0, 10, 3], as they stand: (1, 0, 4), (1, 4, 8), (1, 8, 10), (2, 0, 3).
        """
        block = slice(self._taken, self._taken + _BLOCK)
        places = self._ahead.place
        entries = np.arange(len(places))[block]
        # A place's entries are all in one stretch.
        last_of_place = np.append(places[1:] > places[:-1], True)[block]
        entry_in_place = entries - np.searchsorted(places, places[block])
        documents = self._ahead.document[block]
        window, before = self._rules.window, self.row
        lengths = self._corpus.lengths[documents].astype(np.int64)
        kept_tokens = self._rules.kept(lengths)
        start = self._ahead.start[block]
        # What an earlier window gave may exceed `kept`.
        end = np.maximum(start, np.minimum(start + window, kept_tokens))
        ends_document = end >= kept_tokens  # of the document, with this piece
        rows = np.zeros((len(entries), 10), dtype=np.int64)
        rows[:, EPOCH] = before[EPOCH]
        rows[:, DOCUMENT] = self._corpus.first_id + documents
        rows[:, START], rows[:, END] = start, end
        rows[:, CURSOR] = places[block] + last_of_place
        rows[:, RESUME] = np.where(last_of_place, 0, (entry_in_place + 1) * self._piece_unit)
        for column, amounts in (
            (TOKENS, end - start),
            (EMPTY, ends_document & (lengths == 0)),
            (OVERLONG_COUNT, ends_document & (lengths > window)),
            (LOST, ends_document * (lengths - kept_tokens)),
        ):
            rows[:, column] = before[column] + np.cumsum(amounts)
        self._taken += len(entries)
        self.row = rows[-1].copy()
        return rows[end > start]
