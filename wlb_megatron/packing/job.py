"""Builds the planner of a job, for training and for every command."""

from __future__ import annotations

from dataclasses import replace

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.chunks.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.fixed.batch_schedule import BatchSchedule
from wlb_megatron.packing.memory_limits import GpuMemory, describe_memory, no_memory_for_chunks
from wlb_megatron.packing.packer import Packer, PackingJob, per_window_of
from wlb_megatron.packing.planner import Planner, Stream

SAMPLE, SAMPLE_EPOCHS = 65536, 16
"""The most pieces, and epochs of a small corpus, from which a job learns thresholds and whether to train in chunks:
the first that train."""


def sample_lengths_of(stream: DocumentStream, documents: int) -> list[int]:
    """Lengths (tokens) of the pieces that a job learns from, in the order and mixture in which they train.

    documents: how many, over all corpora.
    """
    return stream.peek(min(SAMPLE, SAMPLE_EPOCHS * documents))


def plan_job(
    stream: Stream, job: PackingJob, *, schedule: BatchSchedule | None = None, memory: GpuMemory | None = None
) -> Planner:
    """A planner of a stream of documents: one plan per call. Raises ValueError on settings that cannot work.

    Args:
        schedule: given if global batches grow; job.micro_batches is of the largest.
        memory: a GPU's; None: ignore memory.
    """
    config = job.config
    job = replace(job, no_chunks=[*job.no_chunks, *no_memory_for_chunks(config, memory)])
    packer = make_packer(job)
    if memory is not None and most_micro_batches(packer, config, job.micro_batches) > job.micro_batches:
        chunks = isinstance(packer, ChunkPacker)
        job.say(describe_memory(config, memory, job.longest or job.window, chunks=chunks))
    return Planner(stream, packer, global_tokens=job.bins * job.window, schedule=schedule)


def most_micro_batches(packer: Packer, config: WlbConfig, windows: int) -> int:
    """The most micro-batches into which a rank's windows are packed."""
    if config.fixed_windows or config.release == "full" or config.cp_mode == "dynamic":
        return windows
    return packer.law.counts(windows, per_window_of(config), always=isinstance(packer, ChunkPacker))[-1]


def arrival_order(config: WlbConfig) -> WlbConfig:
    """What Megatron does with these documents except for the mask: windows in arrival order, sharded per sequence."""
    plain = replace(config, packing="original", sharding="per-sequence", micro_batches_per_window="1")
    return without_chunks(replace(plain, cp_mode="fixed"))


def without_chunks(config: WlbConfig) -> WlbConfig:
    """The same settings without chunks: documents longer than the window are split at it."""
    return replace(config, chunks="off", overlong="split" if config.overlong == "chunk" else config.overlong)
