"""Megatron's checks of losses for NaN and infinity, once a step instead of once a micro-batch.

Each check waits for the device, and the host has then launched nothing ahead. A sum of losses is NaN or infinite if one
of them is, and no weight changes before the end of a step. So the last micro-batch's check is of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from wlb_megatron.plugin.job_state import part


@dataclass(slots=True)
class StepLosses:
    """remaining: how many losses of the step are not yet there. total: the sum of the others."""

    remaining: int = 0
    total: torch.Tensor | None = None


def begin_step(micro_batches: int) -> None:
    """The losses of so many micro-batches are checked together."""
    part(StepLosses).remaining, part(StepLosses).total = micro_batches, None


def to_check(loss: torch.Tensor) -> torch.Tensor | None:
    """What to check now that `loss` is there: the step's sum with its last one, before that nothing."""
    step = part(StepLosses)
    step.total = loss.detach() if step.total is None else step.total + loss.detach()
    step.remaining -= 1
    if step.remaining > 0:
        return None
    total, step.total = step.total, None
    return total


@contextmanager
def unchecked() -> Iterator[None]:
    """In a `with` block Megatron's rerun state machine validates nothing, so it counts no call and learns no size.

    After a NaN it compares the n-th call of a step with the n-th of its rerun, which a second job makes on another GPU.
    If that job rehearsed in the step, rehearsed calls would come first: the machine would compare one of them with the
    NaN, and accuse the first job's GPU.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    machine.validate_result = lambda *_, **__: (
        None
    )  # its mode `disabled` still ends a job, at a NaN that nobody uses
    try:
        yield
    finally:
        del machine.validate_result
