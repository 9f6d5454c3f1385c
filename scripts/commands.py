"""Runs a command of this folder as `wlb-megatron` runs its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from wlb_megatron.cli import CommandParser, run


def run_script(
    name: str, add_flags: Callable[[argparse.ArgumentParser], None], argv: Sequence[str] | None = None
) -> int:
    """Runs the module of this name, of which `add_flags` adds the flags; argv: sys.argv's if None. Returns the exit
    code, as `wlb_megatron.cli.run` does."""
    parser = CommandParser()
    commands = parser.add_subparsers(dest="command")
    add_flags(commands.add_parser(name, prog=f"python -m scripts.{name}"))
    return run(parser, commands.choices, [name, *(sys.argv[1:] if argv is None else argv)])
