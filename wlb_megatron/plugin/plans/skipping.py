"""--iterations-to-skip: the documents of a skipped iteration are given out and not trained.

Megatron draws such an iteration's batches by its own data loader's layout, and neither logs nor saves after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wlb_megatron.plugin.micro_batches.iterators import draw_step, planned_iterator


def wrap_dummy_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """dummy_train_step over the planned micro-batches of an iteration, of which there may be any number."""

    def dummy_train_step(data_iterator: Any) -> Any:
        first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        source = planned_iterator(first)
        if source is None:
            return original(data_iterator)
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(data_iterator):
            batches = draw_step(first)
        source.after_step(batches, skipped=True)
        return None

    return dummy_train_step
