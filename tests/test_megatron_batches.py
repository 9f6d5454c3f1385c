"""Global batches that data-parallel ranks do not divide, through Megatron's loop."""

import json
import re

import pytest
from megatron_runs import flags, output_of, refusal_of


@pytest.mark.megatron
def test_a_batch_of_four_is_decreased_to_three_over_three_ranks(corpus, tmp_path):
    """Megatron's consumed samples and the planner's agree, also after a resume."""
    log = tmp_path / "log.jsonl"
    arguments = flags(
        f"--data-path {corpus} --split 60,40,0 --eval-iters 1 --eval-interval 2 --eval-global-batch-size 3",
        f"--global-batch-size 4 --decrease-batch-size-if-needed --train-iters 4 --wlb-log {log}",
        f"--save {tmp_path} --load {tmp_path} --save-interval 2 --ckpt-format torch",
    )
    output_of([*arguments, "--exit-interval", "2"], 3)
    assert "4/       4 | consumed samples:           12 |" in output_of(arguments, 3)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    # Three windows of 64 tokens arrive in each; some of them may wait, and one document more may come.
    assert abs(rows[-1]["consumed_tokens"] - 4 * 3 * 64) < 128


@pytest.mark.megatron
def test_a_micro_batch_of_two_windows_trains_exactly_at_resume_and_evaluates_in_its_own(corpus, tmp_path):
    """8 windows over two ranks are two micro-batches each, of up to 1.5 x 2 windows of 64 tokens."""
    arguments = flags(
        f"--data-path {corpus} --split 60,40,0 --num-workers 0 --train-iters 4 --global-batch-size 8",
        "--micro-batch-size 2 --eval-interval 2 --eval-iters 1 --eval-micro-batch-size 4 --eval-global-batch-size 8",
        "--wlb-micro-batches-per-window 1 --wlb-chunks off --wlb-thresholds 61 --wlb-log-plans",
    )
    save = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --ckpt-format torch".split()
    log = ["--wlb-log", str(tmp_path / "log.jsonl")]
    whole = output_of([*arguments, "--wlb-log", str(tmp_path / "whole.jsonl")], 2)
    first = output_of([*arguments, *save, *log, "--exit-interval", "2"], 2)
    resumed = output_of([*arguments, *save, *log], 2)
    assert "4/       4 | consumed samples:           32 |" in resumed
    assert "micro-batches of at most 192 tokens" in resumed
    assert norms(whole) == norms(first) + norms(resumed) and len(norms(whole)) == 4
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    plans = [row["lengths"] for row in rows]
    whole_rows = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert plans == [json.loads(line)["lengths"] for line in whole_rows]
    micro_batches = [micro_batch for plan in plans for row in plan for micro_batch in row]
    assert [len(plan) for plan in plans] == [2] * 4
    assert 128 < max(map(sum, micro_batches)) <= 192 and max(map(max, micro_batches)) == 64
    assert abs(rows[-1]["consumed_tokens"] + rows[-1]["waiting_tokens"] - 4 * 8 * 64) < 64
    refused = refusal_of([*arguments, *save, *log, "--micro-batch-size", "4"], 2)
    assert "keep --seq-length and --micro-batch-size" in refused


def norms(output: str) -> list[str]:
    """Of gradients, by iteration. (The losses logged after a resume's first iteration are means with it.)"""
    return re.findall(r"grad norm: (\S+)", output)
