"""Positive controls of convergence.py: what must change the loss, or the experiment sees nothing.

sorted: documents of 64 global batches, shortest first. unmasked: the documents of a window see those before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from wlb_megatron.packing import factory
from wlb_megatron.packing.fixed.baselines import OriginalPacker, cut_windows, freeze
from wlb_megatron.packing.packer import Batch, Packed
from wlb_megatron.packing.saved_pieces import Waiting
from wlb_megatron.packing.varlen.assign import in_given_order
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.plans.loaded import LoadedMicroBatch
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.cut import cut
from wlb_megatron.workload.kernel_table import h100


class SortedPacker(OriginalPacker):
    """Windows filled with the documents of 64 global batches by length; else as `original`."""

    intake_batches = 64

    def pack(self, iteration: int, arrived: Sequence[Piece], batch: Batch, draining: bool = False) -> Packed:
        by_length = sorted(arrived, key=lambda piece: piece.tokens)
        self._waiting += (Waiting(piece, iteration) for piece in by_length)
        windows, self._waiting = cut_windows(self._waiting, self._window, batch.bins, self._max_documents)
        return Packed(in_given_order(freeze(windows, batch.bins, self._cost), self._ranks.dp))


@contextmanager
def sorted_documents() -> Iterator[None]:
    """Within it `--wlb-packing original` is SortedPacker."""
    usual = factory.OriginalPacker
    factory.OriginalPacker = SortedPacker  # type: ignore[misc]
    try:
        yield
    finally:
        factory.OriginalPacker = usual  # type: ignore[misc]


def unmasked(batch: LoadedMicroBatch) -> LoadedMicroBatch:
    """A micro-batch of one rank as if all of it were one document: its mask and its positions."""
    tokens = np.array([batch.planned.shard.tokens], dtype=np.int64)
    (whole,) = cut([tokens], 1, "per-sequence", h100())
    return replace(batch, attention=attention_layout(whole, 0))
