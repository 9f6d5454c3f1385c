"""Rank processes forked from one that has imported torch and Megatron: a run without the seconds of its imports.

The server imports, starts no thread and runs no job; each rank is a fork of it that never served another job, so that
none can be felt in the next. In everything else a rank is the interpreter that `python target arguments...` starts: its
own environment, output, process group and exit status. At its end it waits for its threads and runs what is registered
with atexit, but does not take its modules apart: that takes a third of its time, because all of their memory is shared
until it is written to. Only where imports, torch.distributed.run or an interpreter's last breath are what is tested,
fresh processes are needed.

    done = run([worker], ["--num-layers", "2"], 2, cpu_environment(), timeout=300)
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from scripts.environment import cpu_environment, free_port

PRELOADED = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "wlb_megatron.plugin.hooks",
    "wlb_megatron.plugin.launch",
    "wlb_megatron.plugin.pretrain_gpt",
    "wlb_megatron.plugin.plans.provider",
    "wlb_megatron.plugin.step.forward_step",
    "wlb_megatron.plugin.step.losses",
    "wlb_megatron.plugin.step.rehearsal",
)
PRELOADED_IF_THERE = ("megatron.core.models.mimo", "megatron.core.tokenizers.text")
"""What the training loop of some releases imports when it runs."""

LARGEST = 1 << 20
"""Bytes of a job's description."""


def run(
    target: list[str], arguments: list[str], processes: int, environment: dict[str, str], *, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a script ([path]) or a module (["-m", name]) as __main__ on this many ranks; what they wrote.

    The exit status is that of the first rank that failed (negative: the signal that ended it), whereupon all are
    killed; else 0. After `timeout` seconds all are killed; TimeoutExpired.
    """
    streams: dict[str, bytes] = {"stdout": b"", "stderr": b"", "status": b""}
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        theirs = []
        for name in streams:
            own, other = (opened.enter_context(end) for end in socket.socketpair())
            theirs.append(other)
            waiting.register(own, selectors.EVENT_READ, name)
        _ask(target, arguments, processes, environment, [end.fileno() for end in theirs])
        for end in theirs:
            end.close()
        while waiting.get_map():  # until what the ranks started has ended, too: it holds their output
            ready = waiting.select(max(0.0, until - time.monotonic()))
            if not ready:
                late = subprocess.TimeoutExpired(target, timeout, streams["stdout"], streams["stderr"])
                late.add_note("\n".join(streams[name][-3000:].decode(errors="replace") for name in streams))
                raise late
            for key, _ in ready:
                piece = key.fileobj.recv(1 << 16)
                streams[key.data] += piece
                if not piece:
                    waiting.unregister(key.fileobj)
    output, errors, status = (part.decode(errors="replace") for part in streams.values())
    if not status:
        raise ConnectionError(f"the process that forks ranks has ended\n{errors}")
    return subprocess.CompletedProcess([*target, *arguments], int(status), output, errors)


class Job:
    """A job that runs beside its caller, its ranks' output in `log`, until it ends or is killed."""

    def __init__(
        self,
        target: list[str],
        arguments: list[str],
        processes: int,
        environment: dict[str, str],
        log: BinaryIO,
    ) -> None:
        """As run()."""
        self._status, other = socket.socketpair()
        with other:
            _ask(target, arguments, processes, environment, [log.fileno(), log.fileno(), other.fileno()])
        self._told: int | None = None

    def poll(self) -> int | None:
        """The exit status, as run() gives it; None while ranks run."""
        if self._told is None and select.select([self._status], [], [], 0)[0]:
            self._told = int(self._status.recv(16))
            self._status.shutdown(socket.SHUT_WR)
            self._status.recv(1)  # nothing, when the leader has ended
        return self._told

    def kill(self) -> None:
        """SIGKILL to the ranks and to what they started, if they run. Returns when that is done."""
        if self._told is None:
            self._status.shutdown(socket.SHUT_WR)
            select.select([self._status], [], [])
            self.poll()


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """As torch.multiprocessing.spawn: function(rank, *arguments) on plain processes, without this file's CUDA shim.

    They are forks of the standard library's fork server, which imports once what the test files do.
    """
    import torch.multiprocessing as multiprocessing

    preloaded = ["torch.distributed", "megatron.core.parallel_state", "hypothesis"]
    multiprocessing.set_forkserver_preload(preloaded)
    multiprocessing.start_processes(function, arguments, nprocs=processes, start_method="forkserver")


def _ask(
    target: list[str], arguments: list[str], processes: int, environment: dict[str, str], ends: list[int]
) -> None:
    """Have the server start a job. ends: files for output and errors, and a socket for the status."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {"target": target, "arguments": arguments, "processes": processes}
    job["environment"] = {**environment, **place}
    socket.send_fds(_server(), [json.dumps(job).encode()], ends)


@functools.cache
def _server() -> socket.socket:
    """Where jobs go: the server, started once, which ends when this process does."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(other.fileno())],
            env=cpu_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,  # an interrupt is the asker's, who tells by going
        )
    atexit.register(server.wait)
    atexit.register(server.kill)
    return own


def _serve(jobs: socket.socket) -> tuple[dict[str, Any], int]:
    """Fork a leader for each job, and it the ranks; returns in each rank, with the job and its number."""
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    for module in PRELOADED_IF_THERE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    _read_once()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:  # none of them would be in the ranks, and what they lock would stay locked
        raise SystemExit(f"importing Megatron starts {len(threads) - 1} threads: ranks cannot be forked")
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # of torch's libraries, which ranks do not take apart either
    gc.freeze()
    leaders: list[int] = []
    while True:
        message, ends, *_ = socket.recv_fds(jobs, LARGEST, 3)
        leaders = [leader for leader in leaders if os.waitpid(leader, os.WNOHANG) == (0, 0)]
        if not message:
            os._exit(0)
        leader = os.fork()
        if not leader:
            jobs.close()
            job = json.loads(message)
            return job, _lead(job, *ends)
        leaders.append(leader)
        for end in ends:
            os.close(end)


def _read_once() -> None:
    """Keep for all ranks what each would read: sources, from which Megatron's argument groups take their help, and
    the installed packages, which each process group is looked up in: a third of a second. The process that collects
    what writers of torch_dist checkpoints say is forked from its rank: a fresh one imports torch, which takes 5 s."""
    import argparse
    import ast
    import importlib.metadata
    import inspect

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import arguments

    for owner, name in ((inspect, "getsource"), (ast, "parse"), (importlib.metadata, "entry_points")):
        setattr(owner, name, functools.cache(getattr(owner, name)))
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    importlib.metadata.entry_points(group="torch.distributed.backends")
    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(queue, mp_mode="fork")


def _lead(job: dict[str, Any], output: int, errors: int, status: int) -> int:
    """Returns in each rank, with its number. The leader waits for them, tells how they ended, and ends."""
    ranks: list[int] = []
    for number in range(job["processes"]):
        rank = os.fork()
        if not rank:
            os.setpgid(0, 0)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for end in (output, errors, status):
                os.close(end)
            return number
        os.setpgid(rank, rank)  # both do it: either may be the first to need it
        ranks.append(rank)
    os.close(output)
    os.close(errors)
    with socket.socket(fileno=status) as asker, contextlib.suppress(OSError):
        first = _first_failure(ranks, asker)
        if first:
            _kill(ranks)
        asker.send(str(first).encode())
        asker.shutdown(socket.SHUT_WR)
        asker.recv(1)  # nothing, when all their output is read, or nobody asks any more
    _kill(ranks)
    os._exit(0)


def _first_failure(ranks: list[int], asker: socket.socket) -> int:
    """The first status that is not 0, or 0 when all have ended; -SIGKILL when nobody asks any more."""
    running = set(ranks)
    while running:
        for rank in ranks:
            ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended and ended.si_status:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            running -= {rank} if ended else set()
        if select.select([asker], [], [], 0.01)[0]:
            return -signal.SIGKILL
    return 0


def _kill(ranks: list[int]) -> None:
    """SIGKILL to the ranks and to what they started."""
    for rank in ranks:  # none is waited for, so that their numbers stay theirs
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


def main() -> None:
    """The server; in each rank, its target as __main__, and this process's end."""
    with socket.socket(fileno=int(sys.argv[1])) as jobs:
        job, number = _serve(jobs)
    places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": job["processes"]}
    places["LOCAL_WORLD_SIZE"] = job["processes"]
    os.environ.clear()
    os.environ.update(job["environment"] | {name: str(value) for name, value in places.items()})
    *module, target = job["target"]
    sys.argv = [target, *job["arguments"]]
    status = None
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(target).parent)
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):  # the interpreter prints it
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
