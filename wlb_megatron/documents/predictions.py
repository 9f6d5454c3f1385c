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
    Chunks predict together what the document does. Example: a document of 5 tokens has 4, 3, 2 predictions; its first 4
    tokens alone have 4, 3, 2, too. Its chunks of 2 and 3 tokens count as 2, 1, 0 and 2, 2, 2.
    """
    bounds = [(piece.start - piece.prefix, piece.start, piece.end) for piece in pieces]
    begin, *ends = np.array(bounds, dtype=np.int64).reshape(-1, 3).T
    # Up to a chunk's end, less up to its start.
    before, counts = (np.minimum(end, lengths - 1) - begin for end in ends)
    return tuple(
        int((np.maximum(counts - depth, 0) - np.maximum(before - depth, 0)).sum())
        for depth in range(further + 1)
    )


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
        mask = corpus.targets(piece.document, piece.start - piece.prefix + 1, min(piece.end + 1, length))
        counts += [int(mask[max(depth, piece.prefix) :].sum()) for depth in range(further + 1)]
    counts[0] += int(corpus.targets_of(np.array(whole, dtype=np.int64)).sum())
    return tuple(counts.tolist())
