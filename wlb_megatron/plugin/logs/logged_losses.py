"""Losses that Megatron's log divides by its own number of micro-batches, where the plan made another number.

Routers' losses and multi-token prediction's add up over a step's micro-batches until Megatron logs them times
1 / get_num_microbatches(). With 4 windows a step and 16 planned micro-batches the log would show them four times too
large. (Their gradients are right either way: the schedule is given the plan's number.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin.job_state import part


@dataclass(slots=True)
class Correction:
    """factor: Megatron's number of micro-batches over the plan's, of the step just trained."""

    factor: float = 1.0


def stepped(counted: int, planned: int) -> None:
    """To be called after each training step. counted: micro-batches by Megatron's calculator; planned: by the plan."""
    part(Correction).factor = counted / planned


def wrap_report(original: Callable[..., Any]) -> Callable[..., Any]:
    """What logs such losses times its argument `loss_scale`, given 1 / (planned micro-batches)."""
    signature = inspect.signature(original)

    def report(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["loss_scale"] *= part(Correction).factor
        return original(*bound.args, **bound.kwargs)

    return report
