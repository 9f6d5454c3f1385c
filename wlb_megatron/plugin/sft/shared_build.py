"""One process makes a jsonl's files in a folder that several share; the others wait, and can say what for.

The first process of each node tries to make a lock, a folder, which one of them can. It writes into it how far it is,
every few seconds. If that stands still, its writer has died: the lock is taken over, and shards that are there are
kept. Clocks of hosts are not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.whole_files import renamed_at_end

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: between two looks, and two writes; without a change until a lock is taken over; until an error that was
    there before is believed to be this start's; between two lines of a process that waits."""

    look: float = 0.5
    beat: float = 3.0
    dead: float = 60.0
    failed: float = 15.0
    line: float = 60.0


@dataclass(slots=True)
class _LockStatus:
    """What the lock said last, and since when."""

    status: dict[str, Any] = field(default_factory=dict)
    changed_at: float = 0.0
    first: bool = True


def build_shared(
    is_done: Callable[[], bool],
    lock: Path,
    build: Callable[[Say], None],
    *,
    may_build: bool,
    who: str,
    say: Say,
    patience: Patience = Patience(),
) -> None:
    """Returns when `is_done` says so.

    build: makes it, and calls what it is given with how far it is. may_build: the first process of its node. who: names
    this process. say: prints a line.

    WlbError of the build, in the process that builds and in those that wait for it.
    """
    observed, said_at = _LockStatus(changed_at=time.monotonic()), time.monotonic()
    while not is_done():
        if may_build and _take(lock):
            with _held(lock, who, patience) as report:
                try:
                    build(report)
                except WlbError:
                    if not is_done():  # by another process, which took this one for dead
                        raise
            continue
        status = _read(lock)
        now = time.monotonic()
        if status != observed.status:
            observed = _LockStatus(status, now, first=observed.first and not observed.status)
        unchanged_seconds = now - observed.changed_at
        if (
            "failed" in status
            and (not observed.first or unchanged_seconds > patience.failed)
            and not may_build
        ):
            raise WlbError(f"{status.get('who', 'another rank')} failed: {status['failed']}")
        if may_build and (unchanged_seconds > patience.dead or ("failed" in status and observed.first)):
            shutil.rmtree(lock, ignore_errors=True)
            observed = _LockStatus(changed_at=now, first=False)
        elif may_build and "failed" in status:
            raise WlbError(f"{status.get('who', 'another rank')} failed: {status['failed']}")
        if now - said_at > patience.line:
            said_at = now
            say(
                f"{who} waits for {status.get('who', 'a process that tokenizes')}, which {status.get('does', 'begins')}"
            )
        time.sleep(patience.look)


def _take(lock: Path) -> bool:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise WlbError(
            f"cannot write to {lock.parent}: {error.strerror}; give another --data-cache-path"
        ) from None
    return True


@contextmanager
def _held(lock: Path, who: str, patience: Patience) -> Iterator[Say]:
    """The lock while this process builds: its status changes all the time. After an error it stays, with the error."""
    status: dict[str, Any] = {"who": f"{who} on {socket.gethostname()}", "does": "begins", "beat": 0}
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(patience.beat):
            status["beat"] += 1
            _write(lock, status)

    def report(line: str) -> None:
        status["does"] = line

    _write(lock, status)
    writer = threading.Thread(target=beat, daemon=True)
    writer.start()
    try:
        yield report
    except BaseException as error:
        stop.set()
        writer.join()
        lines = str(error).splitlines() or [type(error).__name__]
        _write(lock, {**status, "failed": lines[0]})
        raise
    stop.set()
    writer.join()
    shutil.rmtree(lock, ignore_errors=True)


def _write(lock: Path, status: dict[str, Any]) -> None:
    with suppress(OSError), renamed_at_end(lock / "status.json") as scratch:
        scratch.write_text(json.dumps({**status, "pid": os.getpid()}), encoding="utf-8")


def _read(lock: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((lock / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
