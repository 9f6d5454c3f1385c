"""Which rank checks a corpus's index. It is 20 bytes a document: 1 TB where 512 nodes read 100 million documents of it.

Ranks cannot talk to each other yet. They need not: a rank that finds an index wrong ends, and its launcher the others.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

NETWORK = (
    "lustre",
    "nfs",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "cifs",
    "smb",
    "9p",
    "virtiofs",
    "fuse",
)
"""How the names of file systems begin that all nodes share."""


def checked_elsewhere(prefix: str) -> bool:
    """Whether another rank checks this index: rank 0 on a file system that nodes share, else each node's first rank."""
    if os.environ.get("RANK", "0") == "0":
        return False
    return os.environ.get("LOCAL_RANK", "0") != "0" or file_system(
        str(Path(prefix).resolve().parent)
    ).startswith(NETWORK)


@cache
def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that holds a folder, by its mount; empty if that is not known."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    # 36 35 98:0 /root /mount/point options .. - kind source: the last mount of the longest path holds it
    kinds = {row[4]: row[row.index("-") + 1] for row in rows}
    holding = [point for point in kinds if Path(folder).is_relative_to(point)]
    return kinds[max(holding, key=len)] if holding else ""
