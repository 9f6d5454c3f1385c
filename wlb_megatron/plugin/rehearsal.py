"""One forward and backward of the longest micro-batches before step 1.

It takes the memory that any later step can need, so that the order of micro-batches is free after that and a run
that does not fit ends now, not at a step that happens to draw long ones. Before it, kernel graphs of the sizes that
micro-batches can have are built (kernel_graphs.py). Gradients are cleared, random states and buffers (such
as routers' counts of tokens) put back: training goes on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from wlb_megatron.packing.summary import PlanSummary
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.data import Layout, with_plan
from wlb_megatron.plugin.kernel_graphs import Met, build_graphs
from wlb_megatron.plugin.planning import PlannedMicroBatch, ShardSettings
from wlb_megatron.sharding.attention_calls import AttentionLayout, attention_layout
from wlb_megatron.sharding.cut import cut
from wlb_megatron.sharding.select import shard

REHEARSAL = -1
"""Iteration number of a rehearsed micro-batch."""


def longest_micro_batch(
    max_tokens: int,
    window: int,
    settings: ShardSettings,
    layout: Layout,
    documents: int = 1,
    graph_seconds: float = 0.0,
    held: int = 0,
) -> dict[str, Any]:
    """A batch of max_tokens zeros as documents of one window, cut per document: every rank needs all keys.

    documents: how many a micro-batch of max_tokens may hold. graph_seconds: for building kernel graphs before it. held:
    micro-batches that run forward before the first backward, 0: as the schedule has it.
    """
    usable = max_tokens // settings.alignment * settings.alignment
    sizes = [window] * (usable // window) + [usable % window] * (usable % window > 0)
    plan = shard(sizes, settings.cp_size, "per-document")
    pieces = tuple(Piece(0, document, 0, int(size)) for document, size in enumerate(plan.lengths))
    summary = PlanSummary(REHEARSAL, usable, len(sizes), usable, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)
    counts = (usable,) * (1 + layout.follows)
    planned = PlannedMicroBatch(REHEARSAL, 0, pieces, plan, summary, 0.0, predictions=counts)
    if held > 1:
        planned = replace(planned, steps=held, chunk_groups=(held,))
    batch = with_plan(planned, layout)
    batch["graphs"] = (
        Met.of(
            usable,
            window,
            settings,
            documents,
            _of_a_window(window, settings, layout),
            prefix=window if held > 1 else 0,  # of a document up to its last chunk
        ),
        graph_seconds,
    )
    if layout.reads_tokens:
        shape = (1, plan.tokens_per_rank[layout.cp_rank])
        zeros = torch.zeros(shape, dtype=torch.int64)
        positions = torch.from_numpy(plan.positions(layout.cp_rank))[None]
        batch.update(tokens=zeros, labels=zeros, loss_mask=torch.ones(shape), position_ids=positions)
        batch["predicted"] = float(shape[1])
    return batch


def _of_a_window(window: int, settings: ShardSettings, layout: Layout) -> AttentionLayout | None:
    """This rank's layout of one document of a window; None where padding would come with it."""
    if window % settings.alignment:
        return None
    lengths = [np.array([window], dtype=np.int64)]
    (plan,) = cut(lengths, settings.cp_size, settings.sharding, settings.table)
    return attention_layout(plan, layout.cp_rank, layout.window)


def rehearse(step: Callable[[], Any], model: Any, batch: dict[str, Any]) -> None:
    """Build kernels, run `step` (a forward and backward of all micro-batches) and undo what it left behind."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    chunks = model if isinstance(model, list) else [model]
    tracker = get_cuda_rng_tracker()
    states, cpu, gpu = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.clone()) for chunk in chunks for _, buffer in chunk.named_buffers()]
    build_graphs(chunks, *batch["graphs"])
    step()
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None  # where FSDP2 keeps it
    for buffer, before in buffers:
        buffer.copy_(before)
    tracker.set_states(states)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(gpu)
