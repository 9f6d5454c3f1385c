"""What an epoch has given of its long documents where the window changed within it.

A run may go on in the middle of an epoch with another window (packing/carry.py). What is left of a document then comes
in pieces of the new window, spread over the rest of the epoch, so that each token still trains once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

WHOLE = 2**62
"""Window of a run that gave all of a document at its place."""


class EarlierWindow(NamedTuple):
    """Up to the epoch's place `end`, documents came in pieces of `window` tokens."""

    end: int
    window: int


class Spread(NamedTuple):
    """How documents' pieces are spread over an epoch's places [begin, end).

    place: int64[n], of each document, below end - begin. pieces: int64[n], how many are left of it. Piece j comes at
    begin + (place + j * (end - begin)) / pieces.
    """

    begin: int
    end: int
    place: IntArray
    pieces: IntArray

    @classmethod
    def of(cls, places: IntArray, left: IntArray, window: int, begin: int, end: int) -> Spread:
        """places: of the documents in the epoch's order. left: tokens that each has yet to give."""
        return cls(begin, end, places % max(1, end - begin), -(-left // window))

    @property
    def width(self) -> int:
        return max(1, self.end - self.begin)

    def before(self, edge: int) -> IntArray:
        """int64[n]: pieces that come before place `edge`."""
        return -((self.place - (edge - self.begin) * self.pieces) // self.width)


def tokens_given(
    lengths: IntArray, places: IntArray, count: int, earlier: Sequence[EarlierWindow]
) -> IntArray:
    """int64[n]: tokens that the epoch has given of documents of these lengths by the end of the last earlier window.

    places: of the documents in the epoch's order of `count`. A document that no window so far has cut comes whole at
    its place.
    """
    given, begin, least = np.zeros_like(lengths), 0, WHOLE
    for end, window in earlier:
        least = min(least, window)
        spread = Spread.of(places, lengths - given, window, begin, count)
        in_pieces = np.minimum(given + spread.before(end) * np.minimum(window, lengths), lengths)
        given = np.where(lengths > least, in_pieces, lengths * (places < end))
        begin = end
    return given
