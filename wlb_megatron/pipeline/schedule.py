"""Pipeline steps as a graph of work and transfers, solved for one step (events) or for thousands at once.

A node is a stage's work, or a stage's wait for transfers. Its end is the latest of its predecessors' ends (plus a
transfer, if one lies between) plus its duration. Each node's end is one numpy expression over all data-parallel
groups of all iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.graph import Node, pipeline_graph

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
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    stages: int,
    *,
    transfer: float = 0.0,
    blocking: bool = False,
    groups: Sequence[int] | None = None,
    launches: Launches | None = None,
) -> list[Event]:
    """Events of one step, in order of start. See `pipeline_ends`; a float[m] is of equal stages of one chunk.

    Equal micro-batches of forward f and backward b take (m + P - 1) * (f + b): the bubble is (P - 1) / m.
    """
    times = [_as_grid(direction, stages) for direction in (forward, backward)]
    graph = pipeline_graph(stages, times[0].shape[-1], times[0].shape[-2], blocking, _key(groups))
    hosts = None if launches is None else Launches(*(way[None] for way in launches))
    ends = _solve(graph, times[0][None], times[1][None], transfer, hosts)[:, 0]
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
    Raises ValueError on other shapes.
    """
    if forward.shape != backward.shape or forward.ndim != 4:
        raise ValueError(f"forward {forward.shape} and backward {backward.shape} must be alike, [n, P, V, m]")
    _, stages, chunks, micro_batches = forward.shape
    graph = pipeline_graph(stages, micro_batches, chunks, blocking, _key(groups))
    ends = _solve(graph, forward, backward, transfer, launches)
    last_end = np.zeros((len(forward), stages))
    for node, end in zip(graph, ends, strict=True):
        if node.step is not None:
            np.maximum(last_end[:, node.stage], end, out=last_end[:, node.stage])
    return last_end


def _key(groups: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if groups is None else tuple(groups)


def _as_grid(times: npt.ArrayLike, stages: int) -> FloatArray:
    grid = np.asarray(times, dtype=np.float64)
    return np.broadcast_to(grid, (stages, 1, len(grid))) if grid.ndim == 1 else grid


def _solve(
    graph: Sequence[Node],
    forward: FloatArray,
    backward: FloatArray,
    transfer: float | FloatArray,
    launches: Launches | None,
) -> FloatArray:
    """float64[nodes, n]: end of each node."""
    ends = np.zeros((len(graph), len(forward)))
    launched = np.zeros(
        (forward.shape[1], len(forward))
    )  # by when each stage's host has launched its steps so far
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
