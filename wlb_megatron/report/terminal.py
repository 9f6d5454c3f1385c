"""What commands show on a terminal: tables in plain columns, progress on stderr, and times in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LINES = 20
"""How many lines report a whole run if there is no bar."""


@contextmanager
def progress(total: int, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar if stderr is a terminal and rich is installed. Returns a function that counts one step and takes its
    name.

    lines: without a bar, print a line now and then; else nothing.
    """
    bar = _bar() if total and sys.stderr.isatty() else None
    if bar is not None:
        with bar:
            task = bar.add_task("", total=total)
            yield lambda name: bar.update(task, advance=1, description=name)
        return
    count = 0

    def tick(name: str) -> None:
        nonlocal count
        count += 1
        if lines and (count == 1 or count % max(1, total // LINES) == 0):
            print(f"  {count}/{total} {name}", file=sys.stderr, flush=True)

    yield tick


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)


def duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 20 min, 5 d 7 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Text to the left, numbers to the right, in columns as wide as they need."""
    cells = [[str(cell) for cell in row] for row in rows]
    right_aligned = [all(_is_number(row[column]) for row in cells) for column in range(len(header))]
    lines = [list(header), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    aligned_lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right_aligned, strict=True)
        ).rstrip()
        for line in lines
    ]
    print("\n".join([title, aligned_lines[0], "-" * max(map(len, aligned_lines)), *aligned_lines[1:], ""]))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+\d., %x]*", text) is not None
