"""Writes tables as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb_megatron.whole_files import write_whole


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
