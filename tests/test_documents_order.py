"""The order of an epoch: a permutation of any size, the same for ever, and of large corpora held in no memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.piece_order import MOST_STORED, epoch_order, permuted
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError

LARGE = MOST_STORED + 77


def keys(seed: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(8)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_a_computed_order_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(permuted(np.arange(count), count, keys(seed)).tolist()) == list(range(count))


@settings(deadline=None)
@given(st.integers(2, 2**40), st.integers(0, 2**32), st.data())
def test_computed_places_are_distinct_and_within_any_count(
    count: int, seed: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, count - 1))
    places = np.arange(begin, min(begin + 1000, count))
    images = permuted(places, count, keys(seed))
    assert len(np.unique(images)) == len(places)
    assert images.min() >= 0 and images.max() < count


def test_a_stretch_is_the_same_wherever_it_begins() -> None:
    order = epoch_order(LARGE, [7, 0, 0])
    whole = order(0, LARGE + 10)
    assert sorted(whole.tolist()) == list(range(LARGE))
    for begin, end in ((0, 1), (5, 4101), (LARGE - 3, LARGE + 4096), (LARGE, LARGE + 4096)):
        assert order(begin, end).tolist() == whole[begin:end].tolist()


def test_orders_are_the_same_for_ever() -> None:
    """Frozen: a change breaks every resume. The first is stored and sorted, the second computed."""
    assert epoch_order(10, [1234, 0, 0])(0, 10).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    assert epoch_order(10**9, [1234, 0, 0])(0, 5).tolist() == FROZEN


FROZEN = [811039086, 83283207, 617736726, 332625753, 992927886]


def test_seeds_epochs_and_corpora_have_orders_of_their_own() -> None:
    firsts = [
        tuple(epoch_order(LARGE, seeds)(0, 8)) for seeds in ([1, 0, 0], [2, 0, 0], [1, 1, 0], [1, 0, 1])
    ]
    assert len(set(firsts)) == 4


def test_a_computed_order_looks_drawn() -> None:
    """Against what draws would give: bounds at five standard deviations, on frozen seeds."""
    order = epoch_order(LARGE, [3, 0, 0])(0, LARGE) / LARGE
    assert abs(np.corrcoef(order, np.arange(LARGE))[0, 1]) < 5 / LARGE**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / LARGE**0.5
    # Where 64 documents land in 3,000 orders: 128 cells of 1,500 each.
    at = np.concatenate([permuted(np.arange(64), LARGE, keys(seed)) for seed in range(3000)])
    cells = np.bincount(at * 128 // LARGE, minlength=128)
    assert ((cells - 1500) ** 2 / 1500).sum() < 127 + 5 * (2 * 127) ** 0.5
    # Nor do neighbours stay neighbours: 3,000 orders have 2 x 63 x 3,000 / LARGE = 2.9 pairs that do.
    pairs = np.abs(np.diff(at.reshape(3000, 64), axis=1)) == 1
    assert pairs.sum() < 2.9 + 5 * 2.9**0.5


def test_a_stream_over_many_documents_holds_nothing_of_their_number() -> None:
    lengths = np.full(10**7, 3, dtype=np.int32)
    tracemalloc.start()
    stream = DocumentStream([Corpus("large", lengths)], Rules(8, seed=1, endless=True))
    pieces = [stream.next() for _ in range(10_000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6, "an order of 8 bytes a document would be 80 MB"
    assert len({piece.document for piece in pieces if piece is not None}) == 10_000


def test_a_state_of_before_the_first_release_is_refused() -> None:
    stream = DocumentStream.of_lengths(np.full(9, 3, dtype=np.int32), Rules(8, seed=5, endless=True))
    with pytest.raises(WlbError, match="has version 1, this one reads 2 to 3"):
        stream.load_state({**stream.state(), "version": 1})
