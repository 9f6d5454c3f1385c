"""fp16: the loss scale multiplies a mean over the global batch, and updates that are thrown away are reported."""

import json
import re

import pytest
import torch
from megatron_runs import flags, output_of, train, whole_gradients

pytestmark = pytest.mark.megatron

RUN = "--global-batch-size 4 --split 1,0,0"


def test_gradients_are_the_scale_times_those_of_fp32_on_two_data_parallel_ranks(corpus, tmp_path):
    """Divided by the tokens once, and so are those of multi-token prediction."""
    arguments = flags(f"--data-path {corpus}", RUN, "--train-iters 1 --mtp-num-layers 1")
    exact = whole_gradients(train(arguments, 1, tmp_path / "fp32"))
    ranks = train([*arguments, "--fp16", "--loss-scale", "1024"], 2, tmp_path / "fp16")
    gradients = whole_gradients(ranks)
    for name, gradient in exact.items():
        error = torch.linalg.norm(gradients[name].float() / 1024 - gradient) / torch.linalg.norm(gradient)
        assert error < 0.02, f"{name}: {error:.3f}"


def test_a_scale_at_which_summed_losses_overflow_is_kept_and_what_it_costs_is_told(corpus, tmp_path):
    """From 2**22 a mean's scale settles at 2**21 (as it does without the plugin), a sum's over 240 tokens at 2**12."""
    log = tmp_path / "log.jsonl"
    scale = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --log-interval 2"
    said = output_of(flags(f"--data-path {corpus} --wlb-log {log} --train-iters 6", RUN, scale), 1)
    rows = [json.loads(interval) for interval in log.read_text().splitlines()]
    skipped = [row for row in rows if row["update_skipped"]]
    assert 1 <= len(skipped) <= 3 and len(rows) == 6
    assert min(float(value) for value in re.findall(r"loss scale: (\S+)", said)) >= 2**19
    counts = re.findall(r"updates thrown away: (\d+), with (\d+) documents, (\d+) tokens", said)
    sums = [sum(int(interval[at]) for interval in counts) for at in range(3)]
    assert sums == [len(skipped), *(sum(row[name] for row in skipped) for name in ("documents", "tokens"))]
