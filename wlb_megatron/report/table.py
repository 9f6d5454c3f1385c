"""Prints tables in plain columns, and writes them as CSV files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb_megatron.whole_files import write_whole


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


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column for each key of any row, in the order in which they come; a figure that is None or missing is empty."""
    text = io.StringIO()
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """`as_csv` in a file, whole or not at all."""
    write_whole(path, as_csv(rows), "--out")
