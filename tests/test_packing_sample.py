"""Lengths from which thresholds are learnt: a fair sample of what trains, whatever the order of the corpus."""

import numpy as np
import pytest

from wlb_megatron.documents.corpus import END, START, Corpus, CorpusWalk, Rules
from wlb_megatron.documents.lengths import pieces_of, sample_lengths
from wlb_megatron.documents.stream import DocumentStream

LARGE = 1 << 17


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_kinds_that_alternate_are_sampled_as_often_as_they_are(period):
    lengths = np.where(np.arange(LARGE) % period == 0, 7, 900)
    sample = sample_lengths(lengths, 1000, "split")
    assert len(sample) == 65536
    assert sample.count(7) / len(sample) == pytest.approx(1 / period, rel=0.03)
    halves = [sample[:32768].count(7), sample[32768:].count(7)]  # order is random, too
    assert halves[0] == pytest.approx(halves[1], rel=0.06)


def test_a_sample_is_the_same_each_time_and_of_plain_integers():
    lengths = np.arange(1, LARGE, dtype=np.int32)
    sample = sample_lengths(lengths, LARGE, "split")
    assert sample == sample_lengths(lengths, LARGE, "split") and {*map(type, sample)} == {int}
    assert len({*sample}) == len(sample)  # each document once


@pytest.mark.parametrize("at", [0, 1, LARGE - 1])
def test_all_is_looked_at_before_nothing_is_found(at):
    lengths = np.zeros(LARGE, dtype=np.int64)
    lengths[at] = 50
    assert sample_lengths(lengths, 40, "split") in ([40, 10], [10, 40])
    assert sample_lengths(lengths, 40, "truncate") == [40]
    assert sample_lengths(lengths, 40, "drop") == []
    assert sample_lengths(np.zeros(0, dtype=np.int64), 40, "split") == []


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_pieces_are_those_that_a_walk_gives(overlong):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 60, 500) * (rng.random(500) < 0.7)
    walk, walked = CorpusWalk(Corpus("one", lengths), Rules(16, overlong), 0), []
    while len(rows := walk.advance()):
        walked += (rows[:, END] - rows[:, START]).tolist()
    assert sorted(pieces_of(lengths, 16, overlong).tolist()) == sorted(walked)


def test_a_stream_s_next_lengths_are_told_in_its_mixture_without_being_taken():
    corpora = [
        Corpus("rare", np.full(5000, 3), weight=1.0),
        Corpus("often", np.full(9000, 8), 5000, weight=3.0),
    ]
    stream = DocumentStream(corpora, Rules(16, "split", 1, endless=True))
    for _ in range(77):
        stream.next()
    before = stream.state()
    coming = stream.peek(4000)
    assert stream.state() == before
    assert coming == [piece.tokens for _ in range(4000) if (piece := stream.next())]
    tokens = {length: length * coming.count(length) for length in (3, 8)}
    assert tokens[8] / tokens[3] == pytest.approx(3.0, rel=0.02)
    finite = DocumentStream.of_lengths([4, 0, 9], Rules(8, "split"))
    assert finite.peek(99) == [4, 8, 1] and finite.next() is not None
