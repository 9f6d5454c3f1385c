"""Chooses how a micro-batch is cut over its context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from wlb_megatron.config import SHARDINGS
from wlb_megatron.sharding.per_document import document_cuts
from wlb_megatron.sharding.per_sequence import sequence_cuts
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import PieceList, deal

_CUTS = {"per-sequence": sequence_cuts, "per-document": document_cuts}


def shard(lengths: npt.ArrayLike, cp_size: int, kind: str) -> ShardPlan:
    """Plan of one micro-batch.

    lengths: int[n], tokens of each piece in packed order, the padding piece (if any) last; their sum must be
    a positive multiple of cp_size. kind: one of config.SHARDINGS. Raises ValueError otherwise.
    """
    return shard_all([lengths], cp_size, kind)[0]


def shard_all(micro_batches: Sequence[npt.ArrayLike], cp_size: int, kind: str) -> list[ShardPlan]:
    """Plans of several micro-batches in one pass, much faster than one by one. See `shard`."""
    if kind not in SHARDINGS:
        raise ValueError(f"unknown sharding {kind!r}; choose one of {', '.join(SHARDINGS)}")
    pieces = PieceList.of(micro_batches)
    return deal(pieces, _CUTS[kind](pieces, cp_size))
