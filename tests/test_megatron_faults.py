"""Faults of files and machines in a real run: a rank that cannot go on ends soon, with a status that tells it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from megatron_runs import LENGTHS, flags, launch, write_corpus

LIMIT = 60
"""Seconds within which a run that fails must have ended, its start included; a frozen one never does."""


def truncate_when(log: Path, lines: int, victim: Path) -> None:
    """Cut `victim` to nothing once `log` has so many lines."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if log.exists() and log.read_text().count("\n") >= lines:
            os.truncate(victim, 0)
            return
        time.sleep(0.01)


@pytest.mark.megatron
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_whose_tokens_cannot_be_read_any_more_ends_though_workers_ignore_the_signal(
    workers: str, tmp_path: Path
) -> None:
    prefix, log = tmp_path / "documents", tmp_path / "steps.jsonl"
    write_corpus(prefix, LENGTHS * 4)
    arguments = [*flags(), "--data-path", str(prefix), "--split", "1,0,0", "--global-batch-size", "2"]
    arguments += ["--train-iters", "100000", "--num-workers", workers, "--exit-signal-handler"]
    fault = threading.Thread(target=truncate_when, args=(log, 3, prefix.with_suffix(".bin")))
    fault.start()
    done = launch([*arguments, "--wlb-log", str(log)], 1, timeout=LIMIT)
    fault.join()
    assert done.returncode != 0
    assert f"{prefix}.bin ends before byte" in done.stderr
