"""Global batches that data-parallel ranks do not divide, through Megatron's loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_runs import failure, flags, launch


@pytest.mark.megatron
def test_a_batch_of_four_is_decreased_to_three_over_three_ranks(corpus: Path, tmp_path: Path) -> None:
    """Megatron's consumed samples and the planner's agree, also after a resume."""
    log = tmp_path / "log.jsonl"
    arguments = [*flags(), "--data-path", str(corpus), "--split", "60,40,0", "--eval-iters", "1"]
    arguments += [
        "--global-batch-size",
        "4",
        "--decrease-batch-size-if-needed",
        "--eval-global-batch-size",
        "3",
    ]
    arguments += [
        "--save",
        str(tmp_path),
        "--load",
        str(tmp_path),
        "--save-interval",
        "2",
        "--ckpt-format",
        "torch",
    ]
    arguments += ["--train-iters", "4", "--wlb-log", str(log), "--eval-interval", "2"]
    first = launch([*arguments, "--exit-interval", "2"], 3)
    assert first.returncode == 0, failure(first)
    done = launch(arguments, 3)
    assert done.returncode == 0, failure(done)
    assert "4/       4 | consumed samples:           12 |" in done.stdout
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    # Three windows of 64 tokens arrive in each; some of them may wait, and one document more may come.
    assert abs(rows[-1]["consumed_tokens"] - 4 * 3 * 64) < 128
