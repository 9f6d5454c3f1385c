"""What pretrain() is handed: the plugin's dataset provider, forward step and layer spec, where the plugin is on."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import script_functions
from wlb_megatron.plugin.flags.refusal_printing import checked
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.logs.full_disk import name_full_disk
from wlb_megatron.plugin.ranks.failures import with_others_lines
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
        if start.validated and start.opened is None:  # --wlb-off
            return original(*args, **kwargs)
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
        opened = part(Start).opened
        full = name_full_disk(error, opened.saves) if opened is not None and opened.saves else None
        if full is None:
            raise
        raise WlbError(full) from error


class _DatasetProvider:
    """The plugin's provider where it is on, else the script's."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs
        self._ours: Callable[..., Any] | None = None  # one for all model chunks of a virtual pipeline

    @property
    def is_distributed(self) -> bool:
        return part(Start).opened is not None or getattr(self._theirs, "is_distributed", False)

    def __call__(self, train_valid_test_num_samples: Any, vp_stage: int | None = None) -> Any:
        provider, opened = self._theirs, part(Start).opened
        if opened is not None:
            from wlb_megatron.plugin.plans.provider import make_provider

            provider = self._ours = self._ours or make_provider(opened.job, opened.sources)
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
        opened = part(Start).opened
        if opened is None:
            return theirs(*args, **kwargs)
        from wlb_megatron.plugin.model.spec import with_plan_attention

        return with_plan_attention(theirs, opened.job.given)(*args, **kwargs)

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
