"""What the plugin remembers of the job that this process runs.

Megatron calls hooks as plain functions, so they have no object of ours to keep things in. Each module keeps a part of
its own type here: a dataclass whose defaults are those of a job that has not begun. There is one owner, so that a
second job in the same process, or a test, begins anew with one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")


_parts: dict[type, Any] = {}


def part(kind: type[Part]) -> Part:
    """This job's part of that type, to be read and written; made when it is first asked for."""
    state: Part | None = _parts.get(kind)
    return _parts.setdefault(kind, kind()) if state is None else state  # setdefault: threads may ask at once


Original = Callable[..., Any]
"""A function of Megatron's that one of the plugin's stands for."""


def begin_job() -> None:
    """Forget the job so far: every part is made anew when it is asked for."""
    _parts.clear()
