"""Which disk is full, where a checkpoint cannot be saved: the errors of Megatron's writers do not name it."""

from __future__ import annotations

import os
from pathlib import Path

FULL = "No space left on device"
_TEXTS = (FULL, "Disk quota exceeded")
_ALMOST = 1 << 20
"""Bytes left of a disk that counts as full. Megatron's writers say only that a worker failed."""


def name_full_disk(error: BaseException, folder: str) -> str | None:
    """One line where the error says that nothing more fits, or nothing does; else None. folder: of --save."""
    said = [text for text in _TEXTS if any(text in str(cause) for cause in _causes(error))]
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = os.statvfs(place)
    except OSError:
        return None
    free = room.f_bavail * room.f_frsize
    if not said and free > _ALMOST:
        return None
    return (
        f"cannot save a checkpoint in {folder}: {said[0] if said else FULL} ({free / 1e9:,.1f} of "
        f"{room.f_blocks * room.f_frsize / 1e9:,.1f} GB left). Make room, delete a folder without a finished save, and "
        "start again: the run goes on from its last checkpoint"
    )


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found
