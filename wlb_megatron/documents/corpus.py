"""A corpus, the rules by which it becomes pieces, and their order in an epoch.

Shuffled documents come at their places, the pieces of a long one spread over the epoch. If the pieces of a book
followed one another, they would fill whole iterations. With N documents, the document at place p with m pieces puts
piece j at (p + j * N) / m. So its pieces are evenly spaced and in order, and a whole document is at p. With 4
documents, the one at place 1 with 3 pieces puts them at 1/3, 5/3 and 9/3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError

IntArray = npt.NDArray[np.int64]

Lengths = npt.NDArray[np.integer[Any]]
"""Tokens of documents, of any integer dtype (an index's are int32, mapped from its file). Compute with int64 copies."""

SIZE = 1 << 20


def blocks(array: npt.NDArray[Any], size: int = SIZE) -> Iterator[npt.NDArray[np.int64]]:
    """Consecutive int64 copies of `size` entries, the last one shorter: an array mapped from a file is never copied
    whole."""
    for begin in range(0, len(array), size):
        yield array[begin : begin + size].astype(np.int64)


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


MOST_STORED = 2**17
"""The largest corpus, in documents, whose order is stored (1 MB). Changing it changes orders: see stream.VERSION."""

_ROUNDS = 8


class EpochOrder:
    """`order(begin, end)`: documents at places [begin, end) of an epoch, int64[min(end, count) - begin].

    A stored order of 1e9 documents is 8 GB. Every rank of a node would hold it, after minutes of sorting. So a large
    corpus uses a keyed permutation, which computes any stretch of the order from its places alone, without a table.
    Both kinds use raw 64-bit draws, whose stream numpy keeps the same from version to version.
    """

    def __init__(self, count: int, seeds: Sequence[int] | None) -> None:
        """The order of `count` documents by seeds; None: in file order."""
        self._count = count
        self._stored: IntArray | None = None  # the document of each place
        self._keys: npt.NDArray[np.uint64] | None = None  # of a permutation, see `permuted`
        if seeds is None:
            return
        draws = np.random.PCG64(np.random.SeedSequence(seeds))
        if count <= MOST_STORED:
            self._stored = np.argsort(draws.random_raw(count), kind="stable")
        else:
            self._keys = draws.random_raw(_ROUNDS)

    def __call__(self, begin: int, end: int) -> IntArray:
        places = np.arange(begin, min(end, self._count))
        if self._stored is not None:
            return self._stored[begin:end]
        return places if self._keys is None else permuted(places, self._count, self._keys)

    def places(self, documents: IntArray) -> IntArray:
        """The place of each document, int64[n]."""
        if self._stored is not None:
            inverse = np.empty(self._count, dtype=np.int64)
            inverse[self._stored] = np.arange(self._count)
            return inverse[documents]
        return documents if self._keys is None else permuted(documents, self._count, self._keys, back=True)


def permuted(places: IntArray, count: int, keys: npt.NDArray[np.uint64], *, back: bool = False) -> IntArray:
    """Where a permutation of [0, count) takes each place; back: the inverse. keys: uint64[even], one per round.

    A Feistel network permutes [0, 2**bits), the smallest power of two of at least `count`. A result of `count` or
    more goes through it again until it is smaller (cycle walking: less than twice in mean). Example with 5: if 0 goes
    to 6, and 6 to 3, then 0 goes to 3.
    """
    bits = max(2, (count - 1).bit_length())
    rounds = list(enumerate(keys))[:: -1 if back else 1]
    images = _network(places.astype(np.uint64), bits, rounds)
    while len(beyond := np.flatnonzero(images >= count)):
        images[beyond] = _network(images[beyond], bits, rounds)
    return images.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], bits: int, rounds: Sequence[tuple[int, np.uint64]]
) -> npt.NDArray[np.uint64]:
    """Each round XORs a hash of one half of the bits into the other half, which is its own inverse: even rounds the
    lower half into the upper one. The rounds (number, key) in reverse undo all."""
    width = np.uint64(bits // 2)
    masks = [np.uint64((1 << size) - 1) for size in (bits // 2, bits - bits // 2)]
    halves: list[Any] = [values & masks[0], values >> width]
    for number, key in rounds:
        source, target = number % 2, 1 - number % 2
        halves[target] ^= _hash(halves[source] ^ key) & masks[target]
    return halves[1] << width | halves[0]


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA'14): every bit of the input moves every bit of the output."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Entries(NamedTuple):
    """int64[n] each: the place that a piece is given out at, its document, and the document's token that it begins at.

    A document that gives nothing (empty or dropped) has one entry, too.
    """

    place: IntArray
    document: IntArray
    start: IntArray


class PieceOrder:
    """A corpus's order of pieces, by epoch. It holds 24 bytes a document above the window, beside the epoch's order."""

    def __init__(self, lengths: Lengths, window: int) -> None:
        """lengths: tokens of each document; those above the window come in pieces of it."""
        self._count, self._window, self._lengths = len(lengths), window, lengths
        long_documents = [
            n * SIZE + np.flatnonzero(block > window) for n, block in enumerate(blocks(lengths))
        ]
        self._long = np.concatenate([np.empty(0, dtype=np.int64), *long_documents])
        self._pieces = -(-lengths[self._long].astype(np.int64) // window)
        self._total = self._count + int((self._pieces - 1).sum())
        if self._count * int(self._pieces.max(initial=1)) >= 2**62:
            raise WlbError(f"window {window} cuts a document into more pieces than can be counted; raise it")

    def begin(self, seeds: Sequence[int] | None, *, is_spread: bool = True) -> None:
        """Begin an epoch. seeds: see EpochOrder. Unless spread, a document's pieces come after each other."""
        self._order = EpochOrder(self._count, seeds)
        self._long_places = self._order.places(self._long) if is_spread and len(self._long) else None

    def between(self, begin: int, end: int) -> Entries:
        """Entries at places [begin, end) of the epoch, in their order."""
        documents = self._order(begin, end)
        places = np.arange(begin, begin + len(documents))
        lengths = self._lengths[documents].astype(np.int64)
        if self._long_places is not None:
            is_whole = lengths <= self._window
            end = begin + len(documents)
            return self._merged(self._long_places, places[is_whole], documents[is_whole], begin, end)
        counts = np.maximum(-(-lengths // self._window), 1)
        pieces = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Entries(np.repeat(places, counts), np.repeat(documents, counts), pieces * self._window)

    def _merged(
        self, long_places: IntArray, places: IntArray, documents: IntArray, begin: int, end: int
    ) -> Entries:
        """Whole documents at their places, with the pieces of others that come between places `begin` and `end`."""
        # Of each long document, the pieces that come before a place: piece j is at (p + j * N) / m.
        first, last = (-((long_places - edge * self._pieces) // self._count) for edge in (begin, end))
        counts = last - first
        which = np.repeat(np.arange(len(counts)), counts)
        pieces = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        place, remainder = np.divmod(long_places[which] + pieces * self._count, self._pieces[which])
        fraction = np.concatenate((np.full(len(places), -1.0), remainder / self._pieces[which]))
        all_places = np.concatenate((places, place))
        order = np.lexsort((fraction, all_places))
        return Entries(
            all_places[order],
            np.concatenate((documents, self._long[which]))[order],
            np.concatenate((np.zeros(len(places), dtype=np.int64), pieces * self._window))[order],
        )

    def width(self, entries: int) -> int:
        """Places that hold about so many entries, or as many as there are documents above the window, if that is more:
        each call of `between` goes through all of those."""
        return max(1, max(entries, len(self._long)) * self._count // max(self._total, 1))
