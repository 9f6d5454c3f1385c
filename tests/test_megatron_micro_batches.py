"""Through Megatron's own schedules: as many micro-batches as the plan wants train what one a window trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_combinations import MOE, VPP
from megatron_runs import MACHINE, MODEL, TRAINING, differences, train

pytestmark = pytest.mark.megatron

ITERATIONS = 4
EXPERTS = MOE.replace("aux_loss --moe-aux-loss-coeff 0.01", "none")
PP2 = "--pipeline-model-parallel-size 2"
ROWS = {
    "PP2": (2, PP2, "", 2),
    "PP2xCP2": (4, f"{PP2} --context-parallel-size 2", "", 2),
    "PP2xVPP2, an odd number of windows": (
        *(2, f"{VPP} --wlb-rehearsal always", "--num-layers 4 --global-batch-size 7", 4),
    ),
    "DP2xPP2": (4, PP2, "", 7),
    "EP2xPP2": (4, f"{PP2} --expert-model-parallel-size 2", EXPERTS, 7),
}
"""Processes, layout, model, and what a micro-batch costs by itself (tokens), so that their number changes."""
FREE = "--wlb-micro-batches-per-window auto --wlb-quadratic-at 80 --wlb-micro-batch-cost"


def run(corpus: Path, out: Path, processes: int, flags: str) -> list[dict[str, Any]]:
    """Nothing is delayed, so that an iteration trains the same documents whatever the pipeline."""
    base = [flag for part in (MODEL, MACHINE, TRAINING) for flag in part.split()]
    arguments = [*base, "--data-path", str(corpus), "--global-batch-size", "8", *flags.split()]
    return train(
        [*arguments, "--train-iters", str(ITERATIONS), "--wlb-max-delay", "0", "--wlb-max-tokens", "256"],
        processes,
        out,
    )


def counts(ranks: list[dict[str, Any]]) -> list[int]:
    """Micro-batches of the first rank in each iteration (a stage of two chunks runs each twice)."""
    of = [entry[0] for entry in ranks[0]["documents"] if entry[0] >= 0]  # without the rehearsal
    return [of.count(iteration) for iteration in sorted(set(of))]


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_gradients_equal_the_single_process(name: str, corpus: Path, tmp_path: Path) -> None:
    processes, layout, model, cost = ROWS[name]
    single = run(corpus, tmp_path / "single", 1, model)
    ranks = run(corpus, tmp_path / "ranks", processes, f"{layout} {model} {FREE} {cost}")
    chunks, windows = (2, 7) if "VPP" in name else (1, 8 // (2 if name in ("DP2xPP2", "EP2xPP2") else 1))
    numbers = [count // chunks for count in counts(ranks)]
    loss, gradient, parameter = differences(single, ranks, ITERATIONS, numbers)
    assert loss <= 1e-6
    assert gradient <= 1e-5, parameter
    assert max(numbers) > windows
    if chunks == 2:
        assert all(number % 2 == 0 for number in numbers)
    else:
        assert len(set(numbers)) > 1, f"{numbers}: the number never changes"
