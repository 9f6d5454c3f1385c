"""Controls of convergence.py: two arms that must change the loss, else nothing can be seen, and one that must not.

sorted: documents of 64 global batches, shortest first. unmasked: the documents of a window see those before them.
cut: plain's pieces of documents, iteration by iteration, in balanced micro-batches of varying length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from scripts.reproduce.solver import BatchesPlanner
from wlb_megatron.packing import factory
from wlb_megatron.packing.baselines import OriginalPacker, cut_windows, freeze, price
from wlb_megatron.packing.packer import Packed
from wlb_megatron.packing.varlen.arrange import in_given_order
from wlb_megatron.plan import MicroBatch, Piece, Waiting
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch
from wlb_megatron.registry import PACKERS, PackerEntry
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import cut
from wlb_megatron.workload.kernel_table import h100


class SortedPacker(OriginalPacker):
    """Windows filled with the documents of 64 global batches by length; else as `original`."""

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        by_length = sorted(arrived, key=lambda piece: piece.tokens)
        self._waiting += (Waiting(piece, iteration) for piece in by_length)
        windows, self._waiting = cut_windows(self._waiting, self._window, bins, self._max_documents)
        return Packed(in_given_order(freeze(windows, bins, self._cost), self._ranks.dp))


class CutPacker(OriginalPacker):
    """The pieces that `original` trains in an iteration, cut where it cuts them, in other micro-batches.

    Pieces by falling work, each to the micro-batch of least work that has room. Losses and gradients are the same to
    rounding, so a difference between plain and whole documents that this arm does not show is not the packing's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_tokens = 2 * self._window

    def pack(self, iteration: int, arrived: Sequence[Piece], bins: int, draining: bool = False) -> Packed:
        packed = super().pack(iteration, arrived, bins, draining)
        pieces = [piece for row in packed.grid for micro_batch in row for piece in micro_batch.pieces]
        contents: list[list[Piece]] = [[] for _ in range(bins)]
        for piece in sorted(pieces, key=lambda piece: -piece.tokens):
            roomy = [
                pieces_of_bin
                for pieces_of_bin in contents
                if _tokens(pieces_of_bin) + piece.tokens <= self.max_tokens
            ]
            min(roomy, key=lambda pieces_of_bin: price(pieces_of_bin, self._cost)).append(piece)
        micro_batches = [
            MicroBatch(tuple(pieces_of_bin), price(pieces_of_bin, self._cost)) for pieces_of_bin in contents
        ]
        return Packed(in_given_order(micro_batches, self._ranks.dp), packed.put_back)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)


CONTROLS = {"sorted": SortedPacker, "cut": CutPacker}


@contextmanager
def packing_of(arm: str) -> Iterator[None]:
    """Within it `--wlb-packing original` is this arm's packer, if the arm has one of its own."""
    usual, planner = PACKERS["original"], factory.Planner
    if arm in CONTROLS:
        PACKERS["original"] = PackerEntry(f"{__name__}:{CONTROLS[arm].__name__}", arm)
    if arm == "sorted":
        factory.Planner = partial(BatchesPlanner, batches=64)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        PACKERS["original"], factory.Planner = usual, planner  # type: ignore[misc]


def unmasked(batch: LoadedMicroBatch) -> LoadedMicroBatch:
    """A micro-batch of one rank as if all of it were one document: its mask and its positions."""
    tokens = np.array([batch.planned.shard.tokens], dtype=np.int64)
    (whole,) = cut([tokens], 1, "per-sequence", h100())
    return batch._replace(attention=attention_layout(whole, 0))
