"""Pipeline steps as a graph of work and transfers, solved for one step (events) or for thousands at once.

A node is a stage's work, or a stage's wait for transfers. Its end is the latest of its predecessors' ends (plus a
transfer, if one lies between) plus its duration. Each node's end is one numpy expression over all data-parallel
groups of all iterations. The graph depends only on sizes, so it is built once for all steps of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import Step, grouped_orders

FloatArray = npt.NDArray[np.float64]


class Launches(NamedTuple):
    """The host's time to launch each forward and backward, float[n, P, V, m] or [P, V, m] of one step.

    A stage's host launches its steps in their order, and waits for nothing. A step begins once all before it are
    launched, and ends no sooner than its own launches. Example: one stage, forwards of 3 with launches of 4, backwards
    of 6 with launches of 2: a forward ends at 4, its backward at 10, the next forward at 13, its backward at 19. The
    device alone takes 18.
    """

    forward: FloatArray
    backward: FloatArray


@dataclass(frozen=True, slots=True)
class Event:
    """Stage `stage` runs micro-batch `micro_batch` from `start` to `end` (the units of the given times)."""

    stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float
    chunk: int = 0


def pipeline_events(
    forward: FloatArray,
    backward: FloatArray,
    *,
    transfer: float = 0.0,
    blocking: bool = False,
    groups: Sequence[int] | None = None,
    launches: Launches | None = None,
) -> list[Event]:
    """Events of one step, in order of start. forward, backward: float[P, V, m], and see `pipeline_ends`.

    Equal micro-batches of forward f and backward b take (m + P - 1) * (f + b): the bubble is (P - 1) / m.
    """
    times, (stages, chunks, micro_batches) = (forward, backward), forward.shape
    graph = pipeline_graph(stages, micro_batches, chunks, blocking, groups and tuple(groups))
    hosts = None if launches is None else Launches(*(way[None] for way in launches))
    ends = _solve(graph, forward[None], backward[None], transfer, hosts)[:, 0]
    events = [
        Event(
            node.stage,
            node.step.micro_batch,
            node.step.backward,
            float(end - times[node.step.backward][node.stage, node.step.chunk, node.step.micro_batch]),
            float(end),
            node.step.chunk,
        )
        for node, end in zip(graph, ends, strict=True)
        if node.step is not None
    ]
    return sorted(events, key=lambda event: (event.start, event.end, event.stage))


def pipeline_ends(
    forward: FloatArray,
    backward: FloatArray,
    *,
    transfer: float | FloatArray = 0.0,
    blocking: bool = False,
    groups: Sequence[int] | None = None,
    launches: Launches | None = None,
) -> FloatArray:
    """float64[n, P]: when each stage of each of n steps is done.

    forward, backward: float[n, P, V, m], time of micro-batch m in chunk V of stage P. transfer: from one stage to
    the next, of all steps or float[n]. blocking: a stage that sends waits until the other receives, as Megatron's 1F1B
    does; only with V = 1 (the interleaved schedule sends and receives while it computes). groups: sizes of consecutive
    groups of micro-batches, the same in all steps, whose backwards run last first (see `grouped_orders`). launches:
    the host's, see Launches; None: the host is always ahead.
    """
    _, stages, chunks, micro_batches = forward.shape
    graph = pipeline_graph(stages, micro_batches, chunks, blocking, groups and tuple(groups))
    ends = _solve(graph, forward, backward, transfer, launches)
    last_end = np.zeros((len(forward), stages))
    for node, end in zip(graph, ends, strict=True):
        if node.step is not None:
            np.maximum(last_end[:, node.stage], end, out=last_end[:, node.stage])
    return last_end


def _solve(
    graph: Sequence[Node],
    forward: FloatArray,
    backward: FloatArray,
    transfer: float | FloatArray,
    launches: Launches | None,
) -> FloatArray:
    """float64[nodes, n]: end of each node."""
    ends = np.zeros((len(graph), len(forward)))
    # By when each stage's host has launched its steps so far.
    launched = np.zeros((forward.shape[1], len(forward)))
    for index, (stage, step, after, sent_nodes) in enumerate(graph):
        end = ends[index]
        for node in after:
            np.maximum(end, ends[node], out=end)
        for node in sent_nodes:
            np.maximum(end, ends[node] + transfer, out=end)
        if step is None:
            continue
        at_step = np.s_[:, stage, step.chunk, step.micro_batch]
        np.maximum(end, launched[stage], out=end)
        end += (backward if step.backward else forward)[at_step]
        if launches is not None:
            launched[stage] += launches[step.backward][at_step]
            np.maximum(end, launched[stage], out=end)
    return ends


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

    groups: sizes of consecutive groups of micro-batches whose backwards run last first (see `grouped_orders`); None is
    Megatron's order. Raises ValueError where interleaved micro-batches are then not a multiple of the stages.
    """
    if groups is None:
        if chunks > 1 and micro_batches % stages:
            raise ValueError(
                f"{micro_batches} micro-batches are not a multiple of {stages} pipeline stages, which an interleaved "
                "schedule needs: change the global batch, or use one model chunk"
            )
        groups = (1,) * micro_batches
    elif sum(groups) != micro_batches:
        raise ValueError(f"groups of {list(groups)} of {micro_batches} micro-batches")
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
