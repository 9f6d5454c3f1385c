#!/usr/bin/env python3
"""Rank processes that run one training job after another without starting anew.

Imports, CUDA contexts and kernel graphs are made once, so that a job of a dozen steps costs little more than its steps.
Between jobs what Megatron and the plugin keep in modules is put back. A job that fails or hangs ends the processes; the
next one gets new ones. For benchmarks: a job that must be trusted has fresh processes. Tests fork theirs
(tests/forked_ranks.py): nothing stays between jobs, but a process with a CUDA context cannot be forked.

    ranks = WarmRanks(2, dict(os.environ))
    status = ranks.run("train", ["--num-layers", "8", ...], Path("job.log"), limit=60)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.environment import ROOT, free_port


class WarmRanks:
    """`count` rank processes of this machine."""

    def __init__(self, count: int, environment: dict[str, str]) -> None:
        self._count = count
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
        self._environment = {**environment, "PYTHONPATH": path, "WORLD_SIZE": str(count)}
        self._ranks: list[subprocess.Popen[str]] = []

    @property
    def warm(self) -> bool:
        """Whether there are processes that have run a job."""
        return bool(self._ranks)

    def run(
        self, kind: str, arguments: list[str], log: Path, limit: float, spans: tuple[Path, int] | None = None
    ) -> int:
        """0 if every rank ran the job to its end, else 1; their output is in `log`.

        kind: `train` (wlb_megatron.pretrain_gpt), `launch` (a script through the launcher: its path comes first in
        `arguments`; processes that run stock Megatron, --wlb-off, run nothing else), `profile`, or `module` (the
        main() of the module whose name comes first in `arguments`).

        limit: seconds, after which all are killed. spans: a path, and the iteration (from 1) from which on each rank
        writes when its forwards and backwards ran to PATH.<rank> (see Spans).
        """
        self.start()
        log.unlink(missing_ok=True)
        # A rank alone takes whatever port is free when it listens; of several, the others must know it before.
        port = free_port() if self._count > 1 else 0
        job = {"kind": kind, "arguments": arguments, "log": str(log), "port": port}
        if spans is not None:
            job |= {"spans": str(spans[0]), "from": spans[1]}
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(job) + "\n")
                rank.stdin.flush()
        except OSError:  # one has died since
            self.close()
            return 1
        done = self._replies(limit)
        if not done:
            self.close()
        return 0 if done else 1

    def close(self) -> None:
        """End the processes and all that they started."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self._ranks = []

    def start(self) -> None:
        """Start the processes, where there are none: they import while other things are done."""
        for rank in range(0 if self._ranks else self._count):
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve())],
                    env={**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def _replies(self, limit: float) -> bool:
        """Whether all ranks say "done" within the limit; the first that fails ends the wait."""
        until = time.monotonic() + limit
        with selectors.DefaultSelector() as waiting:
            for rank in self._ranks:
                assert rank.stdout is not None
                waiting.register(rank.stdout, selectors.EVENT_READ)
            while waiting.get_map():
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready:
                    return False
                for key, _ in ready:
                    if key.fileobj.readline() != "done\n":  # type: ignore[union-attr]
                        return False
                    waiting.unregister(key.fileobj)
        return True


class Spans:
    """When each forward and backward of each iteration ran on this rank, by marks on the device.

    A line of JSON for each iteration: its number, [backward, begin, end] of each call, in nanoseconds of this host, and
    the processor's time of this thread in each (a backward's launches are another thread's).
    """

    def __init__(self, path: str, first: int) -> None:
        self._path, self._first = f"{path}.{os.environ['RANK']}", first
        self._ends: list[tuple[int, int]] = []
        self._recorder: Any = None
        self._host: list[int] = []

    def after_iteration(self, iteration: int, *_: Any) -> None:
        """Stands for trace.after_iteration: called after each iteration's launches, on every rank."""
        import torch

        from wlb_megatron.plugin.job_state import part
        from wlb_megatron.plugin.logs.trace import Recorder, Tracing

        if iteration + 1 == self._first:
            self._recorder = part(Tracing).recorder = Recorder(torch.cuda.is_available())
            self._recorder.forward = self._timed(self._recorder.forward)
            self._recorder.backward = self._timed(self._recorder.backward)
        elif self._recorder is not None:
            self._ends.append((iteration, len(self._recorder._calls)))

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time_ns()
            result = run(*args)
            self._host.append(time.thread_time_ns() - began)
            return result

        return timed

    def write(self) -> None:
        if self._recorder is None:
            return
        calls, begin = [call[:3] for call in self._recorder.calls()], 0
        with open(self._path, "w", encoding="utf-8") as file:
            for iteration, end in self._ends:
                line = {"iteration": iteration, "calls": calls[begin:end], "host": self._host[begin:end]}
                file.write(json.dumps(line) + "\n")
                begin = end


def _serve() -> None:
    """Run the jobs that stdin brings, a line each; say done or failed on what was stdout."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _import()
    for line in sys.stdin:
        job = json.loads(line)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        try:
            _do(job)
            _forget()
        except BaseException:
            traceback.print_exc()
            print("failed", file=reply, flush=True)
            os._exit(1)
        sys.stdout.flush()
        print("done", file=reply, flush=True)
    os._exit(0)


def _do(job: dict[str, Any]) -> None:
    try:
        KINDS[job["kind"]](job)
    except SystemExit as end:  # Megatron's at --exit-interval
        if end.code not in (None, 0):
            raise


def _import() -> None:
    """What takes long to import, while the first job is awaited. Not Megatron: a script's checkout may bring it."""
    for module in ("torch", "transformer_engine.pytorch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def _train(job: dict[str, Any]) -> None:
    from wlb_megatron.plugin import pretrain_gpt
    from wlb_megatron.plugin.logs import trace as steps

    trace: Any = steps  # its function is replaced by a method
    spans = Spans(job["spans"], job["from"]) if "spans" in job else None
    usual = trace.after_iteration
    if spans is not None:
        trace.after_iteration = spans.after_iteration
    sys.argv = ["pretrain_gpt", *job["arguments"]]
    try:
        pretrain_gpt.main()
    finally:
        trace.after_iteration = usual
    if spans is not None:
        spans.write()


def _launch(job: dict[str, Any]) -> None:
    from wlb_megatron import launch

    sys.argv = ["launch", *job["arguments"]]
    launch.main()


def _profile(job: dict[str, Any]) -> None:
    import argparse

    from wlb_megatron.profiler.profile_command import add_profile

    parser = argparse.ArgumentParser()
    add_profile(parser)
    arguments = parser.parse_args(job["arguments"])
    arguments.run(arguments)


def _module(job: dict[str, Any]) -> None:
    name, *arguments = job["arguments"]
    sys.argv = [name, *arguments]
    importlib.import_module(name).main()


KINDS = {"train": _train, "launch": _launch, "profile": _profile, "module": _module}


def _forget() -> None:
    """Put back what modules of Megatron and of the plugin keep of a job."""
    import torch
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import training

    from wlb_megatron.plugin.job_state import begin_job
    from wlb_megatron.plugin.micro_batches import iterators

    for loader in [
        candidate for candidate in gc.get_objects() if type(candidate) is iterators.MicroBatchIterator
    ]:
        loader.close()
    training.destroy_global_state()
    destroy_moe_metrics_tracker()  # it is sized by the last job's layers
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    begin_job()
    gc.collect()
    for tensor in _trained(torch):
        if tensor.is_cuda:
            tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _trained(torch: Any) -> list[Any]:
    """Tensors of weights, gradients and optimizers that something still refers to: models with experts never die."""
    tensors: list[Any] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Parameter):
            tensors += [thing.data, getattr(thing, "main_grad", None), getattr(thing, "main_param", None)]
        elif issubclass(type(thing), torch.optim.Optimizer):
            tensors += [tensor for group in thing.param_groups for tensor in group["params"]]
            tensors += [value for state in thing.state.values() for value in state.values()]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


if __name__ == "__main__":
    _serve()
