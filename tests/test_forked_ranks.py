"""Ranks forked from a process that has imported Megatron: as fresh ones, and ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run
from megatron_runs import cpu_environment, flags, train

pytestmark = pytest.mark.megatron


def test_a_job_trains_bit_for_bit_as_in_fresh_processes_whatever_ran_before(corpus, tmp_path):
    step = ["--global-batch-size", "4", "--train-iters", "3", "--data-path", str(corpus)]

    def job(name: str, *, fresh: bool = False, **parallel: int) -> list[dict[str, Any]]:
        return train([*flags(**parallel), *step], 2, tmp_path / name, fresh=fresh)

    expected = job("fresh", fresh=True, context=2)
    first = job("first", context=2)
    assert job("between", pipeline=2)[0]["losses"] != expected[0]["losses"]
    for ranks in (first, job("again", context=2)):
        for rank, forked in zip(expected, ranks, strict=True):
            assert len(rank["losses"]) == 12 and forked["losses"] == rank["losses"]
            assert forked["documents"] == rank["documents"] and forked["place"] == rank["place"]
            assert forked["gradients"].keys() == rank["gradients"].keys()
            for name, (gradient, _) in rank["gradients"].items():
                assert torch.equal(forked["gradients"][name][0], gradient), name


def script(folder: Path, text: str, processes: int, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(f"import os, subprocess, sys, time\n{text}")
    return run([str(folder / "script.py")], ["a", "b c"], processes, cpu_environment(), timeout=timeout)


def test_a_rank_has_its_own_arguments_environment_output_and_status(tmp_path: Path) -> None:
    done = script(tmp_path, "print(os.environ['RANK'], sys.argv[1:], __name__); os.environ['RANK'] = '9'", 2)
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"{rank} ['a', 'b c'] __main__" for rank in "01"]
    last = "import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.2, print, ['thread']).start()\n"
    done = script(tmp_path, f"{last}raise SystemExit(16)", 1)
    assert done.returncode == 16 and done.stdout.split() == ["thread", "last"]
    done = script(tmp_path, "raise SystemExit('why')", 1)
    assert done.returncode == 1 and done.stderr == "why\n"
    assert script(tmp_path, "os.kill(os.getpid(), 9)", 1).returncode == -signal.SIGKILL


def test_a_rank_that_fails_says_why_and_ends_the_others_and_what_they_started(tmp_path: Path) -> None:
    failing = """
if os.environ["RANK"] == "0":
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
print(sys.stdin.read())  # nothing, at once
time.sleep(0.3)
raise KeyError("why")
"""
    done = script(tmp_path, failing, 2)
    assert done.returncode == 1
    assert "script.py" in done.stderr and done.stderr.endswith("KeyError: 'why'\n")
    assert gone(int(done.stdout.split()[0]))


def test_a_job_over_its_time_is_ended_with_what_it_started_and_its_output_is_told(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as late:
        script(tmp_path, "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)", 1, timeout=2)
    started = late.value.output.decode()
    assert gone(int(started)) and any(started in note for note in late.value.__notes__)


def gone(process: int) -> bool:
    """Whether it ends within a few seconds: a zombie has."""
    for _ in range(500):
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    return False
