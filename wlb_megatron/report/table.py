"""Prints tables in plain columns."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
