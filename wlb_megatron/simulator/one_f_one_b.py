"""The 1F1B pipeline schedule as events: when each stage runs which micro-batch forward and backward.

Megatron's non-interleaved schedule: stage p of P runs min(P - p - 1, m) forwards, then one forward and one
backward in turn, then the remaining backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Stage `stage` runs micro-batch `micro_batch` from `start` to `end` (the units of the given times)."""

    stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def one_f_one_b(forward: Sequence[float], backward: Sequence[float], stages: int) -> list[Event]:
    """Events of one step on `stages` equal stages; forward[i], backward[i]: micro-batch i's time on one stage.

    Equal micro-batches of forward f and backward b take (m + P - 1) * (f + b): the bubble is (P - 1) / m.
    """
    if stages < 1 or len(forward) != len(backward):
        raise ValueError(f"{stages} stages, {len(forward)} forward and {len(backward)} backward times")
    orders = [_order(len(forward), stages - stage - 1) for stage in range(stages)]
    done: dict[tuple[int, int, bool], float] = {}
    free = [0.0] * stages
    events: list[Event] = []
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (ready := _ready(done, stages, stage, *order[0])) is not None:
                micro_batch, is_backward = order.pop(0)
                start = max(free[stage], ready)
                end = start + (backward if is_backward else forward)[micro_batch]
                free[stage] = done[stage, micro_batch, is_backward] = end
                events.append(Event(stage, micro_batch, is_backward, start, end))
    return events


def _order(micro_batches: int, warm_up: int) -> list[tuple[int, bool]]:
    """A stage's work in order. 3 micro-batches, 1 warm-up: F0 F1 B0 F2 B1 B2."""
    warm_up = min(warm_up, micro_batches)
    order = [(i, False) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        order += [(i, False), (i - warm_up, True)]
    return order + [(i, True) for i in range(micro_batches - warm_up, micro_batches)]


def _ready(
    done: dict[tuple[int, int, bool], float], stages: int, stage: int, micro_batch: int, is_backward: bool
) -> float | None:
    """When the input of this piece of work is there, or None if that is not known yet."""
    if not is_backward:
        return 0.0 if stage == 0 else done.get((stage - 1, micro_batch, False))
    if stage == stages - 1:
        return done.get((stage, micro_batch, False))
    return done.get((stage + 1, micro_batch, True))
