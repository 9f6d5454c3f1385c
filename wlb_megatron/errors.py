"""The project's one error for what a user can put right, and what messages say: what to install, what has changed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU = ROOT / "wlb_megatron" / "cpu"
"""The folder that, on PYTHONPATH, lets Megatron's loop run without a GPU (docs/cpu.md)."""
PREFIX = "wlb_megatron: error:"
"""Begins each line that says why a rank or a command ends: `grep -h "wlb_megatron: error:"` finds it in any log."""


class WlbError(ValueError):
    """One line that names cause and cure. The command line prints it to stderr and exits with code 2."""


def fatal(message: str, speaker: str = "") -> str:
    """The message with PREFIX, and the speaker, in front of each line. A message that has its PREFIX gets no second."""
    lines = [line.removeprefix(PREFIX).removeprefix("wlb_megatron:").strip() for line in message.splitlines()]
    return "\n".join(f"{PREFIX} {speaker}{line}" for line in lines if line)


@contextmanager
def explain_bad_values() -> Iterator[None]:
    """Turns ValueErrors of set-up, which name the setting at fault, into WlbErrors."""
    try:
        yield
    except WlbError:
        raise
    except ValueError as error:
        raise WlbError(str(error)) from error


def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed, or has no metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(extra: str) -> str:
    """The command that installs an extra of setup.py, from this checkout or any: no package index has it."""
    if (ROOT / "setup.py").is_file():
        return f"pip install '{ROOT}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of this project"


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
