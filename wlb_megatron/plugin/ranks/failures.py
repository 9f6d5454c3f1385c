"""Why a rank cannot go on, for the others to say: they would end with a stack of a lost connection.

It costs nothing while all goes well: a rank that cannot draw its next micro-batch leaves a line in torch's own store
before it ends, and the others read it once they have failed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.ranks.plan_store import common_store
from wlb_megatron.refusals import RefusedHere

Result = TypeVar("Result")

_LINE = "line"


@dataclass(slots=True)
class Failures:
    """The store of this job's failures; None before training."""

    store: Any = None


def begin() -> None:
    """Called on all ranks alike."""
    part(Failures).store = common_store("failures")


def tell(line: str) -> None:
    """Leave the reason why this rank ends for the others."""
    store = part(Failures).store
    if store is not None:
        with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, has ended before
            store.set(_LINE, f"rank {dist.get_rank()} on {socket.gethostname()} has ended: {line}")


def with_others_lines(run: Callable[[], Result]) -> Result:
    """What `run` returns. Where it fails after another rank has told why it ends, RefusedHere with that line."""
    try:
        return run()
    except RuntimeError:
        line = _told()
        if line is None:
            raise
        raise RefusedHere(f"{line}") from None


def _told() -> str | None:
    store = part(Failures).store
    if store is None:
        return None
    try:
        return str(store.get(_LINE).decode()) if store.check([_LINE]) else None
    except dist.DistNetworkError:
        return (
            "the process that serves torch's store has ended (rank 0, or its torchrun): its own log says why"
        )
