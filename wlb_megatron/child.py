"""A Python process that works beside this one, ends with it, and exchanges messages over its pipes.

It is started anew, not forked: it holds no CUDA context, and imports nothing that its module does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, BinaryIO

PATIENCE = 300
"""Seconds after which a child that neither reads, answers nor ends (stopped, starved) is given up on."""

_SLICE_MS = 20
"""Milliseconds between two calls of `hurry`."""

_PIPE = 1 << 20
"""Bytes that may wait in the pipe: the most that an unprivileged process may request."""

_LENGTH = struct.Struct("<Q")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a scheduler sends to all processes of a job. The child ignores them, because the trainer
may then save and needs it."""


class Child:
    """The parent's side. Not thread-safe."""

    def __init__(self, module: str) -> None:
        """Start `python -m module`, which sees the modules that this process sees. OSError if it cannot start."""
        # Answers have a pipe of their own: start-up files and preloaded libraries may print to stdout.
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), str(writing)],
                stdin=subprocess.PIPE,
                stdout=2,
                bufsize=0,
                pass_fds=(writing,),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
            )
        finally:
            os.close(writing)
        assert self.process.stdin is not None
        self._stdin = self.process.stdin
        os.set_blocking(self._stdin.fileno(), False)  # a pipe that nobody reads takes 64 KiB
        with contextlib.suppress(OSError):  # fewer reads: each hands the interpreter over twice
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE)
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._killed = False
        self._quiet: float | None = None  # since when it is waited for without a byte in or out

    def send(self, message: bytes) -> None:
        """Sends a message as soon as the child asks for one."""
        self._unsent += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]

    def receive(self, hurry: Callable[[], bool] | None = None) -> bytes | None:
        """The child's next message; None if `hurry` returns true before it arrives (ask again later).

        OSError if the child has ended. TimeoutError if it has done nothing for PATIENCE seconds.
        """
        while self._unsent:
            if not self._ready(self._stdin, select.POLLOUT, hurry):
                return None
            try:
                sent = self._stdin.write(self._unsent[0]) or 0
            except BrokenPipeError:
                raise OSError(f"it has {self._ending()}") from None
            self._quiet = time.monotonic()
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        head = _LENGTH.size
        while len(self._received) < head or len(self._received) < head + self._length():
            if not self._ready(self._answers, select.POLLIN, hurry):
                return None
            part = self._answers.read(_PIPE)  # what is there, at most so much
            if not part:
                raise OSError(f"it has {self._ending()}")
            self._quiet = time.monotonic()
            self._received += part
        self._quiet = None
        end = head + self._length()
        message = bytes(self._received[head:end])
        del self._received[:end]
        return message

    def failure(self) -> str | None:
        """How the child ended, where it ended badly and not by `kill`. Its last messages may not have been received."""
        return f"it has {self._ending()}" if self.process.poll() and not self._killed else None

    def kill(self) -> None:
        """Ends the child now, whatever it is doing."""
        self._killed = True
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def _length(self) -> int:
        return int(_LENGTH.unpack_from(self._received)[0])

    def _ready(self, pipe: IO[bytes], event: int, hurry: Callable[[], bool] | None) -> bool:
        """Waits until the pipe can be written or read; False if `hurry` returns true before."""
        self._quiet = self._quiet or time.monotonic()
        waiting = select.poll()  # select.select takes no file above 1,023: connections of all ranks are open
        waiting.register(pipe, event)
        while not waiting.poll(_SLICE_MS if hurry is not None else 1000):
            if time.monotonic() - self._quiet > PATIENCE:
                raise TimeoutError(f"no plan in {PATIENCE} s")
            if hurry is not None and hurry():
                return False
        return True

    def _ending(self) -> str:
        """How the child ended, once its pipe is closed."""
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"ended with status {status}" if status >= 0 else f"been killed by signal {-status}"


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """The child's side: the streams to read messages from and write them to. The child then ends a second after its
    parent.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A closed pipe is no sign: processes that the parent has forked may hold it open.
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    return sys.stdin.buffer, os.fdopen(int(sys.argv[2]), "wb")


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message, None after the last one."""
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if head else None


def write_message(stream: BinaryIO, message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
