"""Describes which settings differ between a saved run and this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    name: Callable[[str], str] = str,
    value: Callable[[Any], str] = str,
) -> list[str]:
    """One phrase for each setting of `now` that the saved run had otherwise, or not at all: "window was 8, is 16".

    name, value: how a setting and its value are written.
    """
    return [
        f"{name(key)} was {value(saved.get(key))}, is {value(here)}"
        for key, here in now.items()
        if saved.get(key) != here
    ]
