"""One forward and backward of the longest micro-batches before step 1.

It takes the memory that any later step can need, so that the order of micro-batches is free after that and a run
that does not fit ends now, not at a step that happens to draw long ones. Before it, the kernel graphs of all sizes
that micro-batches can have are built (0.13 s each on an H100). Gradients are cleared, random states and buffers (such
as routers' counts of tokens) put back: training goes on as if nothing had been.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from wlb_megatron.packing.summary import PlanSummary
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.data import Layout, with_plan
from wlb_megatron.plugin.planning import PlannedMicroBatch, ShardSettings
from wlb_megatron.sharding.select import shard

REHEARSAL = -1
"""Iteration number of a rehearsed micro-batch."""

MOST_CUT = 64
"""Segments with earlier keys that a rank is taken to have at most, where sharding cuts only what pays."""


def longest_micro_batch(
    max_tokens: int, window: int, settings: ShardSettings, layout: Layout, documents: int = 1
) -> dict[str, Any]:
    """A batch of max_tokens zeros as documents of one window, cut per document: every rank needs all keys.

    documents: how many a micro-batch of max_tokens may hold; twice as many segments on a rank are foreseen.
    """
    usable = max_tokens // settings.alignment * settings.alignment
    sizes = [window] * (usable // window) + [usable % window] * (usable % window > 0)
    plan = shard(sizes, settings.cp_size, "per-document")
    pieces = tuple(Piece(0, document, 0, int(size)) for document, size in enumerate(plan.lengths))
    summary = PlanSummary(REHEARSAL, usable, len(sizes), usable, 1.0, 1.0, 0, 0.0, 0, 0)
    planned = PlannedMicroBatch(REHEARSAL, 0, pieces, plan, summary, 0.0)
    batch = with_plan(planned, layout)
    segments = 2 * documents
    cut = segments if settings.sharding == "per-document" else min(segments, MOST_CUT)
    batch["graphs"] = (usable, settings.cp_size, segments, cut)
    if layout.reads_tokens:
        shape = (1, plan.tokens_per_rank[layout.cp_rank])
        zeros = torch.zeros(shape, dtype=torch.int64)
        positions = torch.from_numpy(plan.positions(layout.cp_rank))[None]
        batch.update(tokens=zeros, labels=zeros, loss_mask=torch.ones(shape), position_ids=positions)
    return batch


def rehearse(step: Callable[[], Any], model: Any, batch: dict[str, Any]) -> None:
    """Build kernels, run `step` (a forward and backward of all micro-batches) and undo what it left behind."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import print_rank_0

    chunks = model if isinstance(model, list) else [model]
    tracker = get_cuda_rng_tracker()
    states, cpu, gpu = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.clone()) for chunk in chunks for buffer in chunk.buffers()]
    began = time.perf_counter()
    if built := warm_up_kernels(chunks, *batch["graphs"]):
        print_rank_0(f"> wlb_megatron: {built} attention graphs built in {time.perf_counter() - began:.1f} s")
    step()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for buffer, before in buffers:
        buffer.copy_(before)
    tracker.set_states(states)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(gpu)


def warm_up_kernels(chunks: list[Any], tokens: int, cp_size: int, sequences: int, cut: int) -> int:
    """Build every kernel graph that the model's layers can need; returns how many. See graph_buckets.foreseen."""
    from wlb_megatron.attention.core_attention import WlbCoreAttention, window_of
    from wlb_megatron.attention.graph_buckets import foreseen

    kinds: dict[tuple[Any, ...], WlbCoreAttention] = {}
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, WlbCoreAttention):
                kinds.setdefault(module.kind, module)
    built = 0
    for (keeps_graphs, windowed, *_), module in kinds.items():
        if keeps_graphs:
            window = window_of(module.config) if windowed else None
            graphs = foreseen(tokens, cp_size, sequences, cut, window, full=not windowed)
            module.warm_up(graphs)
            built += len(graphs)
    return built
