"""Masks of trained tokens: which predictions they count, what of a long document is kept, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import rewrite_corpus

from wlb_megatron.documents.blend import Blend, predictions_in
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.indexed import MaskedCorpus
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import Piece

DROP = Rules(8, "drop")


def written(folder: Path, masks: list[list[int]]) -> Path:
    """Documents whose tokens count up, with these masks."""
    documents = [np.arange(100 * at, 100 * at + len(mask), dtype=np.int32) for at, mask in enumerate(masks)]
    rewrite_corpus(folder / "corpus", documents)
    (folder / "corpus.mask").write_bytes(bytes(value for mask in masks for value in mask))
    return folder / "corpus"


masks = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=60)
@given(masks, st.integers(0, 3), st.data())
def test_targets_are_counted_as_one_would_by_hand(tmp_path_factory, rows, further, data):
    """Token i of a piece predicts token i + 1 + depth, which is to be in the document; beyond depth 0 the prediction's
    own inputs are to be in the piece."""
    blend = Blend([str(written(tmp_path_factory.mktemp("c"), rows))], masks=DROP)
    pieces = []
    for document, mask in enumerate(rows):
        if blend.length(document):
            start = data.draw(st.integers(0, len(mask) - 1))
            pieces.append(Piece(0, document, start, data.draw(st.integers(start + 1, len(mask)))))
            pieces.append(Piece(0, document, 0, len(mask)))
    expected = [0] * (further + 1)
    for depth in range(further + 1):
        for _, document, start, end, _ in pieces:
            inside = range(start, min(end - depth, len(rows[document]) - depth - 1))
            expected[depth] += sum(rows[document][token + 1 + depth] for token in inside)
    assert predictions_in(blend, further, pieces) == tuple(expected)
    chunks = []
    for epoch, document, start, end, _ in pieces:
        cut = data.draw(st.integers(start, end))
        chunks += [Piece(epoch, document, a, b, a - start) for a, b in ((start, cut), (cut, end)) if a < b]
    assert predictions_in(blend, further, chunks) == tuple(expected)
    reader = blend.readers[0]
    assert isinstance(reader, MaskedCorpus)
    assert reader.counts.tolist() == [sum(mask[1:]) for mask in rows]


@settings(deadline=None, max_examples=60)
@given(masks, st.integers(1, 9))
def test_a_truncated_document_keeps_the_window_with_the_most_targets(tmp_path_factory, rows, window):
    path = written(tmp_path_factory.mktemp("c"), rows)
    corpus = MaskedCorpus(path, Rules(window, "truncate"))
    for document, mask in enumerate(rows):
        starts = range(max(1, len(mask) - window + 1))
        windows = [sum(mask[start + 1 : start + window + 1]) for start in starts]
        assert corpus.counts[document] == max(windows)
        length = int(corpus.index.lengths[document])
        if not max(windows):
            assert length == 0
            continue
        begin = windows.index(max(windows))
        assert length == len(mask) - begin
        kept = [100 * document + at for at in range(begin, len(mask))]
        assert corpus.read(document, 0, length).tolist() == kept
        assert corpus.targets(document, 0, length).tolist() == [0, *mask[begin + 1 :]]
        copy = pickle.loads(pickle.dumps(corpus))
        assert copy.read(document, 0, length).tolist() == corpus.read(document, 0, length).tolist()


def test_eight_targets_in_twenty_two_tokens_fit_a_window_of_twenty_one(tmp_path):
    """Stock writes padding over the last label and trains seven."""
    corpus = MaskedCorpus(written(tmp_path, [[0] * 14 + [1] * 8]), Rules(21, "truncate"))
    assert corpus.counts.tolist() == [8]
    assert corpus.index.lengths.tolist() == [22]  # the 22nd is what the 21st predicts


def test_the_share_of_targets_leaves_out_what_is_dropped_and_follows_the_weights(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    first = written(tmp_path / "a", [[0, 1, 1, 1], [0] * 20 + [1], [0, 0, 0, 0]])
    second = written(tmp_path / "b", [[0, 0, 0, 1]])
    blend = Blend([str(first), str(second)], [3, 1], masks=DROP)
    rules = Rules(window=8, overlong="drop")
    assert blend.trained_share(blend.corpora(), rules) == pytest.approx((3 * 3 / 4 + 1 / 4) / 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read .*corpus.mask"),
        (b"\0", "has 1 bytes, its .bin 3 tokens"),
        (b"\0\1\7", "holds 7 at byte 2"),
    ],
)
def test_a_mask_that_is_not_of_these_tokens_is_refused(content, words, tmp_path):
    path = written(tmp_path, [[0, 1, 1]])
    path.with_suffix(".mask").unlink()
    if content is not None:
        path.with_suffix(".mask").write_bytes(content)
    with pytest.raises(WlbError, match=words):
        MaskedCorpus(path, DROP)
