"""Which ranks say why they stop. At the start they cannot talk to each other yet.

What only reports never ends a job: its errors are warnings, and only paths of reports are checked at the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from wlb_megatron.errors import WlbError, fatal
from wlb_megatron.plugin.job_state import part
from wlb_megatron.refusals import Refused, RefusedHere

Result = TypeVar("Result")

PATIENCE = 60.0
"""Seconds that a rank waits for the first rank of its node to say why all of them stop."""


def checked(check: Callable[[], Result]) -> Result:
    """Run what may raise Refused, and choose which ranks print its line.

    Flags and packages are the same on all ranks of a node, so its first rank speaks. The others wait, because a
    launcher that sees one of them end kills the first before it has spoken. They speak, too, if nobody ends them within
    PATIENCE. Files and GPUs may fail one rank alone (RefusedHere), so each failing rank speaks at once. All but rank 0
    name themselves and their host. The plugin's own errors in training end a rank the same way, after their stack.
    """
    try:
        return check()
    except Refused as raised:
        if raised.ranks_chosen:
            raise
        refusal = raised
    except Exception as error:
        if not (isinstance(error, WlbError) or str(error).startswith("wlb_megatron: ")):
            raise
        traceback.print_exc()
        refusal = RefusedHere(str(error))
    _speak(refusal)


def _speak(refusal: Refused) -> NoReturn:
    if not isinstance(refusal, RefusedHere) and os.environ.get("LOCAL_RANK", "0") != "0":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Megatron's handler would only note it
        time.sleep(PATIENCE)
    rank = int(os.environ.get("RANK", "0"))
    spoken = type(refusal)(fatal(str(refusal), f"rank {rank} on {socket.gethostname()}: " if rank else ""))
    spoken.ranks_chosen = True
    _tell_torchrun(str(spoken))
    raise spoken from None


def refuse(line: str) -> NoReturn:
    """End this rank with the line, as `checked` does."""
    _speak(Refused(line))


def say(what: str) -> None:
    """Print a line on rank 0, before ranks can talk to each other."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"> wlb_megatron {what}", flush=True)


def _tell_torchrun(line: str) -> None:
    """Have torchrun's last lines on stderr say it, too: they show what a rank has written into this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": line, "timestamp": int(time.time())}, file)


@dataclass(slots=True)
class Warned:
    """Outcomes for which a warning was printed."""

    outcomes: set[str] = field(default_factory=set)


@contextlib.contextmanager
def never_fatal(outcome: str) -> Iterator[None]:
    """Turn an error inside into a warning, the first time with this `outcome`. Training goes on."""
    try:
        yield
    except Exception as error:
        warned = part(Warned).outcomes
        if outcome not in warned:
            warned.add(outcome)
            with contextlib.suppress(OSError):  # stdout may be what is full
                print(f"WARNING: wlb_megatron: {outcome}: {error!r}", flush=True)
