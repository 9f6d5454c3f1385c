"""Documents for gpu_peers.py: of every step the same ones for each system, which fill its windows exactly.

They are stored where this plugin's shuffled order takes each step's. The others read that order from PREFIX.order.npy,
and the number of each document's pack, in this order, from PREFIX.packs.npy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.documents.writing.text_corpus import END_OF_DOCUMENT, build, documents_of, text_files

SEED = 1234
"""gpu_train's --seed: it decides the plugin's order."""
MULTIPLE = 8
"""Of tokens of every document: what Megatron pads to at four ranks."""


def write_documents(prefix: Path, lengths: Any, window: int, windows: int, steps: int) -> int:
    """Documents a step, the same number in all. lengths: drawn from, tokens."""
    batches = list(batches_of(lengths, window, windows, steps))
    packs = [pack for batch in batches for pack in batch]
    order, placed = in_order([length for pack in packs for length in pack], window)
    text = np.concatenate(list(documents_of(text_files(Path(os.__file__).parent, "*.py"))))
    text = np.resize(text, int(placed.sum()))
    text[np.cumsum(placed) - 1] = END_OF_DOCUMENT
    build(prefix, iter(np.split(text, np.cumsum(placed)[:-1])))
    np.save(f"{prefix}.order.npy", order)
    np.save(f"{prefix}.packs.npy", np.repeat(np.arange(len(packs)), [len(pack) for pack in packs]))
    return len(order) // steps


def in_order(wanted: list[int], window: int) -> tuple[Any, Any]:
    """The plugin's order of as many documents, and lengths by document, so that it takes these lengths in turn."""
    stream = DocumentStream.of_lengths(np.full(len(wanted), 1), Rules(window, seed=SEED))
    pieces = iter(stream.next, None)
    order = np.array([piece.document for piece in pieces if piece is not None])
    placed = np.zeros(len(wanted), dtype=np.int64)
    placed[order] = wanted
    return order, placed


def batches_of(lengths: Any, window: int, windows: int, steps: int) -> Iterator[list[list[int]]]:
    """Packs of lengths for each step. Draws with another number of documents than the usual one are left out."""
    rng = np.random.default_rng(7)

    def pack() -> list[int]:
        held: list[int] = []
        while (left := window - sum(held)) > 0:
            held.append(min(left, -(-int(rng.choice(lengths)) // MULTIPLE) * MULTIPLE))
        return held

    documents = round(median([len(pack()) for _ in range(101)]) * windows)
    while steps:
        drawn = [pack() for _ in range(windows)]
        if sum(map(len, drawn)) == documents:
            steps -= 1
            yield drawn
