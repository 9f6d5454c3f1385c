"""How a micro-batch is cut over its context-parallel ranks: by name, or as the kernel table predicts is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy.typing as npt

from wlb_megatron.config import SHARDINGS
from wlb_megatron.sharding.hybrid import mix
from wlb_megatron.sharding.per_document import document_cuts
from wlb_megatron.sharding.per_sequence import sequence_cuts
from wlb_megatron.sharding.predict import predict_all
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import PieceList, deal
from wlb_megatron.workload.kernel_table import KernelTable, h100


def shard(lengths: npt.ArrayLike, cp_size: int, kind: str, table: KernelTable | None = None) -> ShardPlan:
    """Plan of one micro-batch.

    lengths: int[n], tokens of each piece in packed order, the padding piece (if any) last; their sum must be
    a positive multiple of cp_size. kind: one of config.SHARDINGS. table: what hybrid and adaptive predict with
    (default: the H100's). Raises ValueError otherwise.

    hybrid is the mixed plan, or per-document or per-sequence, which it contains, where one is predicted faster.
    adaptive takes the fastest of the three; where they tie, the simplest.
    """
    return shard_all([lengths], cp_size, kind, table)[0]


def shard_all(
    micro_batches: Sequence[npt.ArrayLike], cp_size: int, kind: str, table: KernelTable | None = None
) -> list[ShardPlan]:
    """Plans of several micro-batches in one pass, much faster than one by one. See `shard`."""
    if kind not in SHARDINGS:
        raise ValueError(f"unknown sharding {kind!r}; choose one of {', '.join(SHARDINGS)}")
    pieces = PieceList.of(micro_batches)
    if kind == "per-sequence":
        return deal(pieces, sequence_cuts(pieces, cp_size))
    by_document = deal(pieces, document_cuts(pieces, cp_size))
    if kind == "per-document" or cp_size == 1 or not by_document:
        return by_document
    table = table or h100()
    by_sequence = deal(pieces, sequence_cuts(pieces, cp_size))
    mixed = [mix(plan.lengths, cp_size, table) for plan in by_document]
    choices = [("hybrid", mixed), ("per-document", by_document), ("per-sequence", by_sequence)]
    if kind == "adaptive":
        choices.reverse()
    times = predict_all([plan for _, plans in choices for plan in plans], table).max(axis=1)
    # argmin takes the first of equals
    chosen = times.reshape(len(choices), -1).argmin(axis=0).tolist()
    return [replace(choices[choice][1][at], kind=choices[choice][0]) for at, choice in enumerate(chosen)]
