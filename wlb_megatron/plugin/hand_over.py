"""What pretrain() is handed: the plugin's dataset provider, forward step and layer spec, where the plugin is on."""

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
from wlb_megatron.plugin.take_over import Start


def wrap_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """pretrain() over the plugin's dataset provider, forward step and layer spec.

    From 0.19 the model is described by a configuration, which gets the layer spec; before, or when the script gives a
    model_provider, what that builds does. Before 0.18 pretrain() itself parses the flags, so that what is handed to it
    decides only when it is called whether the plugin is on.
    """
    signature = inspect.signature(original)

    def pretrain(*args: Any, **kwargs: Any) -> Any:
        start = part(Start)
        arguments = signature.bind(*args, **kwargs).arguments
        script = part(script_functions.Script)
        script.step, script.provider = (
            arguments["forward_step_func"],
            arguments["train_valid_test_dataset_provider"],
        )
        checked(script_functions.settle)
        arguments["train_valid_test_dataset_provider"] = _DatasetProvider(
            arguments["train_valid_test_dataset_provider"]
        )
        arguments["forward_step_func"] = _choose_forward_step(arguments["forward_step_func"])
        if arguments.get("model_provider") is not None:
            arguments["model_provider"] = _choose_model_provider(arguments["model_provider"])
        else:
            from wlb_megatron.plugin.model.spec import install_spec

            assert start.opened is not None  # flags are checked before a configuration is made of them
            install_spec(arguments["cfg_container"].model, start.opened.job.given)
        return checked(
            lambda: with_others_lines(lambda: _train(original, arguments))
        )  # a checkpoint, or the model's layers, may be refused

    return pretrain


def _train(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return original(**arguments)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        opened_job = part(Start).opened
        reason = (
            name_full_disk(error, opened_job.saves) if opened_job is not None and opened_job.saves else None
        )
        if reason is None:
            raise
        raise WlbError(reason) from error


class _DatasetProvider:
    """The plugin's provider where it is on, else the script's."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs
        self._ours: Callable[..., Any] | None = None  # one for all model chunks of a virtual pipeline

    @property
    def is_distributed(self) -> bool:
        return part(Start).opened is not None or getattr(self._theirs, "is_distributed", False)

    def __call__(self, train_valid_test_num_samples: Any, vp_stage: int | None = None) -> Any:
        provider, opened_job = self._theirs, part(Start).opened
        if opened_job is not None:
            from wlb_megatron.plugin.plans.provider import make_provider

            provider = self._ours = self._ours or make_provider(opened_job.sources)
        stage = {} if vp_stage is None else {"vp_stage": vp_stage}
        return provider(train_valid_test_num_samples, **stage)


def _choose_forward_step(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if part(Start).opened is None:
            return theirs(data_iterator, model, *args, **kwargs)
        from wlb_megatron.plugin.step import forward_step as ours

        return ours.forward_step(data_iterator, model, *args, **kwargs)

    return forward_step


def _choose_model_provider(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def model_provider(*args: Any, **kwargs: Any) -> Any:
        opened_job = part(Start).opened
        if opened_job is None:
            return theirs(*args, **kwargs)
        from wlb_megatron.plugin.model.spec import with_plan_attention

        return with_plan_attention(theirs, opened_job.job.given)(*args, **kwargs)

    return model_provider


def wrap_compile_helpers(original: Callable[..., Any]) -> Callable[..., Any]:
    """compile_helpers that runs make only where Megatron's own datasets may be built (--wlb-off) and helpers are not:
    PyPI's wheel brings them built, but no Makefile."""

    def compile_helpers() -> None:
        if (
            part(Start).opened is None
            and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None
        ):
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
