"""--wlb-token-weights equal: a token's loss weighs the same in every step, however many tokens the step has."""

import json

import pytest
import torch
from megatron_combinations import FSDP2, MOE
from megatron_runs import flags, train, whole_gradients

pytestmark = pytest.mark.megatron

WINDOWS = 4


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("", f"--wlb-token-weights equal {FSDP2}"),
        (f"{MOE} --moe-z-loss-coeff 0.01 --mtp-num-layers 1", ""),  # documents may wait, so auto is equal
    ],
)
def test_gradients_are_sums_over_tokens_divided_by_the_windows_tokens(corpus, tmp_path, model, parallel):
    """On two data-parallel ranks, against one process whose gradients are means over the step's predictions.

    Losses of routers and of multi-token prediction keep their share of the gradient.
    """
    log = tmp_path / "log.jsonl"
    run = f"--data-path {corpus} --wlb-log {log} --global-batch-size {WINDOWS} --split 1,0,0 --train-iters 1"
    arguments = flags(run, model)
    mean = whole_gradients(train([*arguments, "--wlb-token-weights", "step"], 1, tmp_path / "step"))
    (row,) = map(json.loads, log.read_text().splitlines())
    equal = whole_gradients(train([*arguments, *parallel.split()], 2, tmp_path / "equal"))
    window = int(arguments[arguments.index("--seq-length") + 1])
    predictions = row["tokens"] - row["documents"]  # the last token of each whole document predicts nothing
    assert predictions != WINDOWS * window
    for name, gradient in mean.items():
        expected = gradient * predictions / (WINDOWS * window)
        error = torch.linalg.norm(equal[name] - expected) / torch.linalg.norm(expected)
        assert error < 1e-5, f"{name}: {error:.2e}"
