"""Documents for gpu_peers.py: of every step the same ones for each system, which fill its windows exactly.

They are stored where this plugin's shuffled order takes each step's. The others read that order from PREFIX.order.npy,
and the number of each document's pack, in this order, from PREFIX.packs.npy.

Conversations are of any length, so that no system's steps need hold the same ones; all read them in the order of the
packs of --sft. Megatron-LM has no packer: its packs are Megatron-Bridge's default, first fit of shuffled conversations
(first_fit_shuffle), each rounded up to the 4 tokens that --sft pads it to at CP=2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from scripts.corpus import END_OF_DOCUMENT, build, documents_of, text_files
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream

SEED = 1234
"""The --seed of start.TRAINING: it decides the plugin's order."""
MULTIPLE = 8
"""Of tokens of every document: what Megatron pads to at four ranks."""
PADDED = 4
"""What it pads a conversation to at two."""


def write_documents(prefix: Path, lengths: Any, window: int, windows: int, steps: int) -> int:
    """Documents a step, the same number in all. lengths: drawn from, tokens."""
    packs = [pack for batch in batches_of(lengths, window, windows, steps) for pack in batch]
    order, _ = write_packs(prefix, packs, window)
    return len(order) // steps


class Items(NamedTuple):
    """Conversations in the order in which they are read. lengths, targets: tokens of each; packs: the number of its
    pack."""

    lengths: Any
    targets: Any
    packs: Any

    def sums(self, first: int, end: int, *, packed: bool) -> tuple[int, int, int]:
        """Tokens, targets and number of conversations [first, end), or of those of as many packs."""
        held = slice(*np.searchsorted(self.packs, (first, end))) if packed else slice(first, end)
        return int(self.lengths[held].sum()), int(self.targets[held].sum()), len(self.lengths[held])


def write_conversations(prefix: Path, lengths: Any, window: int, packs: int) -> Items:
    """For at least so many packs. Also writes PREFIX.mask: a conversation is one to four questions and answers, and the
    answers train, 20 to 80 % of its tokens. lengths: drawn from, at most a window."""
    rng = np.random.default_rng(7)
    mean = float(np.mean(lengths))
    drawn = rng.choice(lengths, size=int(1.1 * packs * window / mean)).tolist()
    packed = first_fit(drawn, window, PADDED)
    order, placed = write_packs(prefix, packed, window)
    masks = [answers(rng, int(length)) for length in placed]
    np.concatenate(masks).tofile(f"{prefix}.mask")
    counts = np.array([mask.sum() for mask in masks])
    numbers = np.repeat(np.arange(len(packed)), [len(pack) for pack in packed])
    return Items(placed[order], counts[order], numbers)


def first_fit(lengths: list[int], window: int, multiple: int) -> list[list[int]]:
    """Each length in the first pack that has room for it, rounded up to the multiple."""
    packs: list[list[int]] = []
    room: list[int] = []
    for length in lengths:
        needs = -(-length // multiple) * multiple
        at = next((number for number, left in enumerate(room) if left >= needs), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(window)
        packs[at].append(length)
        room[at] -= needs
    return packs


def answers(rng: np.random.Generator, length: int) -> Any:
    """uint8[length]: 1 for the tokens of answers."""
    share, exchanges = rng.uniform(0.2, 0.8), min(int(rng.integers(1, 5)), max(1, length // 8))
    at = np.arange(length) * exchanges / length % 1.0
    return (at >= share).astype(np.uint8)


def write_packs(prefix: Path, packs: list[list[int]], window: int) -> tuple[Any, Any]:
    """The plugin's order of the documents, and lengths by document."""
    order, placed = in_order([length for pack in packs for length in pack], window)
    text = np.concatenate(list(documents_of(text_files(Path(os.__file__).parent, "*.py"))))
    text = np.resize(text, int(placed.sum()))
    text[np.cumsum(placed) - 1] = END_OF_DOCUMENT
    build(prefix, iter(np.split(text, np.cumsum(placed)[:-1])))
    np.save(f"{prefix}.order.npy", order)
    np.save(f"{prefix}.packs.npy", np.repeat(np.arange(len(packs)), [len(pack) for pack in packs]))
    return order, placed


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
