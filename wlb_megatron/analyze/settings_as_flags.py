"""Settings as the flags of training that give them."""

from __future__ import annotations

from dataclasses import fields

from wlb_megatron.config import WlbConfig
from wlb_megatron.settings_flags import idle


def flags_of(config: WlbConfig) -> str:
    """The flags to copy to the training command, without those that are defaults."""
    plain, flags = WlbConfig(), []
    for field in fields(WlbConfig):
        value = getattr(config, field.name)
        if value != getattr(plain, field.name) and _matters(field.name, config):
            flag = f"--wlb-{field.name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag} {value}")
    return " ".join(flags)


def _matters(name: str, config: WlbConfig) -> bool:
    """Whether the setting does anything with this packing."""
    of_varlen = ("micro_batches_per_window", "chunks")
    return name not in {"gpu_memory", *idle(config)} and (not config.fixed_windows or name not in of_varlen)
