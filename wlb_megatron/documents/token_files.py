"""Reads .bin files. A process keeps only the few last used open, because a blend may have thousands."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from wlb_megatron.errors import WlbError

MOST_OPEN = 64


class TokenFiles:
    """Files by path, opened on first use. Not thread-safe.

    Files are read, not mapped: a failed read is an error with a message, while a mapped page that cannot be read ends
    the process. Reads use no file position, so a forked process may share the files.
    """

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._open: OrderedDict[Path, int] = OrderedDict()  # the one used last is at the end

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the file. WlbError where it cannot be read, or is shorter."""
        parts: list[bytes] = []
        bytes_left = size
        try:
            file = self._file(path)
            while bytes_left and (
                part := os.pread(file, bytes_left, offset + size - bytes_left)
            ):  # one call gives 2 GiB at most
                parts.append(part)
                bytes_left -= len(part)
        except OSError as error:
            raise WlbError(f"cannot read {path}: {error.strerror}") from error
        if bytes_left:
            raise WlbError(
                f"{path} ends before byte {offset + size}, which its index names: the file has changed since the start"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _file(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            while len(self._open) >= self._most_open:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


FILES = TokenFiles()
"""The files of this process."""
