"""The --wlb-* flags, made from the fields of WlbConfig so that neither can drift from the other."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

from wlb_megatron.config import WlbConfig

PREFIX = "wlb_"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's argument group to Megatron's parser (an `extra_args_provider`)."""
    group = parser.add_argument_group(
        title="workload-balanced packing and context parallelism", description="wlb_megatron's settings."
    )
    for setting in fields(WlbConfig):
        flag = "--" + (PREFIX + setting.name).replace("_", "-")
        options: dict[str, Any] = {"dest": PREFIX + setting.name, "help": setting.metadata["help"]}
        assert setting.default is not MISSING
        if setting.default is False:
            options["action"] = "store_true"
        else:
            options["default"] = setting.default
            options["type"] = setting.metadata.get("type", str)
            options["choices"] = setting.metadata.get("choices")
            if setting.default is not None:
                options["help"] += f" (default: {setting.default})"
        group.add_argument(flag, **options)
    return parser


def config_from_args(args: argparse.Namespace) -> WlbConfig:
    """The plugin's settings as the user gave them."""
    return WlbConfig(**{setting.name: getattr(args, PREFIX + setting.name) for setting in fields(WlbConfig)})
