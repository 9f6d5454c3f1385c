"""How long one pipeline step takes, in exact integers: for a packer that compares many plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from wlb_megatron.pipeline.graph import pipeline_graph


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

    forward, backward: of each micro-batch in one model chunk of a stage, in any integer unit. group_sizes: see
    `grouped_orders`; None: Megatron's own schedule. chunks: of a stage, 1: not interleaved. blocking: a stage that
    sends waits until the other receives.
    """
    if group_sizes is not None and stages > 1 and chunks == 1 and not blocking:
        backward, group_sizes = _by_turn(backward, group_sizes)
    times = [0, *forward, *backward]
    ends = [0]
    add = ends.append
    for one, other, at in _program(stages, len(forward), chunks, group_sizes, blocking):
        first, second = ends[one], ends[other]
        add((first if first > second else second) + times[at])
    return max(ends)


def _by_turn(backward: Sequence[int], sizes: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The same step with its longest group first and no other, and its backwards' times.

    A stage's n-th backward waits for that of the next stage, whichever micro-batch's it is, and how many forwards run
    ahead depends on the longest group alone. So all groupings of one longest group share a program: to build one takes
    milliseconds, and a packer meets new groupings in every iteration. Sizes 1 2, times 5 6 7: the backwards take 5 7 6
    in turn, as those of sizes 2 1 with times 7 5 6 do.
    """
    turns: list[int] = []
    for size in sizes:
        turns += backward[len(turns) : len(turns) + size][::-1]
    longest = max(sizes)
    return turns[:longest][::-1] + turns[longest:], (longest, *(1,) * (len(turns) - longest))


@lru_cache(maxsize=512)
def _program(
    stages: int, total: int, chunks: int, group_sizes: tuple[int, ...] | None, blocking: bool
) -> tuple[tuple[int, int, int], ...]:
    """Entry i makes end i + 1: the later of two ends (end 0 is time 0), plus a time (time 0 is none)."""
    program: list[tuple[int, int, int]] = []
    place: list[int] = []  # of each node's end
    for node in pipeline_graph(stages, total, chunks, blocking, group_sizes):
        one, *more = sorted({place[before] for before in (*node.after, *node.sent)}) or [0]
        step = node.step
        at = 0 if step is None else 1 + step.micro_batch + total * step.backward
        for other in more[:-1]:  # a wait for more than two is several entries
            program.append((one, other, 0))
            one = len(program)
        if more or at:
            program.append((one, more[-1] if more else 0, at))
            one = len(program)
        place.append(one)
    return tuple(program)
