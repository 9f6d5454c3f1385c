"""Through Megatron's own schedules: as many micro-batches as the plan wants train what one a window trains."""

from typing import Any

import pytest
from megatron_combinations import MOE, VPP
from megatron_runs import check_alike, flags, train

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
TRAINED = f"--global-batch-size 8 --train-iters {ITERATIONS} --wlb-max-delay 0 --wlb-max-tokens 256"
FREE = "--wlb-micro-batches-per-window auto --wlb-quadratic-at 80 --wlb-micro-batch-cost"


def counts(ranks: list[dict[str, Any]]) -> list[int]:
    """Micro-batches of the first rank in each iteration (a stage of two chunks runs each twice)."""
    of = [entry[0] for entry in ranks[0]["documents"] if entry[0] >= 0]  # without the rehearsal
    return [of.count(iteration) for iteration in sorted(set(of))]


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_gradients_equal_the_single_process(name, corpus, single, tmp_path):
    """Nothing is delayed, so that an iteration trains the same documents whatever the pipeline."""
    processes, layout, model, cost = ROWS[name]
    arguments = flags(f"--data-path {corpus}", TRAINED, model, f"{layout} {FREE} {cost}")
    ranks = train(arguments, processes, tmp_path)
    chunks, windows = (2, 7) if "VPP" in name else (1, 8 // (2 if name in ("DP2xPP2", "EP2xPP2") else 1))
    numbers = [count // chunks for count in counts(ranks)]
    check_alike(single(TRAINED, model), ranks, ITERATIONS, numbers)
    assert max(numbers) > windows
    if chunks == 2:
        assert all(number % 2 == 0 for number in numbers)
    else:
        assert len(set(numbers)) > 1, f"{numbers}: the number never changes"
