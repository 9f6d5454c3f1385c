"""What pretrain() is handed: the plugin's dataset provider, forward step and layer spec."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import script_functions
from wlb_megatron.plugin.flags.refusal_printing import checked
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.stores import with_others_lines
from wlb_megatron.plugin.take_over import OpenedJob, Start, is_off


def wrap_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """pretrain() over the plugin's dataset provider, forward step and layer spec.

    From 0.19 the model is described by a configuration, which gets the layer spec; before, or when the script gives a
    model_provider, what that builds does. Before 0.18 pretrain() itself parses the flags, so the job is not there yet.
    """
    signature = inspect.signature(original)

    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from wlb_megatron.plugin.model.spec import install_spec, with_plan_attention
        from wlb_megatron.plugin.plans.provider import make_provider
        from wlb_megatron.plugin.step.forward_step import forward_step

        arguments = signature.bind(*args, **kwargs).arguments
        script = part(script_functions.Script)
        script.step = arguments["forward_step_func"]
        script.provider = arguments["train_valid_test_dataset_provider"]
        checked(script_functions.settle)
        arguments["train_valid_test_dataset_provider"] = make_provider(lambda: _opened().sources)
        arguments["forward_step_func"] = forward_step
        if (theirs := arguments.get("model_provider")) is not None:
            arguments["model_provider"] = with_plan_attention(theirs, lambda: _opened().job.given)
        else:
            checked(lambda: install_spec(arguments["cfg_container"].model, _opened().job.given))
        # A checkpoint, or the model's layers, may be refused.
        return checked(lambda: with_others_lines(lambda: _train(original, arguments)))

    return pretrain


def _opened() -> OpenedJob:
    run = part(Start).opened
    if run is None:
        raise WlbError(
            "flags were parsed before the plugin was there: call enable() before the script parses them"
        )
    return run


def _train(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return original(**arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        run = part(Start).opened
        reason = name_full_disk(error, run.saves) if run is not None and run.saves else None
        if reason is None:
            raise
        raise WlbError(reason) from error


def wrap_compile_helpers(original: Callable[..., Any]) -> Callable[..., Any]:
    """compile_helpers that runs make only where Megatron's own datasets may be built (--wlb-off) and helpers are not:
    PyPI's wheel brings them built, but no Makefile."""

    def compile_helpers() -> None:
        if is_off() and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


FULL = "No space left on device"
_TEXTS = (FULL, "Disk quota exceeded")
_ALMOST = 1 << 20
"""Bytes left of a disk that counts as full. Megatron's writers say only that a worker failed."""


def name_full_disk(error: BaseException, folder: str) -> str | None:
    """One line if a checkpoint cannot be saved because its disk is full, which Megatron's errors do not name.

    folder: that of --save. None if the error does not say that nothing more fits, and there is room.
    """
    texts = [text for text in _TEXTS if any(text in str(cause) for cause in _causes(error))]
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = os.statvfs(place)
    except OSError:
        return None
    free_bytes = room.f_bavail * room.f_frsize
    if not texts and free_bytes > _ALMOST:
        return None
    return (
        f"cannot save a checkpoint in {folder}: {texts[0] if texts else FULL} ({free_bytes / 1e9:,.1f} of "
        f"{room.f_blocks * room.f_frsize / 1e9:,.1f} GB left). Make room, delete a folder without a finished save, and "
        "start again: the run goes on from its last checkpoint"
    )


def _causes(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes
