"""Dynamic groups through Megatron's own loop: whoever computes what, the single process's losses and gradients."""

import json
from typing import Any

import pytest
import torch
from megatron_combinations import EP, OVERLAPS
from megatron_runs import flags, output_of, train, whole_gradients
from test_live_view import write_small_profile

pytestmark = pytest.mark.megatron

RUN = "--num-layers 4 --global-batch-size 12 --train-iters 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
ROWS = {
    "DP2xCP2, distributed optimizer": (4, {"context": 2}, 5, OVERLAPS, ""),
    "DP3xCP2, keys sent again": (6, {"context": 2}, 11, "--wlb-regather-keys", ""),
    "DP2xTP2": (4, {"tensor": 2}, 3, "--sequence-parallel", ""),
    "DP2xPP2": (4, {"pipeline": 2}, 2, "", ""),
    "DP2xCP2, FP8 delayed": (4, {"context": 2}, 5, "--fp8-format hybrid", ""),
    "DP2xPP2xVPP2": (4, {"pipeline": 2}, 2, f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAPS}", ""),
    # Experts' exchange joins ranks that compute in different groups, in each micro-step of all.
    "EP2 in CP2": (4, {"context": 2}, 5, EP, EXPERTS),
    # A depth's losses have one factor an iteration, whoever shares a micro-batch.
    "MTP of 2, DP2xCP2": (4, {"context": 2}, 5, "", "--mtp-num-layers 2"),
}
"""Processes, layout, the seed of the random groups, flags, and those of the single process, too."""


def losses(ranks: list[dict[str, Any]]) -> dict[int, tuple[float, int]]:
    """Of each iteration, the loss per predicted token over the last stage's ranks, and how many tokens predicted."""
    sums: dict[int, list[float]] = {}
    for rank in ranks:
        if rank["place"]["pp"] < max(other["place"]["pp"] for other in ranks) or rank["place"]["tp"]:
            continue
        for (loss, count), (iteration, _) in zip(rank["losses"], micro_steps(rank), strict=True):
            both = sums.setdefault(iteration, [0.0, 0])
            both[0] += loss
            both[1] += count
    return {iteration: (loss / count, int(count)) for iteration, (loss, count) in sums.items()}


def micro_steps(rank: dict[str, Any]) -> list[tuple[int, int]]:
    """(iteration, index) of each of a rank's micro-batches, once however many chunks of the model it passes."""
    return sorted({(iteration, index) for iteration, index, *_ in rank["documents"]})


@pytest.mark.parametrize("name", ROWS)
def test_random_mixes_of_groups_train_as_the_single_process_does(name, corpus, single, tmp_path):
    processes, parallel, seed, more, model = ROWS[name]
    dynamic = f"--data-path {corpus} --wlb-cp-mode dynamic"
    arguments = flags(RUN, more, model, dynamic, **parallel)
    ranks = train(arguments, processes, tmp_path, WORKER_RANDOM_GROUPS=str(seed))
    expected, actual = losses(single(RUN, model)), losses(ranks)
    assert expected.keys() == actual.keys()
    for iteration, (loss, count) in expected.items():
        assert actual[iteration] == (pytest.approx(loss, rel=1e-6), count), iteration
    gradients = whole_gradients(ranks)
    for name, gradient in whole_gradients(single(RUN, model)).items():
        error = torch.linalg.norm(gradients[name] - gradient) / torch.linalg.norm(gradient)
        assert error <= 1e-5, f"{name}: {error:.2e}"
    # The plans were mixed: ranks idle in some micro-steps, all run equally many, documents shared by some only.
    assert all(micro_steps(rank) == micro_steps(ranks[0]) for rank in ranks)
    idle = [all(piece[1] < 0 for piece in entry[2]) for rank in ranks for entry in rank["documents"]]
    assert any(idle) and not all(idle)
    assert len({len(entry[2]) for rank in ranks for entry in rank["documents"]}) > 1


def test_a_run_by_its_own_planner_says_whose_plans_it_trains_and_what_they_are_predicted_to_take(
    corpus, tmp_path
):
    log, profile = tmp_path / "log.jsonl", tmp_path / "profile.json"
    write_small_profile(profile)
    run = f"--data-path {corpus} --global-batch-size 8 --train-iters 12 --split 1,0,0"
    output_of(flags(run, f"--wlb-cp-mode dynamic --wlb-log {log} --wlb-profile {profile}"), 2)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert all(row["predicted_ms"] > 0 and row["arrival_ms"] > 0 and row["plan_wait_ms"] >= 0 for row in rows)
    assert {row["plan_of"] for row in rows} <= {"greedy", "fixed", "late"}
    assert any(row["plan_of"] != "late" for row in rows)
