"""The --wlb-* flags, made from the fields of WlbConfig so that neither can drift from the other."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from dataclasses import Field, fields, replace
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError

PREFIX = "wlb_"


REMOVED = {"graph_seconds": "attention graphs are built for at most a minute before step 1"}
"""Flags that this release takes for the last time, and says that they do nothing: name, and what happens instead."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's argument group to Megatron's parser (an `extra_args_provider`)."""
    group = parser.add_argument_group(
        title="workload-balanced packing and context parallelism",
        description="Flags of wlb_megatron. README.md tells when to change a default.",
    )
    for setting in fields(WlbConfig):
        options = flag_options(setting)
        if setting.metadata.get("depends"):
            options["default"] = None
        group.add_argument(_flag(PREFIX + setting.name), dest=PREFIX + setting.name, **options)
    for name in REMOVED:
        group.add_argument(_flag(PREFIX + name), dest=PREFIX + name, help=argparse.SUPPRESS)
    return parser


def flag_options(setting: Field[Any]) -> dict[str, Any]:
    """What argparse is told of a setting. Its usage names what a registry offers; it takes all."""
    if setting.default is False:
        return {"help": setting.metadata["help"], "action": "store_true"}
    choices, metavar = setting.metadata.get("choices"), None
    if isinstance(choices, dict):
        metavar = "{" + ",".join(name for name, entry in choices.items() if not entry.instead) + "}"
    default = "" if setting.default is None else f" (default: {setting.default})"
    return {
        "help": setting.metadata["help"] + default,
        "default": setting.default,
        "type": setting.metadata.get("type", str),
        "choices": choices,
        "metavar": metavar,
    }


def config_from_args(args: argparse.Namespace) -> WlbConfig:
    """The plugin's settings from the flags. WlbError for a number out of range."""
    settings = {setting.name: getattr(args, PREFIX + setting.name) for setting in fields(WlbConfig)}
    dependent_names = {
        setting.name
        for setting in fields(WlbConfig)
        if setting.metadata.get("depends") and settings[setting.name] is None
    }
    config = WlbConfig(**{name: value for name, value in settings.items() if name not in dependent_names})
    check_numbers(config)
    return config


def removed_flags(args: argparse.Namespace) -> list[str]:
    """A line on each flag of REMOVED that is given."""
    return [
        f"{_flag(PREFIX + name)} does nothing from this release on, and will be refused from the next: leave it out "
        f"({why})"
        for name, why in REMOVED.items()
        if getattr(args, PREFIX + name, None) is not None
    ]


def take_instead(config: WlbConfig) -> tuple[WlbConfig, list[str]]:
    """The settings with what is taken in place of values that flags no longer offer, and a line on each."""
    lines = []
    for setting in fields(WlbConfig):
        choices = setting.metadata.get("choices")
        entry = choices.get(getattr(config, setting.name)) if isinstance(choices, dict) else None
        if entry is not None and entry.instead:
            flag = _flag(PREFIX + setting.name)
            lines.append(
                f"{flag} {getattr(config, setting.name)} is {entry.instead} from this release on, and will be refused "
                f"from the next: write {flag} {entry.instead}" + f" ({entry.note})" * bool(entry.note)
            )
            config = replace(config, **{setting.name: entry.instead})
    return config, lines


def check_numbers(config: WlbConfig) -> None:
    """Raises WlbError for a setting that is out of its range or not a number."""
    for setting in fields(WlbConfig):
        value, bounds = getattr(config, setting.name), setting.metadata.get("within")
        if value is not None and bounds is not None and not bounds[0] <= value <= bounds[1]:
            raise WlbError(f"{_flag(PREFIX + setting.name)} {value} must be from {bounds[0]} to {bounds[1]}")


def name_flag(message: str, args: argparse.Namespace, prefix: str = "") -> str:
    """The message with the flag instead of a setting's name at its start.

    The settings have this prefix among `args`.
    """
    name, *words = message.split(" ", 1)
    name = prefix + {"per_document": "document_cost"}.get(name, name)
    return " ".join([_flag(name), *words]) if hasattr(args, name) else message


def explain_unparsed(message: str, flags: Iterable[str]) -> str:
    """argparse's message, with the nearest of `flags` for each flag that it does not recognize."""
    marker = "unrecognized arguments: "
    if not message.startswith(marker):
        return message
    unknown = [word.split("=")[0] for word in message.removeprefix(marker).split() if word.startswith("--")]
    near = [difflib.get_close_matches(flag, list(flags), n=1, cutoff=0.8) for flag in unknown]
    guesses = [f"did you mean {flag}?" for nearest in near for flag in nearest]
    return f"{message} ({' '.join(guesses)})" if guesses else message


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
