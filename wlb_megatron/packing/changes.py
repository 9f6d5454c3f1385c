"""What of a saved run's settings is another in this one, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], name: Callable[[str], str] = str) -> list[str]:
    """One phrase for each setting of `now` that the saved run had otherwise, or not at all: "window was 8, is 16".

    name: what people call a setting.
    """
    return [
        f"{name(key)} was {saved.get(key)}, is {value}"
        for key, value in now.items()
        if saved.get(key) != value
    ]
