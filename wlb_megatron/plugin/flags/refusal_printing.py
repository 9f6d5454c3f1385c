"""Which ranks say why they stop. At the start they cannot talk to each other yet."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from wlb_megatron.refusals import Refused, RefusedHere

Result = TypeVar("Result")


def checked(check: Callable[[], Result]) -> Result:
    """Run what may raise Refused, and choose which ranks print its line.

    Flags and packages are the same on all ranks of a node, so one rank of each node speaks. Files and GPUs may fail
    one rank alone (RefusedHere), so each failing rank speaks. All but rank 0 name themselves and their host. A rank
    that does not speak exits with status 1.
    """
    try:
        return check()
    except Refused as refused:
        if refused.ranks_chosen:
            raise
        rank = int(os.environ.get("RANK", "0"))
        refused.ranks_chosen = True
        if rank == 0:
            raise
        if isinstance(refused, RefusedHere) or os.environ.get("LOCAL_RANK", "0") == "0":
            located = type(refused)(f"rank {rank} on {socket.gethostname()}: {refused}")
            located.ranks_chosen = True
            raise located from refused
        raise SystemExit(1) from refused
