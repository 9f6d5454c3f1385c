"""How to install this project's extras: no package index has it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def install(extra: str) -> str:
    """The command that installs an extra of setup.py, from the running checkout or from any."""
    if (ROOT / "setup.py").is_file():
        return f"pip install '{ROOT}[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of this project"
