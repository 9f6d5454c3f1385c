"""Puts the corpora of a --data-path under one range of document ids, by Megatron's rules for weights and --split."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.corpus import Corpus, Lengths, Rules
from wlb_megatron.documents.indexed import IndexedCorpus, MaskedCorpus
from wlb_megatron.errors import WlbError
from wlb_megatron.plan import Piece

SPLITS = ("train", "valid", "test")


def parse_blend(values: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of a --data-path (or of a --data-args-path file, split at white space).

    ["30", "a", "70", "b"] is two corpora with weights; ["a"] and ["a", "b"] have none: as Megatron reads it, an
    odd count, or an even one without a number at each first place, is prefixes only.
    """
    if not values:
        raise WlbError(
            "no corpus given: give at least one prefix to --data-path; in a clone, `python -m scripts.corpus PREFIX` "
            "makes one to try"
        )
    heads = [_number(value) for value in values[::2]]
    if len(values) % 2 == 1 or all(head is None for head in heads):
        return [value.strip() for value in values], None
    weights = [head for head in heads if head is not None]
    if len(weights) < len(heads):
        raise WlbError(f"cannot read blend {' '.join(values)!r}; give a weight before every prefix, or none")
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise WlbError(f"blend weights {weights} must not be negative nor all 0; correct --data-path")
    return [value.strip() for value in values[1::2]], weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_bounds(split: str, documents: int) -> list[tuple[int, int]]:
    """Documents [begin, end) of train, valid and test for Megatron's --split, contiguous and in file order.

    "8,1,1" of 10 documents: [(0, 8), (8, 9), (9, 10)]. (Megatron's GPT dataset cuts sequences so; a document
    is a sequence where preprocess_data.py ran without --split-sentences.)
    """
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError:
        shares = []
    shares += [0.0] * (3 - len(shares))
    if len(shares) > 3 or not any(shares):
        raise WlbError(
            f"--split {split!r} has no shares to read; give shares of train, valid and test, e.g. 969,30,1"
        )
    weights = np.array(shares, dtype=np.float64)
    # The sums and the rounding are Megatron's own, to land on the same document.
    ends = [round(end * documents) for end in accumulate((weights / weights.sum()).tolist())]
    return list(pairwise([0, *ends]))


class Blend:
    """Several .bin/.idx pairs.

    Ids run through the corpora in the given order, over whole corpora, whatever the split. Example: with 5 and 3
    documents, id 6 is document 1 of the second.
    """

    def __init__(
        self,
        paths: Sequence[str],
        weights: Sequence[float] | None = None,
        trusted: Callable[[str], bool] | None = None,
        masks: Rules | None = None,
    ) -> None:
        """weights: one per path, as `parse_blend` gives them; None: each corpus in proportion to its tokens. trusted:
        whether another process checks a path's index; None: none does. masks: each has a mask of its trained tokens."""
        self.paths = list(paths)
        self.weights = None if weights is None else list(weights)
        if weights is not None and len(weights) != len(paths):
            raise WlbError(f"{len(paths)} corpora but {len(weights)} weights; give one weight per corpus")
        self.masked = masks is not None
        checked = [trusted is not None and trusted(path) for path in paths]
        self.readers: list[IndexedCorpus] = [
            IndexedCorpus(path, trusted=is_trusted) if masks is None else MaskedCorpus(path, masks)
            for path, is_trusted in zip(paths, checked, strict=True)
        ]
        self.first_ids = list(accumulate((len(reader) for reader in self.readers), initial=0))

    def read(self, document: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [start, end) of a document by its id, int64[end - start]. IndexError outside of it."""
        corpus, local = self._locate(document)
        return self.readers[corpus].read(local, start, end)

    def targets(self, document: int, start: int, end: int) -> npt.NDArray[np.uint8]:
        """uint8[end - start]: 1 for each of tokens [start, end) of a document that is trained if it is predicted."""
        corpus, local = self._locate(document)
        reader = self.readers[corpus]
        if isinstance(reader, MaskedCorpus):
            return reader.targets(local, start, end)
        return np.ones(end - start, dtype=np.uint8)

    def targets_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Targets of whole documents by their ids, int64[n] of int64[n]; of a corpus with masks."""
        return self._of_each(documents, [reader.counts for reader in self.readers])  # type: ignore[attr-defined]

    def trained_share(self, corpora: Sequence[Corpus], rules: Rules) -> float:
        """Targets over tokens of what these corpora give out, by their weights; 1 without masks."""
        if not self.masked:
            return 1.0
        shares = []
        for corpus in corpora:
            kept_tokens = rules.kept(np.asarray(corpus.lengths, dtype=np.int64))
            targets = self.targets_of(corpus.first_id + np.flatnonzero(kept_tokens)).sum()
            shares.append(float(targets) / max(1, int(kept_tokens.sum())))
        return float(np.average(shares, weights=[corpus.weight for corpus in corpora]))

    def length(self, document: int) -> int:
        """Tokens of a document by its id. IndexError if there is none."""
        corpus, local = self._locate(document)
        return int(self.readers[corpus].index.lengths[local])

    def lengths_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of documents by their ids, int64[n] of int64[n]. IndexError if there is no such document."""
        if len(documents) and not 0 <= documents.min() <= documents.max() < self.first_ids[-1]:
            raise IndexError(f"documents {documents.min()} to {documents.max()} of {self.first_ids[-1]}")
        return self._of_each(documents, [reader.index.lengths for reader in self.readers])

    def _of_each(self, documents: npt.NDArray[np.int64], columns: Sequence[Lengths]) -> npt.NDArray[np.int64]:
        """int64[n]: each document's entry in its corpus's column."""
        owner = np.searchsorted(self.first_ids, documents, side="right") - 1
        entries = np.empty(len(documents), dtype=np.int64)
        for corpus in np.unique(owner).tolist():
            mine = owner == corpus
            entries[mine] = columns[corpus][documents[mine] - self.first_ids[corpus]]
        return entries

    def name(self, document: int) -> str:
        """Corpus and number of a document by its id, for messages. IndexError if there is none."""
        corpus, local = self._locate(document)
        return f"{self.paths[corpus]}: document {local}"

    def _locate(self, document: int) -> tuple[int, int]:
        """Its corpus, and its number there."""
        if not 0 <= document < self.first_ids[-1]:
            raise IndexError(f"document {document} of {self.first_ids[-1]}")
        corpus = bisect_right(self.first_ids, document) - 1
        return corpus, document - self.first_ids[corpus]

    def corpora(self, split: str | None = None, part: str = "train") -> list[Corpus]:
        """What a DocumentStream draws from: `part` of each corpus by `split` (None: all of it).

        Corpora that have weight 0, or no token in this part, are left out; the list may be empty.
        """
        lengths = [reader.index.lengths for reader in self.readers]
        part_of_each = part_corpora(self.paths, lengths, self.weights, split, part)
        digests = {
            path: reader.digest()
            for path, reader in zip(self.paths, self.readers, strict=True)
            if isinstance(reader, MaskedCorpus)
        }
        return [replace(corpus, targets=digests.get(corpus.name, "")) for corpus in part_of_each]


def part_corpora(
    paths: Sequence[str],
    lengths: Sequence[Lengths],
    weights: Sequence[float] | None,
    split: str | None = None,
    part: str = "train",
) -> list[Corpus]:
    """The corpora of a part, see Blend.corpora. `lengths` has those of all documents of each path."""
    corpora, first_id = [], 0
    for number, (path, documents) in enumerate(zip(paths, lengths, strict=True)):
        begin, end = 0, len(documents)
        if split is not None:
            begin, end = split_bounds(split, len(documents))[SPLITS.index(part)]
        part_lengths = documents[begin:end]
        weight = float(part_lengths.sum()) if weights is None else weights[number]
        if weight > 0 and part_lengths.any():
            corpora.append(Corpus(path, part_lengths, first_id + begin, weight))
        first_id += len(documents)
    return corpora


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
    whole_documents = []
    for piece, length in zip(pieces, lengths.tolist(), strict=True):
        if not further and piece.start == 0 and piece.end == length:
            whole_documents.append(piece.document)
            continue
        mask = corpus.targets(piece.document, piece.start - piece.prefix + 1, min(piece.end + 1, length))
        counts += [int(mask[max(depth, piece.prefix) :].sum()) for depth in range(further + 1)]
    counts[0] += int(corpus.targets_of(np.array(whole_documents, dtype=np.int64)).sum())
    return tuple(counts.tolist())
