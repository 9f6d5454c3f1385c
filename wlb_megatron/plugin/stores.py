"""What ranks say to each other beside training, through torch's own store: plans, and why a rank cannot go on.

A rank holds one connection, which it has anyway, however many ranks there are. (A gloo group of all ranks is a
connection to each of them: at 4,000 ranks, 4,000 on every rank and eight million in all.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from wlb_megatron.plugin.job_state import part
from wlb_megatron.refusals import RefusedHere

Result = TypeVar("Result")

KEPT = 256
"""Messages that stay readable: more than iterations are planned and read ahead, which is how far a reader can be behind
(with one micro-batch an iteration, a few and one for every data worker)."""

_FAILED = b"failed"
"""The message of what could not be made."""

_LONGEST_PAUSE = 0.25
"""Seconds between two questions for a key: at 4,000 ranks that wait, 16,000 questions a second to the store."""

_LINE = "line"
"""Where the reason why a rank ends is left."""


class PlanStore:
    """Numbered messages from rank 0 to all others. Made on all ranks alike."""

    def __init__(self) -> None:
        self._store = common_store("plans")

    def leave(self, number: int, make: Callable[[], bytes]) -> bytes:
        """Leave the message that `make` makes for all; that of KEPT before goes.

        Where it fails the others hear of that, and its error goes on here: they would wait for the message in the
        middle of a step, and this rank for them in that step's collectives.
        """
        message = _FAILED
        try:
            message = make()
        finally:
            self._store.set(str(number), zlib.compress(message, 1))
            if number >= KEPT:
                self._store.delete_key(str(number - KEPT))
        return message

    def take(self, number: int, given_up: Callable[[], bool]) -> bytes | None:
        """The message, waited for without a limit (rank 0 may be saving a checkpoint); None once `given_up`. Raises
        DistNetworkError if the store is gone, RuntimeError if rank 0 could not make it."""
        if not wait_for(self._store, str(number), given_up):
            return None
        message = zlib.decompress(self._store.get(str(number)))
        if message == _FAILED:
            raise RuntimeError("wlb_megatron: rank 0 could not make a plan; its own error says why")
        return message


@dataclass(slots=True)
class Stores:
    """Of this start of all ranks.

    attempt: rank 0's random name, the same on all. calls: how often this process asked for a store by name. They are
    counted here, as another rank may be a call ahead. failures: the store of reasons why ranks end; None before
    training.
    """

    attempt: str | None = None
    calls: Counter[str] = field(default_factory=Counter)
    failures: Any = None


def share_failures() -> None:
    """From now on ranks tell each other why they end. Called on all ranks alike.

    It costs nothing while all goes well: a rank that cannot draw its next micro-batch leaves a line before it ends, and
    the others, which would end with a stack of a lost connection, read it once they have failed.
    """
    part(Stores).failures = common_store("failures")


def tell_failure(line: str) -> None:
    """Leave the reason why this rank ends for the others, unless one has: it may be the reason for this one's."""
    store = part(Stores).failures
    if store is not None:
        with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, has ended before
            if not store.check([_LINE]):
                store.set(_LINE, f"rank {dist.get_rank()} on {socket.gethostname()} has ended: {line}")


def with_others_lines(run: Callable[[], Result]) -> Result:
    """What `run` returns. Where it fails after another rank has told why it ends, RefusedHere with that line."""
    try:
        return run()
    except RuntimeError:
        line = _told()
        if line is None:
            raise
        raise RefusedHere(line) from None


def _told() -> str | None:
    store = part(Stores).failures
    if store is None:
        return None
    try:
        return str(store.get(_LINE).decode()) if store.check([_LINE]) else None
    except dist.DistNetworkError:
        return (
            "the process that serves torch's store has ended (rank 0, or its torchrun): its own log says why"
        )


def common_store(name: str) -> Any:
    """torch's own store, over which init_process_group brought all ranks together, for one use by this name. Called
    on all ranks alike, not necessarily at once (but for the first use: it is a broadcast); a second call of a name (a
    second training in these processes) gives other keys, and so does torchrun's next attempt, whose store still holds
    what the last one left."""
    stores = part(Stores)
    if stores.attempt is None:
        # Not TORCHELASTIC_RESTART_COUNT: every node's agent counts its own, and that of a node that took a broken one's
        # place begins at 0 (pytorch issue 135712).
        _warn_of_restarts()
        names = [secrets.token_hex(8)]
        dist.broadcast_object_list(names, src=0)
        (stores.attempt,) = names
    call = stores.calls[name]
    stores.calls[name] += 1
    return dist.PrefixStore(
        f"wlb_megatron/{stores.attempt}/{name}/{call}", distributed_c10d._get_default_store()
    )


def _warn_of_restarts() -> None:
    """torch's own groups are set up over that store, too, and know no attempts."""
    restarts, shared = (
        os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE")
    )
    if dist.get_rank() == 0 and restarts not in (None, "0") and shared == "True":
        print(
            "WARNING: wlb_megatron: torchrun keeps its store over a restart, and ranks may take the addresses that "
            "those before have left there: they fail or hang (pytorch issue 135712). Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
            flush=True,
        )


def wait_for(store: Any, key: str, given_up: Callable[[], bool]) -> bool:
    """Wait until a key is set, without a limit; False once `given_up`.

    Asks again and again, after 1, 2, 4 .. 250 ms. A wait inside the store with a time limit would log two warnings each
    time it ends (torch 2.6 to 2.14), on every rank.
    """
    pause = 0.001
    while not given_up():
        if store.check([key]):
            return True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return False
