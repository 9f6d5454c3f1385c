"""What each pipeline stage runs, in order: Megatron's 1F1B, interleaved, or with backwards reversed in groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
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
    Raises ValueError where a size is below 1, or interleaved micro-batches are not a multiple of the stages.
    """
    if min(stages, micro_batches, chunks) < 1:
        raise ValueError(
            f"{stages} stages, {micro_batches} micro-batches, {chunks} model chunks: each must be at least 1"
        )
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"{micro_batches} micro-batches are not a multiple of {stages} pipeline stages, which an interleaved "
            "schedule needs: change the global batch, or use one model chunk"
        )
    if chunks == 1:
        return grouped_orders(stages, (1,) * micro_batches)
    forward = _table(stages, micro_batches, chunks)
    forwards = [Step(m, chunk, False) for m, chunk in forward]
    backwards = [Step(m, chunks - 1 - chunk, True) for m, chunk in forward]
    warm_ups = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return [_order(forwards, backwards, warm_up) for warm_up in warm_ups]


def grouped_orders(stages: int, group_sizes: Sequence[int]) -> list[list[Step]]:
    """Each stage's steps in 1F1B whose micro-batches form consecutive groups of the given sizes.

    Forwards run in order. Backwards run group by group, the last micro-batch of a group first: a document in chunks
    needs the gradients from its later chunks before its earlier chunks' backward. Groups of 1 are Megatron's own 1F1B.

    Every stage runs max(group_sizes) - 1 more forwards ahead than 1F1B does: stage p of P has run
    n + (P - p - 1) + max(group_sizes) - 1 forwards (at most all) before its n-th backward, n from 1. All of a group's
    forwards then precede its backwards, and a forward and a backward still alternate on all stages. So no stage waits
    for groups, and the step has 1F1B's bubble. A stage holds (P - p - 1) + max(group_sizes) micro-batches at most.
    One stage has no neighbor to keep busy: it runs each group's forwards, then its backwards.

    2 stages, groups of 2, 1: F0 F1 F2 B1 B0 B2 on stage 0, F0 F1 B1 F2 B0 B2 on stage 1.
    Raises ValueError where a size is below 1.
    """
    if min(stages, *group_sizes, len(group_sizes)) < 1:
        raise ValueError(
            f"{stages} stages, groups of {list(group_sizes)} micro-batches: each must be at least 1"
        )
    forwards: list[Step] = []
    backwards: list[Step] = []
    for size in group_sizes:
        group = range(len(forwards), len(forwards) + size)
        forwards += [Step(m, 0, False) for m in group]
        backwards += [Step(m, 0, True) for m in reversed(group)]
    if stages == 1:
        bounds = list(accumulate(group_sizes, initial=0))
        return [[s for a, b in pairwise(bounds) for s in (*forwards[a:b], *backwards[a:b])]]
    ahead = max(group_sizes) - 1
    return [_order(forwards, backwards, stages - stage - 1 + ahead) for stage in range(stages)]


def in_flight(orders: Sequence[Sequence[Step]], tokens: Sequence[int]) -> list[int]:
    """For each stage the most tokens held at once, from their forward to the end of their backward.

    tokens: of each micro-batch. Steps of an interleaved stage count a micro-batch once for each model chunk.
    """
    most = []
    for order in orders:
        held = peak = 0
        for step in order:
            held += -tokens[step.micro_batch] if step.backward else tokens[step.micro_batch]
            peak = max(peak, held)
        most.append(peak)
    return most


def _order(forwards: list[Step], backwards: list[Step], warm_up: int) -> list[Step]:
    """`warm_up` forwards (at most all), then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards[warm_up:]) :]


def _table(stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward: P micro-batches through chunk 0, the same through chunk 1, ...

    2 stages, 4 micro-batches, 2 chunks: 0,0 1,0 0,1 1,1 2,0 3,0 2,1 3,1.
    """
    return [
        (m, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for m in range(first, first + stages)
    ]
