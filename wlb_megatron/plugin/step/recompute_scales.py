"""Scales of FP8 with delayed scaling for recomputation: a queue for each micro-batch.

In a forward that will be recomputed, each module of Transformer Engine appends its scale to a queue of its own. The
recomputation takes the oldest scale from there (copy_forward_fp8_meta_tensors_for_recompute and
get_old_fp8_meta_tensors_for_recompute in its quantization.py). That is right where backwards come in the order of the
forwards. In groups they come last first: after forwards 0 1 2, the backward of 2 would get the scale of 0. So what a
forward appends is kept with its micro-batch, and put back right before its backward.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any


def take_scales() -> list[list[Any]]:
    """What the forward that has just run appended, by module. Nothing stays in the queues."""
    queues = _queues()
    taken = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    return taken


def put_scales(taken: Sequence[Sequence[Any]]) -> None:
    """Append to the queues what take_scales returned."""
    for queue, scales in zip(
        _queues(), taken, strict=False
    ):  # modules that ran later have queues behind these
        queue.extend(scales)


def _queues() -> Sequence[deque[Any]]:
    """By module. None where nothing has loaded Transformer Engine, so it is looked up and not imported."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None:
        return ()
    queues: list[deque[Any]] = (
        quantization.FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer
    )
    return queues
