"""Pipeline steps as a graph of work and transfers, solved for one step (events) or for thousands at once.

A node is a stage's step, or a wait of a stage for transfers; its end is the latest of its predecessors' ends
(plus a transfer where one lies between) plus its duration. The graph depends on sizes alone, so it is built
once, and each node's end is one numpy expression over all data-parallel groups of all iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.simulator.orders import Step, pipeline_orders

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Event:
    """Stage `stage` runs micro-batch `micro_batch` from `start` to `end` (the units of the given times)."""

    stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float
    chunk: int = 0


class _Node(NamedTuple):
    """step: None where nothing is computed. after: nodes that end before it starts. sent: nodes whose results
    travel to it, a transfer later."""

    stage: int
    step: Step | None
    after: tuple[int, ...]
    sent: tuple[int, ...]


def pipeline_events(
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    stages: int,
    *,
    transfer: float = 0.0,
    blocking: bool = False,
) -> list[Event]:
    """Events of one step, in order of start. See `pipeline_ends`; a float[m] is of equal stages of one chunk.

    Equal micro-batches of forward f and backward b take (m + P - 1) * (f + b): the bubble is (P - 1) / m.
    """
    times = [_as_grid(one, stages) for one in (forward, backward)]
    graph = _graph(stages, times[0].shape[-1], times[0].shape[-2], blocking)
    ends = _solve(graph, times[0][None], times[1][None], transfer)[:, 0]
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
    forward: FloatArray, backward: FloatArray, *, transfer: float = 0.0, blocking: bool = False
) -> FloatArray:
    """float64[n, P]: when each stage of each of n steps is done.

    forward, backward: float[n, P, V, m], time of micro-batch m in chunk V of stage P. transfer: from one stage to
    the next. blocking: a stage that sends waits until the other receives, as Megatron's 1F1B does; only with
    V = 1 (the interleaved schedule sends and receives while it computes). Raises ValueError on other shapes.
    """
    if forward.shape != backward.shape or forward.ndim != 4:
        raise ValueError(f"forward {forward.shape} and backward {backward.shape} must be alike, [n, P, V, m]")
    _, stages, chunks, micro_batches = forward.shape
    graph = _graph(stages, micro_batches, chunks, blocking)
    ends = _solve(graph, forward, backward, transfer)
    done = np.zeros((len(forward), stages))
    for node, end in zip(graph, ends, strict=True):
        if node.step is not None:
            np.maximum(done[:, node.stage], end, out=done[:, node.stage])
    return done


def _as_grid(times: npt.ArrayLike, stages: int) -> FloatArray:
    grid = np.asarray(times, dtype=np.float64)
    return np.broadcast_to(grid, (stages, 1, len(grid))) if grid.ndim == 1 else grid


def _solve(graph: Sequence[_Node], forward: FloatArray, backward: FloatArray, transfer: float) -> FloatArray:
    """float64[nodes, n]: end of each node."""
    ends = np.zeros((len(graph), len(forward)))
    for at, (stage, step, after, sent) in enumerate(graph):
        end = ends[at]
        for node in after:
            np.maximum(end, ends[node], out=end)
        for node in sent:
            np.maximum(end, ends[node] + transfer, out=end)
        if step is not None:
            end += (backward if step.backward else forward)[:, stage, step.chunk, step.micro_batch]
    return ends


@lru_cache(maxsize=64)
def _graph(stages: int, micro_batches: int, chunks: int, blocking: bool) -> tuple[_Node, ...]:
    """Nodes in an order in which each comes after all that it waits for."""
    if blocking and chunks > 1:
        raise ValueError("an interleaved schedule does not block on transfers: set blocking=False")
    orders = pipeline_orders(stages, micro_batches, chunks)
    return _blocking_graph(orders) if blocking else _free_graph(orders, chunks)


def _free_graph(orders: list[list[Step]], chunks: int) -> tuple[_Node, ...]:
    """A stage goes on while its results travel."""
    nodes: list[_Node] = []
    made: dict[tuple[int, Step], int] = {}
    left = [list(reversed(order)) for order in orders]
    last: list[int | None] = [None] * len(orders)
    while any(left):
        before = len(nodes)
        for stage, order in enumerate(left):
            while order:
                source, travels = _source(stage, order[-1], len(orders), chunks)
                if source is not None and source not in made:
                    break
                found = () if source is None else (made[source],)
                own = () if last[stage] is None else (last[stage],)
                step = order.pop()
                made[stage, step] = last[stage] = len(nodes)
                nodes.append(_Node(stage, step, own + (() if travels else found), found if travels else ()))  # type: ignore[operator]
        assert len(nodes) > before, "a schedule waits for itself"
    return tuple(nodes)


def _source(stage: int, step: Step, stages: int, chunks: int) -> tuple[tuple[int, Step] | None, bool]:
    """The stage and step whose result this one needs, and whether it travels to get here."""
    m, chunk, backward = step
    towards = 1 if backward else -1
    at = chunk * stages + stage + towards  # place among all P * V chunks of the model
    if at < 0:
        return None, False
    if at == stages * chunks:
        return (stage, Step(m, chunk, False)), False
    return (at % stages, Step(m, at // stages, backward)), stages > 1


def _blocking_graph(orders: list[list[Step]]) -> tuple[_Node, ...]:
    """A transfer begins when both sides have come to it, and both wait for its end.

    Sends and receives between two steps are one wait where Megatron couples them (in the steady phase), else
    sends before receives. 2 stages: stage 0 runs F0, send, F1, send F1 + receive B0, B0, ...
    """
    programs = [_program(stage, order, len(orders)) for stage, order in enumerate(orders)]
    nodes: list[_Node] = []
    last: list[tuple[int, ...]] = [()] * len(orders)
    posted: dict[
        tuple[int, Step], list[int | None]
    ] = {}  # of each transfer: what ended before each side came
    place = [0] * len(orders)
    begin = [False] * len(orders)
    while any(at < len(program) for at, program in zip(place, programs, strict=True)):
        moved = False
        for stage, program in enumerate(programs):
            while place[stage] < len(program):
                item = program[place[stage]]
                if isinstance(item, Step):
                    nodes.append(_Node(stage, item, last[stage], ()))
                else:
                    if not begin[stage]:
                        for transfer in item:
                            posted.setdefault(transfer, []).extend(last[stage] or (None,))
                        begin[stage] = moved = True
                    if any(len(posted[transfer]) < 2 for transfer in item):
                        break
                    begin[stage] = False
                    sides = [side for transfer in item for side in posted[transfer] if side is not None]
                    nodes.append(_Node(stage, None, (), tuple(sorted(sides))))
                last[stage] = (len(nodes) - 1,)
                place[stage] += 1
                moved = True
        assert moved, "a schedule waits for itself"
    return tuple(nodes)


def _program(stage: int, order: list[Step], stages: int) -> list[Step | tuple[tuple[int, Step], ...]]:
    """Steps, and between them the transfers that are waited for together, each named by its sender's step."""

    def receive(step: Step) -> tuple[tuple[int, Step], ...]:
        sender = stage + 1 if step.backward else stage - 1
        return ((sender, step),) if 0 <= sender < stages else ()

    def send(step: Step) -> tuple[tuple[int, Step], ...]:
        receiver = stage - 1 if step.backward else stage + 1
        return ((stage, step),) if 0 <= receiver < stages else ()

    program: list[Step | tuple[tuple[int, Step], ...]] = [receive(order[0]), order[0]]
    for before, step in zip(order, order[1:], strict=False):
        # Coupled where the direction turns: send forward + receive backward, send backward + receive forward.
        coupled = before.backward != step.backward
        program += [send(before) + receive(step)] if coupled else [send(before), receive(step)]
        program.append(step)
    return [item for item in [*program, send(order[-1])] if item]
