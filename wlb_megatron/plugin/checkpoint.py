"""The packing state inside Megatron's own checkpoints: it travels in the arguments that every format saves.

The state belongs to the iteration trained, not to what was planned or prefetched, nor to one whose gradients Megatron
threw away: where they are not a number, its rerun state machine runs the iteration again, saves the weights from before
it, and exits. The state is the same on every rank and holds ids alone, so that a run resumes at another data, tensor,
context or pipeline parallel size.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

ATTRIBUTE = "wlb_state"
_loaded: dict[str, Any] | None = None
_computed: tuple[Any, dict[str, Any]] | None = None
"""Arguments, and the state after the iteration whose gradients are there but not yet applied."""


def remember(args: Any, state: dict[str, Any]) -> None:
    """Make `state` part of the next checkpoint."""
    setattr(args, ATTRIBUTE, json.dumps(state))


def remember_if_applied(args: Any, state: dict[str, Any]) -> None:
    """The same, once Megatron has applied the iteration's gradients."""
    global _computed
    _computed = (args, state)


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """training_log, which Megatron calls on every rank between the optimizer's step and the next checkpoint."""

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        global _computed
        if _computed is not None:
            remember(*_computed)
            _computed = None
        return original(*args, **kwargs)

    return training_log


def loaded_state() -> dict[str, Any] | None:
    """The state of the checkpoint that Megatron has loaded, or None if it has none."""
    return _loaded


def wrap_load_base_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """_load_base_checkpoint(load_dir, args, ..) that keeps the packing state of what it reads, also where Megatron
    saves again before anything trains (--ckpt-convert-format)."""

    def load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        global _loaded
        result = original(load_dir, args, *rest, **kwargs)
        contents = result[0] if isinstance(result, tuple) else None
        if isinstance(contents, dict) and "args" in contents:
            saved = getattr(contents["args"], ATTRIBUTE, None)
            _loaded = None if saved is None else json.loads(saved)
            if saved is not None and not getattr(args, "wlb_off", True):
                setattr(args, ATTRIBUTE, saved)
        return result

    return load_base_checkpoint
