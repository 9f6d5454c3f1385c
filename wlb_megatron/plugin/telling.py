"""Which ranks say why they stop at the start, before ranks can talk to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from wlb_megatron.refusals import Refused, RefusedHere


def checked(check: Callable[[], object]) -> None:
    """Run a check that may raise Refused, and choose which ranks print its line.

    Flags and packages are the same on all ranks of a node, so one rank of each node speaks. Files and GPUs may fail
    one rank alone (RefusedHere), so each failing rank speaks. All but rank 0 name themselves and their host. A rank
    that does not speak exits with status 1.
    """
    try:
        check()
    except Refused as refused:
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0:
            raise
        if isinstance(refused, RefusedHere) or os.environ.get("LOCAL_RANK", "0") == "0":
            raise type(refused)(f"rank {rank} on {socket.gethostname()}: {refused}") from refused
        raise SystemExit(1) from refused
