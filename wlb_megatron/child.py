"""A Python process that works beside this one, ends with it, and answers requests over its pipes; and short-lived rank
processes of a check.

The first is started anew, not forked: it holds no CUDA context, and imports nothing that its work does not. Requests
and answers are pickled: nobody else writes to the pipes between a process and the child that it started.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, BinaryIO

import numpy as np

from wlb_megatron.errors import WlbError

PATIENCE = 300
"""Seconds after which a child that neither reads, answers nor ends (stopped, starved) is given up on."""

_SLICE_MS = 20
"""Milliseconds between two calls of `hurry`."""

_PIPE = 1 << 20
"""Bytes that may wait in the pipe: the most that an unprivileged process may request."""

_PAUSE = 1e-4
"""Seconds before a message is unpacked: a thread that goes on keeps the interpreter for 5 ms from one that wants it."""

_LENGTH = struct.Struct("<Q")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a scheduler sends to all processes of a job. The child ignores them, because the trainer
may then save and needs it."""


@dataclass(frozen=True)
class _Failure:
    """Sent instead of an answer. text: a WlbError's line if `is_line`, else a traceback."""

    text: str
    is_line: bool


class Child:
    """The parent's side. Not thread-safe."""

    def __init__(self, work: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        """Start a process that calls `work` with an iterator over all requests to come, and sends what it yields.

        work: a function of a module that can be imported by its name, or a partial of one. Raises OSError if the
        process cannot start. The child sees the modules that this process sees.
        """
        # Answers have a pipe of their own: start-up files and preloaded libraries may print to stdout.
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)
        command = "from wlb_megatron.child import serve; serve()"
        function = work.func if isinstance(work, partial) else work
        name = f"{function.__module__}.{function.__qualname__}"  # for ps
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, str(os.getpid()), str(writing), name],
                stdin=subprocess.PIPE,
                stdout=2,
                bufsize=0,
                pass_fds=(writing,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
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
        self._quiet: float | None = None  # since when it is waited for without a byte in or out
        self.send(work)

    def send(self, request: Any) -> None:
        """Sends a request as soon as an answer is asked for."""
        message = _packed(request)
        self._unsent += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]

    def receive(self, hurry: Callable[[], bool] | None = None) -> Any:
        """The child's next answer; None after the last one, or if `hurry` returns true before it arrives (ask again
        later).

        OSError if the child has ended. TimeoutError if it has done nothing for PATIENCE seconds. If its work has
        raised: a WlbError with the same line, or RuntimeError with the traceback.
        """
        while self._unsent:
            if not self._ready(self._stdin, select.POLLOUT, hurry):
                return None
            try:
                count = self._stdin.write(self._unsent[0]) or 0
            except BrokenPipeError:
                raise OSError(f"it has {self._ending()}") from None
            self._quiet = time.monotonic()
            self._unsent[0] = self._unsent[0][count:]
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
        time.sleep(_PAUSE)
        answer = pickle.loads(message)
        if isinstance(answer, _Failure):
            raise WlbError(answer.text) if answer.is_line else RuntimeError(answer.text)
        return answer

    def kill(self) -> None:
        """Ends the child now, whatever it is doing."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def _length(self) -> int:
        return int(_LENGTH.unpack_from(self._received)[0])

    def _ready(self, pipe: IO[bytes], event: int, hurry: Callable[[], bool] | None) -> bool:
        """Waits until the pipe can be written or read; False if `hurry` returns true before."""
        self._quiet = self._quiet or time.monotonic()
        poller = select.poll()  # select.select takes no file above 1,023: connections of all ranks are open
        poller.register(pipe, event)
        while not poller.poll(_SLICE_MS if hurry is not None else 1000):
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


def serve() -> None:
    """The child's side: do the work that the first message names. Ends a second after the parent at the latest."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A closed pipe is no sign: processes that the parent has forked may hold it open.
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    requests, answers = _messages(sys.stdin.buffer), os.fdopen(int(sys.argv[2]), "wb")

    def send(answer: Any) -> None:
        message = _packed(answer)
        answers.write(_LENGTH.pack(len(message)))
        answers.write(message)
        answers.flush()

    try:
        for answer in next(requests)(requests):
            send(answer)
        send(None)
    except BrokenPipeError:
        os._exit(0)  # the parent has ended
    except Exception as error:
        is_line = isinstance(error, WlbError)
        send(_Failure(str(error) if is_line else traceback.format_exc(), is_line))


def _messages(stream: BinaryIO) -> Iterator[Any]:
    while head := stream.read(_LENGTH.size):
        yield pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _Pickler(pickle.Pickler):
    """Sends where an array is mapped from, not the array: an index stays in its file."""

    def reducer_override(self, value: Any) -> Any:
        file = (
            _mapped(value) if type(value) is np.ndarray and value.flags.c_contiguous and value.size else None
        )
        if file is None:
            return NotImplemented
        offset = file.offset + value.__array_interface__["data"][0] - file.__array_interface__["data"][0]
        return _map, (str(file.filename), value.dtype, offset, value.shape)


def _mapped(value: Any) -> np.memmap[Any, Any] | None:
    """The mapping that an array is a part of."""
    while value is not None and not isinstance(value, np.memmap):
        value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
    return None if value is None or value.filename is None else value


def _map(name: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=shape))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


_RANKS_PAUSE = 0.05
"""Seconds between two looks at the ranks."""


def run_ranks(command: Sequence[str], size: int, environment: Mapping[str, str], seconds: float) -> list[str]:
    """Run the command for each of `size` ranks, all at once. Returns what each prints to stdout.

    The command gets two more arguments: its rank, and a file in an empty folder, over which the ranks meet. Once a rank
    fails, the others are ended, because they would wait for it. Raises WlbError with the last line of its stderr,
    TimeoutError after `seconds`, OSError if a process cannot start.
    """
    deadline = time.monotonic() + seconds
    environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with ExitStack() as stack:
        meeting = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "meeting")

        def scratch() -> IO[str]:
            return stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))

        # Files, not pipes: a rank that prints more than a pipe holds must not wait for a reader.
        outputs, errors = ([scratch() for _ in range(size)] for _ in range(2))
        ranks: list[subprocess.Popen[str]] = []
        try:
            for number, (out, err) in enumerate(zip(outputs, errors, strict=True)):
                files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
                arguments = [*command, str(number), meeting]
                ranks.append(subprocess.Popen(arguments, env=environment, text=True, **files))
            while not any(statuses := [rank.poll() for rank in ranks]) and None in statuses:
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_RANKS_PAUSE)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for file in (*outputs, *errors):
            file.seek(0)
        for number, status in enumerate(statuses):
            if status:
                lines = errors[number].read().strip().splitlines()
                line = lines[-1] if lines else f"a rank ended with status {status}"
                raise WlbError(line.removeprefix(f"[rank{number}]: "))
        return [out.read() for out in outputs]
