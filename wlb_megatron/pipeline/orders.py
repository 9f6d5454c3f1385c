"""What each pipeline stage runs, in order: Megatron's 1F1B and interleaved 1F1B."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """A stage's forward or backward of one micro-batch through one of its model chunks."""

    micro_batch: int
    chunk: int
    backward: bool


def pipeline_orders(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Step]]:
    """Each stage's steps in order. chunks: model chunks of a stage (virtual pipeline size), 1: not interleaved.

    Stage p of P first runs P - p - 1 forwards, interleaved (P - p - 1) * 2 + (chunks - 1) * P, then one forward
    and one backward in turn, then the remaining backwards. 2 stages, 2 micro-batches: F0 F1 B0 B1, F0 B0 F1 B1.
    Raises ValueError where a size is below 1, or interleaved micro-batches are no multiple of the stages.
    """
    if min(stages, micro_batches, chunks) < 1:
        raise ValueError(
            f"{stages} stages, {micro_batches} micro-batches, {chunks} model chunks: each must be at least 1"
        )
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of {stages} pipeline stages, which an interleaved "
            "schedule needs: change the global batch, or use one model chunk"
        )
    forward = _table(stages, micro_batches, chunks)
    total = len(forward)
    orders = []
    for stage in range(stages):
        ahead = stages - stage - 1
        warm_up = min(ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages, total)
        forwards = [Step(m, chunk, False) for m, chunk in forward]
        backwards = [Step(m, chunks - 1 - chunk, True) for m, chunk in forward]
        order = forwards[:warm_up]
        for at in range(total - warm_up):
            order += [forwards[warm_up + at], backwards[at]]
        orders.append(order + backwards[total - warm_up :])
    return orders


def _table(stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward: P micro-batches through chunk 0, the same through chunk 1, ...

    2 stages, 4 micro-batches, 2 chunks: 0,0 1,0 0,1 1,1 2,0 3,0 2,1 3,1.
    """
    if chunks == 1:
        return [(m, 0) for m in range(micro_batches)]
    return [
        (m, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for m in range(first, first + stages)
    ]
