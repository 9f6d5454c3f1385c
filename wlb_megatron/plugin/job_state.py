"""What the plugin remembers of the job that this process runs.

Megatron calls hooks as plain functions, so they have no object of ours to keep things in. Each module keeps a part of
its own type here: a dataclass whose defaults are those of a job that has not begun. There is one owner, so that a
second job in the same process, or a test, begins anew with one call.
"""

from __future__ import annotations

from typing import Any, TypeVar

Part = TypeVar("Part")


class JobState:
    """One part of each type, made when it is first asked for."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}

    def part(self, kind: type[Part]) -> Part:
        state = self._parts.get(kind)
        if state is None:
            state = self._parts.setdefault(kind, kind())
        return state


_state = JobState()


def part(kind: type[Part]) -> Part:
    """This job's part of that type, to be read and written."""
    return _state.part(kind)


def begin_job() -> None:
    """Forget the job so far: every part is made anew when it is asked for."""
    global _state
    _state = JobState()
