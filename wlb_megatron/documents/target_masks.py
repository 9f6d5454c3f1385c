"""A .bin/.idx pair with a mask of the tokens that are trained: one byte for each token of the .bin, in its order.

1: the token is a trained target, so the token before it predicts it. Example, 5 tokens, mask 0 0 1 0 1: tokens 1 and 3
predict their next ones, 0 and 2 do not, and 4 predicts nothing, as a document's last token never does. The mask of a
document's first token says nothing, because nothing precedes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.indexed import FILES, IndexedCorpus
from wlb_megatron.errors import WlbError

IntArray = npt.NDArray[np.int64]

_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a long document trains: with overlong "truncate", `window` tokens of it, those with the most targets."""

    window: int
    overlong: str


class MaskedCorpus(IndexedCorpus):
    """Documents that train only their targets; one without a target has no tokens.

    counts: int32[n], targets of each document, of what is kept of it. A truncated document begins where the window with
    the most targets begins, the first such, so that its own first tokens may be left out.
    """

    def __init__(
        self, path: str | Path, kept_part: Kept, measured_before: tuple[Any, ...] | None = None
    ) -> None:
        """`measured_before` is a pickled copy's. WlbError as for IndexedCorpus, and where the mask is missing or not
        one of these tokens."""
        super().__init__(path)
        self._kept = kept_part
        self.mask_path = self.index.path.with_suffix(".mask")
        if measured_before is None:
            self._check_mask()
            measured_before = self._measure()
        self._known = measured_before
        self.counts, lengths, offsets = measured_before
        self.index = replace(
            self.index,
            lengths=self.index.lengths if lengths is None else lengths,
            offsets=self.index.offsets if offsets is None else offsets,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedCorpus, (self.index.path, self._kept, self._known)

    def targets(self, document: int, start: int, end: int) -> npt.NDArray[np.uint8]:
        """uint8[end - start]: 1 for each of tokens [start, end) of a document that is a trained target."""
        item = self.index.token_type.itemsize
        first = int(self.index.offsets[document]) // item + start
        mask = np.frombuffer(FILES.read(self.mask_path, first, end - start), np.uint8)
        if start == 0 and end > 0:
            mask = mask.copy()
            mask[0] = 0
        return mask

    def digest(self) -> str:
        """Of the targets of each document; and of all tokens, tokenizer, template and format where index.json tells
        them. (Not of the jsonl's time: it may be copied.)"""
        digest = hashlib.sha256(self.counts.tobytes())
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            about = json.loads((self.index.path.parent / "index.json").read_text(encoding="utf-8"))
            made_of = {name: value for name, value in about["key"].items() if name != "file"}
            made_of |= {"tokens": about["tokens"]} if "tokens" in about else {}
            digest.update(json.dumps(made_of, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def _check_mask(self) -> None:
        tokens = self.bin_path.stat().st_size // self.index.token_type.itemsize
        try:
            size = self.mask_path.stat().st_size
        except OSError as error:
            raise WlbError(
                f"cannot read {self.mask_path}: {error.strerror}; put the mask beside its .idx, one byte a token"
            ) from None
        if size != tokens:
            raise WlbError(
                f"{self.mask_path} has {size} bytes, its .bin {tokens} tokens: a mask has one byte for each token"
            )

    def _measure(self) -> tuple[npt.NDArray[np.int32], IntArray | None, IntArray | None]:
        """Targets by document; and lengths and offsets where they change."""
        counts = np.zeros(len(self), dtype=np.int32)
        lengths = np.asarray(self.index.lengths, dtype=np.int64)
        begins = np.asarray(self.index.offsets, dtype=np.int64) // self.index.token_type.itemsize
        if len(lengths) and (begins[1:] != (begins + lengths)[:-1]).any():
            raise WlbError(
                f"{self.index.path}: documents do not follow each other in the .bin; write them in order"
            )
        for documents, sums in self._sums(begins, lengths):
            first, last = begins[documents] - begins[documents.start], lengths[documents]
            counts[documents] = sums[first + last] - sums[np.minimum(first + 1, first + last)]
        moved = np.zeros(len(self), dtype=np.int64)
        if self._kept.overlong == "truncate":
            for document in np.flatnonzero(lengths > self._kept.window).tolist():
                moved[document], counts[document] = self._fullest(document, int(lengths[document]))
        nothing = counts == 0
        if not (moved.any() or (nothing & (lengths > 0)).any()):
            return counts, None, None
        offsets = self.index.offsets + moved * self.index.token_type.itemsize
        return counts, np.where(nothing, 0, lengths - moved), offsets

    def _sums(self, begins: IntArray, lengths: IntArray) -> Iterator[tuple[slice, IntArray]]:
        """Blocks of documents, each with the running sum of its mask, from 0. WlbError for a byte above 1."""
        begin = 0
        while begin < len(lengths):
            end = int(np.searchsorted(begins, begins[begin] + _BLOCK_TOKENS, side="right"))
            end = max(begin + 1, min(end, len(lengths)))
            first, last = int(begins[begin]), int(begins[end - 1] + lengths[end - 1])
            mask = np.frombuffer(FILES.read(self.mask_path, first, last - first), np.uint8)
            if len(mask) and mask.max() > 1:
                byte = first + int((mask > 1).argmax())
                raise WlbError(
                    f"{self.mask_path} holds {mask[byte - first]} at byte {byte}: a mask holds 0 and 1"
                )
            yield slice(begin, end), np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
            begin = end

    def _fullest(self, document: int, length: int) -> tuple[int, int]:
        """Where the window with the most targets begins, the first such, and how many it trains.

        A window [s, s + w) predicts tokens s + 1 to s + w: its last token predicts the one that really follows.
        """
        window = self._kept.window
        sums = np.concatenate(([0], np.cumsum(self.targets(document, 0, length), dtype=np.int64)))
        starts = np.arange(length - window + 1)
        targets = sums[np.minimum(starts + window + 1, length)] - sums[starts + 1]
        best_start = int(targets.argmax())
        return best_start, int(targets[best_start])
