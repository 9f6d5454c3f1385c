"""Writes files that appear whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wlb_megatron.errors import WlbError


@contextmanager
def renamed_at_end(path: Path) -> Iterator[Path]:
    """A path with the same suffix to write to, which becomes `path` at the end; nothing is left of it after an error.

    A link stays, and what it points to is replaced. A device or a pipe (/dev/null, /dev/stdout) is written to itself: a
    rename would put a file in its place. OSError where it cannot be written.
    """
    if _is_stream(path):
        yield path
        return
    path = path.resolve()
    scratch = path.with_name(f".{path.stem}.{of_this_process()}.partial{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def of_this_process() -> str:
    """Another on each machine: they may share the folder, and two of them a process's number."""
    return f"{socket.gethostname()}.{os.getpid()}"


def _is_stream(path: Path) -> bool:
    """Whether it is a device or a pipe, or a name of something that this process has open."""
    return path.parent in STREAMS or (path.exists() and not path.is_file() and not path.is_dir())


STREAMS = Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd")


@contextmanager
def whole_file(path: Path, flag: str) -> Iterator[Path]:
    """The same for a user's file. WlbError with the flag that named it where it cannot be written."""
    try:
        with renamed_at_end(path) as scratch:
            yield scratch
    except OSError as error:
        raise WlbError(f"cannot write {path}: {error.strerror}; give another {flag}") from None


def write_whole(path: Path, text: str, flag: str) -> None:
    """Text as UTF-8, see `whole_file`."""
    with whole_file(path, flag) as scratch:
        scratch.write_text(text, encoding="utf-8")
