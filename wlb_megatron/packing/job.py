"""Builds the planner of a job, for training and for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.chunks.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.fixed.batch_schedule import BatchSchedule
from wlb_megatron.packing.memory_limits import GpuMemory, describe_memory, no_memory_for_chunks
from wlb_megatron.packing.packer import Packer, read_per_window
from wlb_megatron.packing.planner import Planner, Stream
from wlb_megatron.pipeline.step_law import StageRoom
from wlb_megatron.workload.cost_model import CostModel

SAMPLE, SAMPLE_EPOCHS = 65536, 16
"""The most pieces, and epochs of a small corpus, from which a job learns thresholds and whether to train in chunks:
the first that train."""


def sample_lengths_of(stream: DocumentStream, documents: int) -> list[int]:
    """Lengths (tokens) of the pieces that a job learns from, in the order and mixture in which they train.

    documents: how many, over all corpora.
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
    longest: int | None = None,
    memory: GpuMemory | None = None,
    no_chunks: Sequence[tuple[str, str]] = (),
    rooms: tuple[StageRoom, StageRoom] | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Planner:
    """A planner of a stream of documents: one plan per call.

    window: tokens. micro_batches: windows of a data-parallel rank in a global batch (the largest, if `schedule` lets
    them grow). memory: of a GPU; None: ignore memory. The others: see factory.make_packer. Raises ValueError on
    settings that cannot work.
    """
    no_chunks = [*no_chunks, *no_memory_for_chunks(config, memory)]
    packer = make_packer(
        config,
        cost,
        window=window,
        micro_batches=micro_batches,
        dp=dp,
        no_chunks=no_chunks,
        longest=longest,
        rooms=rooms,
        say=say,
        **options,
    )
    if memory is not None and most_micro_batches(packer, config, micro_batches) > micro_batches:
        chunks = isinstance(packer, ChunkPacker)
        say(describe_memory(config, memory, longest or window, chunks=chunks))
    return Planner(stream, packer, global_tokens=micro_batches * dp * window, schedule=schedule)


def most_micro_batches(packer: Packer, config: WlbConfig, windows: int) -> int:
    """The most micro-batches into which a rank's windows are packed."""
    if config.packing != "varlen" or config.release == "full" or config.cp_mode == "dynamic":
        return windows
    per_window = read_per_window(config.micro_batches_per_window)
    return packer.law.counts(windows, per_window, always=isinstance(packer, ChunkPacker))[-1]


def arrival_order(config: WlbConfig) -> WlbConfig:
    """What Megatron does with these documents except for the mask: windows in arrival order, sharded per sequence."""
    plain = replace(config, packing="original", sharding="per-sequence", micro_batches_per_window="1")
    return without_chunks(replace(plain, cp_mode="fixed"))


def without_chunks(config: WlbConfig) -> WlbConfig:
    """The same settings without chunks: documents longer than the window are split at it."""
    return replace(config, chunks="off", overlong="split" if config.overlong == "chunk" else config.overlong)
