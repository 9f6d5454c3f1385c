"""A folder of results that appears whole, or file by file where it is there already."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end; nothing is left of it after an error."""
    scratch = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(scratch.iterdir()):
            path.replace(out / path.name)
    except OSError as error:
        raise WlbError(f"cannot write to {out}: {error.strerror}; give another --out") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def whole_file(path: Path, flag: str) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; nothing is left of it after an error."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise WlbError(f"cannot write {path}: {error.strerror}; give another {flag}") from None
    finally:
        scratch.unlink(missing_ok=True)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column for each key of any row, in the order in which they come; a figure that is None or missing is empty."""
    text = io.StringIO()
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], flag: str = "--out") -> None:
    """`as_csv` in a file, whole or not at all."""
    with whole_file(path, flag) as scratch:
        scratch.write_text(as_csv(rows), encoding="utf-8")
