"""Counts the tokens that predict a next token (with masks, a target): the number that losses are averaged over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.blend import Blend
from wlb_megatron.plan import Piece


def predictions(pieces: Sequence[Piece], lengths: npt.NDArray[np.int64], further: int = 0) -> tuple[int, ...]:
    """How many tokens of the pieces predict the next token, the one after it, and so on, `further` times.

    lengths: int64[n], tokens of each piece's document. A document's last token predicts nothing. A piece's last token
    predicts the next token if the document continues, but no further one, because that lies outside the piece.
    Example: a document of 5 tokens has 4, 3, 2 predictions; its first 4 tokens alone have 4, 3, 2, too.
    """
    bounds = np.array([(piece.start, piece.end) for piece in pieces], dtype=np.int64).reshape(-1, 2)
    counts = np.minimum(bounds[:, 1], lengths - 1) - bounds[:, 0]
    return tuple(int(np.maximum(counts - depth, 0).sum()) for depth in range(further + 1))


def predictions_in(corpus: Blend, further: int, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """`predictions` of pieces of the corpus's documents."""
    documents = np.array([piece.document for piece in pieces], dtype=np.int64)
    lengths = corpus.lengths_of(documents)
    return (
        _targets(corpus, further, pieces, lengths) if corpus.masked else predictions(pieces, lengths, further)
    )


def _targets(
    corpus: Blend, further: int, pieces: Sequence[Piece], lengths: npt.NDArray[np.int64]
) -> tuple[int, ...]:
    """The same of a corpus with masks: a prediction counts where what it predicts is a target."""
    counts = np.zeros(further + 1, dtype=np.int64)
    whole = []
    for piece, length in zip(pieces, lengths.tolist(), strict=True):
        if not further and piece.start == 0 and piece.end == length:
            whole.append(piece.document)
            continue
        mask = corpus.targets(piece.document, piece.start + 1, min(piece.end + 1, length))
        counts += [int(mask[depth:].sum()) for depth in range(further + 1)]
    counts[0] += int(corpus.targets_of(np.array(whole, dtype=np.int64)).sum())
    return tuple(counts.tolist())
