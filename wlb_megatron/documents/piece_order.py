"""The order of an epoch's pieces: a whole document at its place, the pieces of a long document spread over the epoch.

If the pieces of a book followed one another, they would fill whole iterations. With N documents, the document at
place p with m pieces puts piece j at (p + j * N) / m. So its pieces are evenly spaced and in order, and a whole
document is at p. With 4 documents, the one at place 1 with 3 pieces puts them at 1/3, 5/3 and 9/3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.blocks import SIZE, Lengths, blocks
from wlb_megatron.documents.epoch_order import epoch_order
from wlb_megatron.errors import WlbError

IntArray = npt.NDArray[np.int64]


class Entries(NamedTuple):
    """int64[n] each: the place that a piece is given out at, its document, and which of the document's it is.

    A document that gives nothing (empty or dropped) has one entry, too.
    """

    place: IntArray
    document: IntArray
    piece: IntArray


class PieceOrder:
    """A corpus's order of pieces, by epoch. It holds 24 bytes a document above the window, beside the epoch's order."""

    def __init__(self, lengths: Lengths, window: int) -> None:
        """lengths: tokens of each document; those above the window come in pieces of it."""
        self._count, self._window = len(lengths), window
        above = [n * SIZE + np.flatnonzero(block > window) for n, block in enumerate(blocks(lengths))]
        self._long = np.concatenate([np.empty(0, dtype=np.int64), *above])
        self._pieces = -(-lengths[self._long].astype(np.int64) // window)
        if self._count * int(self._pieces.max(initial=1)) >= 2**62:
            raise WlbError(f"window {window} cuts a document into more pieces than can be counted; raise it")
        self._lengths = lengths

    def begin(self, seeds: Sequence[int] | None, *, stored: bool = False, spread: bool = True) -> None:
        """Begin an epoch. seeds, stored: see epoch_order. Unless spread, a document's pieces come after each other."""
        self._order = epoch_order(self._count, seeds, stored=stored)
        self._spread = spread and len(self._long) > 0
        if self._spread:
            self._places = self._order.places(self._long)

    def between(self, begin: int, end: int) -> Entries:
        """Entries at places [begin, end) of the epoch, in their order."""
        documents = self._order(begin, end)
        places = np.arange(begin, begin + len(documents))
        counts = np.maximum(-(-self._lengths[documents].astype(np.int64) // self._window), 1)
        if self._spread:
            return self._merged(places[counts == 1], documents[counts == 1], begin, begin + len(documents))
        pieces = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Entries(np.repeat(places, counts), np.repeat(documents, counts), pieces)

    def _merged(self, places: IntArray, documents: IntArray, begin: int, end: int) -> Entries:
        """Whole documents at their places, with the pieces of others that come between places `begin` and `end`."""
        first, last = (-((self._places - edge * self._pieces) // self._count) for edge in (begin, end))
        counts = last - first
        which = np.repeat(np.arange(len(counts)), counts)
        pieces = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        place, rest = np.divmod(self._places[which] + pieces * self._count, self._pieces[which])
        between = np.concatenate((np.full(len(places), -1.0), rest / self._pieces[which]))
        merged = np.concatenate((places, place))
        order = np.lexsort((between, merged))
        return Entries(
            merged[order],
            np.concatenate((documents, self._long[which]))[order],
            np.concatenate((np.zeros(len(places), dtype=np.int64), pieces))[order],
        )

    def width(self, entries: int) -> int:
        """Places that hold about so many entries, or as many as there are documents above the window, if that is more:
        each call of `between` goes through all of those."""
        total = self._count + int((self._pieces - 1).sum())
        return max(1, max(entries, len(self._long)) * self._count // max(total, 1))
