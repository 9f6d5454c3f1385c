"""The seams: every Megatron symbol the plugin replaces, in one table.

A replacement is a wrapper that gets the original; it holds no copy of Megatron's logic. Installing twice does
nothing the second time. A symbol that is missing is an error that names it and the version.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wlb_megatron.plugin import checkpoint, entry, pipeline_shapes
from wlb_megatron.plugin.versions import megatron_version

ORIGINAL = "__wlb_original__"


@dataclass(frozen=True, slots=True)
class Hook:
    """`places`: "module:attribute" or "module:Class.attribute", all holding the same object."""

    places: tuple[str, ...]
    why: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


HOOKS: tuple[Hook, ...] = (
    Hook(
        ("megatron.training.arguments:parse_args",),
        "adds the --wlb-* flags",
        entry.wrap_parse_args,
    ),
    Hook(
        ("megatron.training.arguments:validate_args",),
        "refuses what is not handled, opens the corpus, sets what the plugin needs",
        entry.wrap_validate_args,
    ),
    Hook(
        ("megatron.training.training:pretrain", "megatron.training:pretrain"),
        "gives pretrain() the plugin's dataset provider, forward step and layer spec",
        entry.wrap_pretrain,
    ),
    Hook(
        ("megatron.training.training:get_forward_backward_func",),
        "draws the step's micro-batches first, so that every pipeline stage knows their shapes",
        pipeline_shapes.wrap_get_forward_backward_func,
    ),
    Hook(
        ("megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",),
        "answers with the shapes known from the plan: no exchange, no device synchronisation",
        pipeline_shapes.wrap_communicate_shapes,
    ),
    Hook(
        ("megatron.training.checkpointing:_load_base_checkpoint",),
        "reads the packing state that the checkpoint's arguments hold",
        checkpoint.wrap_load_base_checkpoint,
    ),
    Hook(
        ("megatron.core.datasets.utils:compile_helpers",),
        "PyPI's wheel brings the dataset helpers built, but no Makefile: make is then not needed",
        entry.wrap_compile_helpers,
    ),
)


def install() -> None:
    """Replace every symbol of HOOKS. Safe to call again."""
    for hook in HOOKS:
        owner, name = _locate(hook.places[0])
        original = getattr(owner, name)
        if hasattr(original, ORIGINAL):
            continue
        replacement = functools.wraps(original)(hook.wrap(original))
        setattr(replacement, ORIGINAL, original)
        for place in hook.places:
            owner, name = _locate(place)
            setattr(owner, name, replacement)


def describe() -> str:
    """The table of replaced symbols, for `python -m wlb_megatron.launch --describe`."""
    return "\n".join(f"{' = '.join(hook.places)}\n    {hook.why}" for hook in HOOKS)


def _locate(place: str) -> tuple[Any, str]:
    module_name, path = place.split(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as missing:
        raise ImportError(
            f"megatron-core {megatron_version()} has no {place}, which wlb_megatron replaces ({missing})"
        ) from missing
    return owner, name
