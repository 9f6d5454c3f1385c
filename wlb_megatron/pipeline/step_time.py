"""Computes the time of one pipeline step in exact integers, for a packer that compares many plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from wlb_megatron.pipeline.graph import pipeline_graph
from wlb_megatron.pipeline.orders import Interleaved, interleaved


def step_time(
    forward: Sequence[int],
    backward: Sequence[int],
    stages: int,
    group_sizes: tuple[int, ...] | None = None,
    *,
    chunks: int = 1,
    blocking: bool = False,
) -> int:
    """Time of one step of equal stages, transfers free: the last end of `pipeline_events`.

    Args:
        forward: Times of each micro-batch in one model chunk of a stage, in any integer unit.
        backward: The same of backwards.
        group_sizes: See `grouped_orders`. None is Megatron's own schedule.
        chunks: How many a stage has; 1 is not interleaved.
        blocking: A stage that sends waits until the other receives.
    """
    if stages > 1 and not blocking:
        sizes = group_sizes or (1,) * len(forward)
        if min(sizes, default=0) < 1 or sum(sizes) != len(forward):
            raise ValueError(f"groups of {list(sizes)} of {len(forward)} micro-batches")
        if chunks == 1:
            return _free_time(forward, backward, stages, sizes)
        return _interleaved_time(forward, backward, stages, interleaved(stages, sizes, chunks))
    times = [0, *forward, *backward]
    ends = [0]
    add = ends.append
    for former, latter, time_index in _program(stages, len(forward), chunks, group_sizes, blocking):
        first, second = ends[former], ends[latter]
        add((first if first > second else second) + times[time_index])
    return max(ends)


def _free_time(
    forward: Sequence[int], backward: Sequence[int], stages: int, group_sizes: tuple[int, ...]
) -> int:
    """The same without a graph, because a graph takes milliseconds to build and a packer meets new groups in every
    iteration.

    What waits for what depends only on the longest group. A stage's n-th backward waits for the next stage's n-th
    backward, whichever micro-batch that is of. In turn m each stage runs forward m, then the backward that follows it
    there.
    """
    turns: list[int] = []  # backwards in their order
    for size in group_sizes:
        turns += backward[len(turns) : len(turns) + size][::-1]
    total, forwards_ahead = (
        len(forward),
        stages - 1 + max(group_sizes) - 1,
    )  # forwards that the first stage runs ahead
    ends = [0] * stages
    gradient = [0] * (stages + 1)  # when each stage's latest backward ended
    for turn in range(total + forwards_ahead):
        activation = 0
        for stage in range(stages):
            end = ends[stage]
            if turn < total:
                end = activation = (end if end > activation else activation) + forward[turn]
            backward_turn = turn - forwards_ahead + stage
            if 0 <= backward_turn < total:
                # Of the turn before: the next stage has not come to this turn yet.
                after = gradient[stage + 1]
                end = gradient[stage] = (end if end > after else after) + turns[backward_turn]
            ends[stage] = end
    return ends[0]


def _interleaved_time(forward: Sequence[int], backward: Sequence[int], stages: int, plan: Interleaved) -> int:
    """The same for several model chunks of a stage.

    Stage s begins turn t at time step t + s: forward t of the table, then the backward that follows it there. Whatever
    a stage waits for has then come in an earlier time step, because blocks have at least as many micro-batches as
    there are stages.
    """
    total = len(plan.table)
    places = {step: place for place, step in enumerate(plan.table)}
    before = [
        places.get((m, chunk - 1), -1) for m, chunk in plan.table
    ]  # in the model chunk before; last: none
    forwards = [forward[m] for m, _ in plan.table]
    backwards = [backward[plan.turns[n]] for n, _ in plan.table]
    # Ends of each stage's forwards and backwards by place in the table. At place -1: nothing to wait for.
    activations, gradients = ([[0] * (total + 1) for _ in range(stages)] for _ in range(2))
    ends, last = [0] * stages, stages - 1
    for time_step in range(total + 2 * last + plan.lead):
        for stage in range(stages):
            end, turn = ends[stage], time_step - stage
            if 0 <= turn < total:
                source = activations[stage - 1][turn if stage else before[turn]]
                end = activations[stage][turn] = (end if end > source else source) + forwards[turn]
            turn -= 2 * (last - stage) + plan.lead
            if 0 <= turn < total:
                source = gradients[stage + 1][turn] if stage < last else gradients[0][before[turn]]
                end = gradients[stage][turn] = (end if end > source else source) + backwards[turn]
            ends[stage] = end
    return ends[0]


@lru_cache(maxsize=512)
def _program(
    stages: int, total: int, chunks: int, group_sizes: tuple[int, ...] | None, blocking: bool
) -> tuple[tuple[int, int, int], ...]:
    """Entry i makes end i + 1: the later of two ends (end 0 is time 0), plus a time (time 0 is none)."""
    program: list[tuple[int, int, int]] = []
    place: list[int] = []  # of each node's end
    for node in pipeline_graph(stages, total, chunks, blocking, group_sizes):
        former, *other_ends = sorted({place[before] for before in (*node.after, *node.sent)}) or [0]
        step = node.step
        time_index = 0 if step is None else 1 + step.micro_batch + total * step.backward
        for latter in other_ends[:-1]:  # a wait for more than two is several entries
            program.append((former, latter, 0))
            former = len(program)
        if other_ends or time_index:
            program.append((former, other_ends[-1] if other_ends else 0, time_index))
            former = len(program)
        place.append(former)
    return tuple(program)
