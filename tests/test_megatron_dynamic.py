"""Dynamic groups through Megatron's own loop: whoever computes what, the single process's losses and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_runs import failure, flags, launch, train, whole_gradients
from test_live_view import write_small_profile

pytestmark = pytest.mark.megatron

RUN = ["--num-layers", "4", "--global-batch-size", "12", "--train-iters", "2"]
OPTIMIZER = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train([*flags(), *RUN, "--data-path", str(corpus)], 1, tmp_path_factory.mktemp("single"))


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


@pytest.mark.parametrize(
    ("processes", "parallel", "seed", "more"),
    [
        (4, {"context": 2}, 5, OPTIMIZER),
        (6, {"context": 2}, 11, ["--wlb-regather-keys"]),
        (4, {"tensor": 2}, 3, ["--sequence-parallel"]),
        (4, {"pipeline": 2}, 2, []),
        (4, {"context": 2}, 5, ["--fp8-format", "hybrid"]),
        (4, {"pipeline": 2}, 2, ["--num-layers-per-virtual-pipeline-stage", "1", *OPTIMIZER]),
    ],
    ids=[
        "DP2xCP2-distributed-optimizer",
        "DP3xCP2",
        "DP2xTP2",
        "DP2xPP2",
        "DP2xCP2-FP8-delayed",
        "DP2xPP2xVPP2",
    ],
)
def test_random_mixes_of_groups_train_as_the_single_process_does(
    processes: int,
    parallel: dict[str, int],
    seed: int,
    more: list[str],
    corpus: Path,
    single: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    arguments = [*flags(**parallel), *RUN, *more, "--data-path", str(corpus), "--wlb-cp-mode", "dynamic"]
    ranks = train(arguments, processes, tmp_path, WORKER_RANDOM_GROUPS=str(seed))
    trained_alike(ranks, single)


def test_experts_over_ranks_of_several_groups_train_as_the_single_process_does(
    corpus: Path, tmp_path: Path
) -> None:
    """Their exchange joins ranks that compute in different groups, in each micro-step of all."""
    arguments = [*flags(), *RUN, *EXPERTS.split(), "--data-path", str(corpus)]
    more = ["--context-parallel-size=2", "--expert-model-parallel-size=2", "--wlb-cp-mode", "dynamic"]
    ranks = train([*arguments, *more], 4, tmp_path / "ranks", WORKER_RANDOM_GROUPS="5")
    trained_alike(ranks, train(arguments, 1, tmp_path / "single"))


def test_several_tokens_predicted_in_groups_train_as_the_single_process_does(
    corpus: Path, tmp_path: Path
) -> None:
    """A depth's losses have one factor an iteration, whoever shares a micro-batch."""
    arguments = [*flags(), *RUN, "--mtp-num-layers", "2", "--data-path", str(corpus)]
    more = ["--context-parallel-size=2", "--wlb-cp-mode", "dynamic"]
    ranks = train([*arguments, *more], 4, tmp_path / "ranks", WORKER_RANDOM_GROUPS="5")
    trained_alike(ranks, train(arguments, 1, tmp_path / "single"))


def trained_alike(ranks: list[dict[str, Any]], single: list[dict[str, Any]]) -> None:
    """Losses and gradients of the single process, by plans that were mixed."""
    expected, actual = losses(single), losses(ranks)
    assert expected.keys() == actual.keys()
    for iteration, (loss, count) in expected.items():
        assert actual[iteration] == (pytest.approx(loss, rel=1e-6), count), iteration
    gradients = whole_gradients(ranks)
    for name, gradient in whole_gradients(single).items():
        error = torch.linalg.norm(gradients[name] - gradient) / torch.linalg.norm(gradient)
        assert error <= 1e-5, f"{name}: {error:.2e}"
    # The plans were mixed: ranks idle in some micro-steps, all run equally many, documents shared by some only.
    assert all(micro_steps(rank) == micro_steps(ranks[0]) for rank in ranks)
    idle = [all(piece[1] < 0 for piece in entry[2]) for rank in ranks for entry in rank["documents"]]
    assert any(idle) and not all(idle)
    assert len({len(entry[2]) for rank in ranks for entry in rank["documents"]}) > 1


def test_a_run_by_its_own_planner_says_whose_plans_it_trains_and_what_they_are_predicted_to_take(
    corpus: Path, tmp_path: Path
) -> None:
    log, profile = tmp_path / "log.jsonl", tmp_path / "profile.json"
    write_small_profile(profile)
    more = ["--data-path", str(corpus), "--global-batch-size", "8", "--train-iters", "12", "--split", "1,0,0"]
    more += ["--wlb-cp-mode", "dynamic", "--wlb-log", str(log), "--wlb-profile", str(profile)]
    done = launch([*flags(), *more], 2)
    assert done.returncode == 0, failure(done)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert all(row["predicted_ms"] > 0 and row["arrival_ms"] > 0 and row["plan_wait_ms"] >= 0 for row in rows)
    assert {row["plan_of"] for row in rows} <= {"greedy", "solver", "fixed", "late"}
    assert any(row["plan_of"] != "late" for row in rows)
