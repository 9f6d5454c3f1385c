"""The packing state inside Megatron's own checkpoints: it travels in the arguments that every format saves.

The state belongs to the iteration trained, not to what was planned or prefetched, nor to one whose gradients Megatron
threw away. If these are not a number, its rerun state machine runs the iteration again, saves the weights from before
it, and exits. The state is the same on every rank and holds ids alone, so that a run resumes at another data, tensor,
context or pipeline parallel size.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin.job_state import part
from wlb_megatron.refusals import Refused

ATTRIBUTE = "wlb_state"
_DIGEST = "digest"
MakeState = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class PackingStates:
    """loaded_state: the checkpoint's that Megatron has loaded; None if it has none, empty if it is damaged. text: the
    same as it was saved. make_next: makes the next checkpoint's, None before training. It is called when one is saved:
    with fixed windows over several global batches the state is megabytes. make_unapplied: makes that of the iteration
    whose gradients are there but not yet applied.
    """

    loaded_state: dict[str, Any] | None = None
    text: str | None = None
    make_next: MakeState | None = None
    make_unapplied: MakeState | None = None


def remember(state: MakeState) -> None:
    """Make what `state` returns part of the next checkpoint."""
    part(PackingStates).make_next = state


def remember_if_applied(state: MakeState) -> None:
    """The same, once Megatron has applied the iteration's gradients."""
    part(PackingStates).make_unapplied = state


def _sealed(state: dict[str, Any]) -> str:
    """The state as text, with a digest of the rest in it."""
    return json.dumps({**state, _DIGEST: _digest(json.dumps(state))})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _opened(saved: Any) -> dict[str, Any]:
    """The state of such a text; empty if it is damaged. States of releases before have no digest."""
    try:
        state = json.loads(saved)
        digest = state.pop(_DIGEST, None)
    except (TypeError, ValueError, AttributeError):
        return {}
    return state if digest is None or digest == _digest(json.dumps(state)) else {}


def wrap_generate_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """generate_state_dict(args, ..) of arguments that hold the packing state: all that is saved goes through it."""

    def generate_state_dict(args: Any, *positional: Any, **kwargs: Any) -> Any:
        states = part(PackingStates)
        text = states.text if states.make_next is None else _sealed(states.make_next())
        if text is not None and not getattr(args, "wlb_off", True):
            setattr(args, ATTRIBUTE, text)
        return original(args, *positional, **kwargs)

    return generate_state_dict


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """training_log, which Megatron calls on every rank between the optimizer's step and the next checkpoint."""

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        states = part(PackingStates)
        if states.make_unapplied is not None:
            states.make_next, states.make_unapplied = states.make_unapplied, None
        return original(*args, **kwargs)

    return training_log


def loaded_state() -> dict[str, Any] | None:
    """The state of the checkpoint that Megatron has loaded, or None if it has none."""
    return part(PackingStates).loaded_state


def wrap_load_base_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """_load_base_checkpoint(load_dir, args, ..) that keeps the packing state of what it reads, also where Megatron
    saves again before anything trains (--ckpt-convert-format)."""

    def load_base_checkpoint(load_dir: Any, args: Any, *positional: Any, **kwargs: Any) -> Any:
        result = original(load_dir, args, *positional, **kwargs)
        contents = result[0] if isinstance(result, tuple) else None
        if isinstance(contents, dict) and "args" in contents:
            states, saved = part(PackingStates), getattr(contents["args"], ATTRIBUTE, None)
            states.loaded_state = None if saved is None else _opened(saved)
            states.text = (
                saved  # not into args, which Megatron prints after --use-checkpoint-args has read it
            )
        return result

    return load_base_checkpoint


def wrap_load_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    """OptimizerParamScheduler.load_state_dict(state_dict), which asserts that the learning rate goes on as before.

    It counts samples, so another --global-batch-size fails here, before plans are compared.
    """

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        try:
            return original(self, state_dict)
        except AssertionError as error:
            raise Refused(
                f"the checkpoint's learning rate cannot go on ({error}): give --global-batch-size, "
                "--train-iters and the --lr flags as before, or add --override-opt-param-scheduler to take this run's "
                "(with another global batch also --wlb-fresh-order)"
            ) from None

    return load_state_dict
