"""The order in which an epoch visits a corpus: stored for a small corpus, computed place by place for a large one.

A stored order of 1e9 documents is 8 GB. Every rank of a node would hold it, after minutes of sorting. So a large
corpus uses a keyed permutation, which computes any stretch of the order from its places alone, without a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
MOST_STORED = 2**17
"""The largest corpus, in documents, whose order is stored (1 MB). Changing it changes orders: see corpus.VERSION."""

_ROUNDS = 8


class EpochOrder:
    """`order(begin, end)`: documents at places [begin, end) of an epoch, int64[min(end, count) - begin]."""

    def __init__(
        self, count: int, stored: IntArray | None = None, keys: npt.NDArray[np.uint64] | None = None
    ) -> None:
        """Takes `stored`, the document of each place, or a permutation's `keys`, see `permuted`, or neither: as they
        stand."""
        self._count, self._stored, self._keys = count, stored, keys

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


def epoch_order(count: int, seeds: Sequence[int] | None) -> EpochOrder:
    """The order of `count` documents by seeds; None: in file order.

    Both kinds use raw 64-bit draws, whose stream numpy keeps the same from version to version.
    """
    if seeds is None:
        return EpochOrder(count)
    draws = np.random.PCG64(np.random.SeedSequence(seeds))
    if count <= MOST_STORED:
        return EpochOrder(count, stored=np.argsort(draws.random_raw(count), kind="stable"))
    return EpochOrder(count, keys=draws.random_raw(_ROUNDS))


def permuted(places: IntArray, count: int, keys: npt.NDArray[np.uint64], *, back: bool = False) -> IntArray:
    """Where a permutation of [0, count) takes each place; back: the inverse. keys: uint64[even], one per round.

    A Feistel network permutes [0, 2**bits), the smallest power of two of at least `count`. A result of `count` or
    more goes through it again until it is smaller (cycle walking: less than twice in mean). Example with 5: if 0 goes
    to 6, and 6 to 3, then 0 goes to 3.
    """
    bits = max(2, (count - 1).bit_length())
    network = _network_back if back else _network
    images = network(places.astype(np.uint64), bits, keys)
    while len(beyond := np.flatnonzero(images >= count)):
        images[beyond] = network(images[beyond], bits, keys)
    return images.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Each round XORs a hash of one half of the bits into the other half, which is its own inverse."""
    low, high, low_mask, high_mask = _halves(values, bits)
    for first, second in keys.reshape(-1, 2):
        high ^= _hash(low ^ first) & high_mask
        low ^= _hash(high ^ second) & low_mask
    return high << np.uint64(bits // 2) | low


def _network_back(
    values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """What `_network` takes to these values: its rounds undone, the last one first."""
    low, high, low_mask, high_mask = _halves(values, bits)
    for first, second in keys.reshape(-1, 2)[::-1]:
        low ^= _hash(high ^ second) & low_mask
        high ^= _hash(low ^ first) & high_mask
    return high << np.uint64(bits // 2) | low


def _halves(values: npt.NDArray[np.uint64], bits: int) -> tuple[Any, Any, np.uint64, np.uint64]:
    """The lower and upper halves of the values' bits, and a mask of each."""
    low_mask, high_mask = (np.uint64((1 << size) - 1) for size in (bits // 2, bits - bits // 2))
    return values & low_mask, values >> np.uint64(bits // 2), low_mask, high_mask


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA'14): every bit of the input moves every bit of the output."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
