"""The recomputed layers of a whole step: every stage of every data-parallel rank, by the memory model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.groups import documents_in_chunks
from wlb_megatron.pipeline.orders import Step, grouped_orders
from wlb_megatron.plan import MicroBatch
from wlb_megatron.recompute.kept_layers import KeptLayers, Load, plan_kept_layers
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.stage_memory import StageMemory

IntArray = npt.NDArray[np.int64]


def loads_of(column: Sequence[MicroBatch], alignment: int, context: int) -> list[Load]:
    """What each of a data-parallel rank's micro-batches asks of one of `context` ranks that share it.

    alignment: tokens are padded to a multiple of it. A document in chunks of 6 and 4 tokens on 2 ranks: the second has
    2 of its tokens and 3 earlier ones.
    """
    chunked = documents_in_chunks([micro_batch.pieces for micro_batch in column])
    loads = []
    for micro_batch, document in zip(column, chunked, strict=True):
        tokens = -(-micro_batch.tokens // alignment) * alignment
        chunk_tokens = earlier_tokens = 0
        if document >= 0:
            # Pieces with a prefix, or the first chunk of the document, which has none yet.
            shared = [p for p in micro_batch.pieces if p.prefix or p.document == document]
            chunk_tokens, earlier_tokens = sum(p.tokens for p in shared), sum(p.prefix for p in shared)
        tokens, chunk_tokens, earlier_tokens = (
            -(-size // context) for size in (tokens, chunk_tokens, earlier_tokens)
        )
        linear = micro_batch.tokens * UNITS_PER_TOKEN
        loads.append(Load(tokens, micro_batch.work, chunk_tokens, earlier_tokens, linear))
    return loads


def joined_loads(ranks: Sequence[Sequence[Load]]) -> list[Load]:
    """The loads by which ranks that must keep the same layers plan: of each micro-batch the largest, and all work."""
    return [
        Load(
            max(load.tokens for load in row),
            sum(load.work for load in row),
            max(load.chunk_tokens for load in row),
            max(load.earlier for load in row),
            sum(load.linear for load in row),
        )
        for row in zip(*ranks, strict=True)
    ]


def stage_orders(
    stages: int, micro_batches: int, chunks: int, groups: Sequence[int] | None
) -> list[list[Step]]:
    """What each stage runs, in order. groups: sizes of those whose backwards run last first; None: Megatron's order."""
    return grouped_orders(stages, groups or (1,) * micro_batches, chunks)


def plan_step_layers(
    columns: Sequence[Sequence[Load]],
    groups: Sequence[tuple[int, ...] | None],
    stages: Sequence[StageMemory],
    available: Sequence[int],
    *,
    in_step: bool = False,
) -> list[list[KeptLayers]]:
    """Kept layers [dp][stage] of one step.

    Args:
        columns, groups: each data-parallel rank's loads, and the sizes of its groups of micro-batches.
        stages, available: each stage's memory, and the bytes that it may use.
        in_step: all ranks must keep the same layers.
    """
    if in_step:
        joint = plan_step_layers([joined_loads(columns)], groups[:1], stages, available)
        return joint * len(columns)
    plans = []
    for loads, sizes in zip(columns, groups, strict=True):
        orders = stage_orders(len(stages), len(loads), len(stages[0].chunks), sizes)
        plans.append(
            [
                plan_kept_layers(order, loads, memory, size)
                for order, memory, size in zip(orders, stages, available, strict=True)
            ]
        )
    return plans


def recomputed_array(plans: Sequence[Sequence[KeptLayers]]) -> IntArray:
    """int[dp, P, V, m]: recomputed layers, as the simulator takes them."""
    return np.array([[np.transpose(stage.recomputed) for stage in rank] for rank in plans], dtype=np.int64)
