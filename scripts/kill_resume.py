#!/usr/bin/env python3
"""Kill a real CPU run with SIGKILL at random moments, resume it each time, and compare with the uninterrupted run.

python scripts/kill_resume.py 50 [--seed 0] [--processes 1] [--flags="--async-save"]
python scripts/kill_resume.py 5 --torchrun --processes 2   # one rank is killed, torchrun starts all again
python scripts/kill_resume.py 1 --torchrun --gpu           # on a GPU: NCCL, Transformer Engine, bf16, deterministic

Every rank notes the documents and losses (to the last bit) of each iteration it trains, also of those that a kill
makes it train again. All notes of an iteration must be equal, and equal to the uninterrupted run's. Moments: while
it starts, between iterations, in a save. Exits 1 at the first difference. On the CPU, ranks are forked from a process
that has imported Megatron (tests/forked_ranks.py), except with --torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
import forked_ranks  # noqa: E402
import megatron_runs as runs  # noqa: E402

MOST_RESTARTS = 6
FLAGS = [
    "--global-batch-size",
    "4",
    "--save-interval",
    "2",
    "--wlb-rehearsal",
    "never",
]

GPU = f"{runs.GPU_MODEL} {runs.GPU_MACHINE} {runs.GPU_TRAINING} --deterministic-mode"


class Job:
    """A run in `folder`: started, killed, resumed from its own checkpoints."""

    def __init__(self, folder: Path, corpus: Path, processes: int, flags: list[str], gpu: bool) -> None:
        self.folder, self._corpus, self._processes, self._flags = folder, corpus, processes, flags
        self.gpu = gpu
        folder.mkdir(parents=True)
        self.journal = folder / "journal"

    def start(self) -> FreshRanks | forked_ranks.Job:
        """All ranks, each with the processes that it starts in a process group of its own, without a launcher."""
        command, environment = self._command()
        with (self.folder / "log").open("ab") as log:
            if self.gpu:
                return FreshRanks(command, self._processes, environment, log)
            return forked_ranks.Job(command[:1], command[1:], self._processes, environment, log)

    def start_restarting(self, restarts: int) -> subprocess.Popen[bytes]:
        """torchrun, which starts all ranks again when one has failed. Its own store, which torch would have the ranks
        share, keeps what the ranks before have left there (pytorch issue 135712)."""
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self._processes)),
            *("--max-restarts", str(restarts), "--monitor-interval", "0.2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{runs.free_port()}"),
        ]
        command, environment = self._command()
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / "log").open("ab") as log:
            return _run([*launcher, *command], environment, log)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """The worker with its flags, and its environment."""
        checkpoints = str(self.folder / "checkpoints")
        command = [
            str(ROOT / "tests" / "megatron_worker.py"),
            *(*(GPU.split() if self.gpu else runs.flags()), *FLAGS),
            *("--data-path", str(self._corpus), "--save", checkpoints, "--load", checkpoints, *self._flags),
        ]
        own = {
            "WORKER_OUT": str(self.folder),
            "WORKER_JOURNAL": str(self.journal),
            "NCCL_ALGO": "Ring",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        }
        return command, {**(runs.gpu_environment if self.gpu else runs.cpu_environment)(), **own}

    def failed(self) -> SystemExit:
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return SystemExit(f"{text[-3000:]}\nthe run failed")

    def trained(self) -> int:
        """Iterations noted so far by the first rank, those trained again included."""
        path = Path(f"{self.journal}.0")
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def notes(self) -> dict[tuple[int, int], list[Any]]:
        """By rank and iteration, every note made of it. A line cut by the kill is left out."""
        by_step: dict[tuple[int, int], list[Any]] = {}
        for rank in range(self._processes):
            path = Path(f"{self.journal}.{rank}")
            if not path.exists():
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    note = json.loads(line)
                except ValueError:
                    continue
                by_step.setdefault((rank, note.pop("iteration")), []).append(note)
        return by_step


class FreshRanks:
    """Ranks in interpreters of their own, for GPUs, with what forked_ranks.Job has."""

    def __init__(
        self, command: list[str], processes: int, environment: dict[str, str], log: BinaryIO
    ) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port())}
        self._ranks = [
            _run(
                [sys.executable, *command],
                {
                    **environment,
                    **place,
                    "WORLD_SIZE": str(processes),
                    "RANK": str(at),
                    "LOCAL_RANK": str(at),
                },
                log,
            )
            for at in range(processes)
        ]

    def poll(self) -> int | None:
        statuses = [rank.poll() for rank in self._ranks]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def kill(self) -> None:
        for rank in self._ranks:
            kill(rank)


def _run(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(job: Job, seconds: float = 200) -> None:
    """Run the job to its end."""
    ranks = job.start()
    deadline = time.monotonic() + seconds
    while (status := ranks.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks.kill()
    if status is None:
        raise SystemExit(f"the run has not ended after {seconds:.0f} s")
    if status:
        raise job.failed()


def kill_once(job: Job, moment: random.Random) -> str:
    """Start or resume the job and kill it; returns when, in words."""
    before = job.trained()
    ranks = job.start()
    if moment.random() < 0.2:  # while it starts
        patience, more = moment.uniform(0, 8 if job.gpu else 1), 10**9
    else:
        patience, more = 60.0, moment.randint(1, 6)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and job.trained() < before + more and ranks.poll() is None:
        time.sleep(0.002)
    if more < 10**9:
        time.sleep(moment.uniform(0, 0.3))
    status = ranks.poll()
    ranks.kill()
    if status:
        raise job.failed()
    when = f"after {job.trained() - before} iterations"
    return when + (" (it was done)" if status == 0 else "")


def restart(job: Job, restarts: int, moment: random.Random) -> Iterator[str]:
    """Train to the end over torchrun, killing one rank now and then, whereupon torchrun starts all again; says when."""
    launcher = job.start_restarting(restarts)
    try:
        for _ in range(restarts):
            before, more = job.trained(), moment.randint(1, 6)
            while job.trained() < before + more:
                if launcher.poll() is not None:
                    raise job.failed()
                time.sleep(0.002)
            time.sleep(moment.uniform(0, 0.3))
            ranks = ranks_of(launcher)
            rank = moment.randrange(len(ranks))
            os.kill(ranks[rank], signal.SIGKILL)
            yield f"rank {rank}, after {job.trained() - before} iterations"
        if launcher.wait(200):
            raise job.failed()
    finally:
        launcher.terminate()  # it ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(40)
        kill(launcher)


def ranks_of(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Process of each rank that torchrun has started."""
    pids = {}
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        variables = dict(
            pair.split(b"=", 1)
            for pair in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"=" in pair
        )
        if b"RANK" in variables:
            pids[int(variables[b"RANK"])] = int(child)
    return pids


def compare(job: Job, expected: dict[tuple[int, int], list[Any]]) -> str:
    """Compares every note with the uninterrupted run's. SystemExit if one differs."""
    notes, again = job.notes(), 0
    for place, notes_of_step in sorted(notes.items()):
        again += len(notes_of_step) - 1
        for note in notes_of_step:
            if note != expected[place][0]:
                raise SystemExit(
                    f"rank {place[0]}, iteration {place[1]} differs:\n{note}\n{expected[place][0]}"
                )
    total = sum(len(notes_of_step) for notes_of_step in notes.values())
    return f"{total} notes equal, {again} of them of iterations trained again"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kills", type=int, nargs="?", default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=40, help="of the run")
    parser.add_argument("--flags", default="", help="further flags of the run")
    parser.add_argument(
        "--torchrun", action="store_true", help="kill one rank a time, torchrun starts all again"
    )
    parser.add_argument("--gpu", action="store_true", help="on GPUs, one a process")
    options = parser.parse_args()
    if options.torchrun and options.kills > MOST_RESTARTS:
        parser.error(f"--torchrun takes at most {MOST_RESTARTS} kills: the run is done by then")
    moment = random.Random(options.seed)
    flags = ["--train-iters", str(options.iterations), *options.flags.split()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scale = 16 if options.gpu else 1
        runs.write_corpus(folder / "corpus", [scale * length for length in runs.LENGTHS * 3])
        whole = Job(folder / "whole", folder / "corpus", options.processes, flags, options.gpu)
        finish(whole)
        expected = whole.notes()
        if len(expected) != options.iterations * options.processes:
            raise SystemExit(f"the uninterrupted run noted {len(expected)} iterations")
        flags = ["--wlb-plan-process", "always", *flags]  # the uninterrupted run plans in a thread
        job, killed = Job(folder / "killed", folder / "corpus", options.processes, flags, options.gpu), 0
        if options.torchrun:
            for when in restart(job, options.kills, moment):
                killed += 1
                print(f"kill {killed}: {when}; {compare(job, expected)}", flush=True)
        while killed < options.kills:
            when = kill_once(job, moment)
            killed += "done" not in when
            print(f"kill {killed}: {when}; {compare(job, expected)}", flush=True)
            if "done" in when:
                shutil.rmtree(job.folder)
                job = Job(folder / "killed", folder / "corpus", options.processes, flags, options.gpu)
        if not options.torchrun:
            finish(job)
        notes = job.notes()
        missing = sorted(expected.keys() - notes.keys())
        if missing:
            raise SystemExit(f"never trained (rank, iteration): {missing}")
        print(compare(job, expected))
        print(
            f"{options.kills} kills, each resumed: documents and losses equal the uninterrupted run's, bit for bit"
        )


if __name__ == "__main__":
    main()
