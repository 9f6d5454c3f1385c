"""The planner of a job: the same for training and every command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.batch_schedule import BatchSchedule
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.packer import make_packer
from wlb_megatron.packing.planner import Planner, Stream
from wlb_megatron.workload.cost_model import CostModel

SAMPLE, SAMPLE_EPOCHS = 65536, 16
"""Pieces from which thresholds, and whether to train in chunks, are learnt: the first that train, at most. Of a
handful of documents a few epochs say as much."""


def sample_lengths_of(stream: DocumentStream, documents: int) -> list[int]:
    """Lengths (tokens) of the pieces that a job learns from, in the order and the mixture in which they train.

    documents: of all corpora together.
    """
    return stream.peek(min(SAMPLE, SAMPLE_EPOCHS * documents))


def plan_job(
    stream: Stream,
    config: WlbConfig,
    cost: CostModel,
    *,
    window: int,
    micro_batches: int,
    dp: int = 1,
    schedule: BatchSchedule | None = None,
    **options: Any,
) -> Planner:
    """Plans of a stream of documents, an iteration a call.

    window: tokens. micro_batches: windows of a data-parallel rank in a global batch, the largest one where `schedule`
    has them grow. options: see packer.make_packer. Raises ValueError on settings that cannot work.
    """
    packer = make_packer(config, cost, window=window, micro_batches=micro_batches, dp=dp, **options)
    return Planner(stream, packer, global_tokens=micro_batches * dp * window, schedule=schedule)


def arrival_order(config: WlbConfig) -> WlbConfig:
    """What Megatron does with these documents, but for the mask: windows in arrival order, cut per sequence."""
    plain = replace(config, packing="original", sharding="per-sequence", micro_batches_per_window="1")
    return without_chunks(replace(plain, cp_mode="fixed"))


def without_chunks(config: WlbConfig) -> WlbConfig:
    """The settings where no document comes in chunks: those above the window are split at it."""
    return replace(config, chunks="off", overlong="split" if config.overlong == "chunk" else config.overlong)
