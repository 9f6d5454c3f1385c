"""The dependencies of a pipeline step: which work and which waits come before which.

The graph depends only on sizes, so it is built once for all steps of a run.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from wlb_megatron.pipeline.orders import Step, grouped_orders, pipeline_orders

Transfer = tuple[int, Step]
"""A transfer, named by the stage that sends and the step whose result it sends."""


class Node(NamedTuple):
    """step: None if nothing is computed. after: nodes that end before it starts. sent: nodes whose results travel to
    it, a transfer later.
    """

    stage: int
    step: Step | None
    after: tuple[int, ...]
    sent: tuple[int, ...]


@lru_cache(maxsize=64)
def pipeline_graph(
    stages: int, micro_batches: int, chunks: int, blocking: bool, groups: tuple[int, ...] | None = None
) -> tuple[Node, ...]:
    """Nodes in topological order: each comes after all that it waits for.

    groups: sizes of consecutive groups of micro-batches whose backwards run last first (see `grouped_orders`).
    """
    if blocking and chunks > 1:
        raise ValueError("an interleaved schedule does not block on transfers: set blocking=False")
    if groups is None:
        orders = pipeline_orders(stages, micro_batches, chunks)
    elif sum(groups) != micro_batches:
        raise ValueError(f"groups of {list(groups)} of {micro_batches} micro-batches")
    else:
        orders = grouped_orders(stages, groups, chunks)
    return _blocking_graph(orders) if blocking else _free_graph(orders, chunks)


def _free_graph(orders: list[list[Step]], chunks: int) -> tuple[Node, ...]:
    """The graph if a stage continues while its results travel."""
    nodes: list[Node] = []
    node_of: dict[tuple[int, Step], int] = {}
    steps_left = [list(reversed(order)) for order in orders]
    last: list[tuple[int, ...]] = [()] * len(orders)
    while any(steps_left):
        before = len(nodes)
        for stage, order in enumerate(steps_left):
            while order:
                source, travels = _source(stage, order[-1], len(orders), chunks)
                if source is not None and source not in node_of:
                    break
                feeding = () if source is None else (node_of[source],)
                step = order.pop()
                node_of[stage, step] = len(nodes)
                nodes.append(
                    Node(stage, step, last[stage] + (() if travels else feeding), feeding if travels else ())
                )
                last[stage] = (len(nodes) - 1,)
        assert len(nodes) > before, "a schedule waits for itself"
    return tuple(nodes)


def _source(stage: int, step: Step, stages: int, chunks: int) -> tuple[tuple[int, Step] | None, bool]:
    """The stage and step whose result this one needs, and whether it travels to get here."""
    m, chunk, backward = step
    towards = 1 if backward else -1
    place = chunk * stages + stage + towards  # place among all P * V chunks of the model
    if place < 0:
        return None, False
    if place == stages * chunks:
        return (stage, Step(m, chunk, False)), False
    return (place % stages, Step(m, place // stages, backward)), stages > 1


def _blocking_graph(orders: list[list[Step]]) -> tuple[Node, ...]:
    """The graph if a transfer begins when both sides have reached it, and both wait for its end.

    Sends and receives between two steps are one wait where Megatron couples them (in the steady phase), else sends
    come before receives. 2 stages: stage 0 runs F0, send, F1, send F1 + receive B0, B0, ...
    """
    programs = [_program(stage, order, len(orders)) for stage, order in enumerate(orders)]
    nodes: list[Node] = []
    last: list[tuple[int, ...]] = [()] * len(orders)
    posted: dict[Transfer, list[int | None]] = {}  # what ended before each side came, None: nothing
    place = [0] * len(orders)
    begin = [False] * len(orders)
    while any(position < len(program) for position, program in zip(place, programs, strict=True)):
        moved = False
        for stage, program in enumerate(programs):
            while place[stage] < len(program):
                item = program[place[stage]]
                if isinstance(item, Step):
                    nodes.append(Node(stage, item, last[stage], ()))
                else:
                    if not begin[stage]:
                        for transfer in item:
                            posted.setdefault(transfer, []).extend(last[stage] or (None,))
                        begin[stage] = moved = True
                    if any(len(posted[transfer]) < 2 for transfer in item):
                        break
                    begin[stage] = False
                    sides = [side for transfer in item for side in posted[transfer] if side is not None]
                    nodes.append(Node(stage, None, (), tuple(sorted(sides))))
                last[stage] = (len(nodes) - 1,)
                place[stage] += 1
                moved = True
        assert moved, "a schedule waits for itself"
    return tuple(nodes)


def _program(stage: int, order: list[Step], stages: int) -> list[Step | tuple[Transfer, ...]]:
    """Steps, and between them the transfers that are waited for together, each named by its sender's step."""

    def receive(step: Step) -> tuple[Transfer, ...]:
        sender = stage + 1 if step.backward else stage - 1
        return ((sender, step),) if 0 <= sender < stages else ()

    def send(step: Step) -> tuple[Transfer, ...]:
        receiver = stage - 1 if step.backward else stage + 1
        return ((stage, step),) if 0 <= receiver < stages else ()

    program: list[Step | tuple[Transfer, ...]] = [receive(order[0]), order[0]]
    for before, step in pairwise(order):
        # Coupled where the direction turns: send forward + receive backward, send backward + receive forward.
        coupled = before.backward != step.backward
        program += [send(before) + receive(step)] if coupled else [send(before), receive(step)]
        program.append(step)
    return [item for item in [*program, send(order[-1])] if item]
