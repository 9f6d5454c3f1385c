"""Through Megatron's own loop: each step recomputes the layers it cannot keep, and trains the same to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_combinations import EP, MOE, OVERLAPS
from megatron_runs import MACHINE, MODEL, TRAINING, train

pytestmark = pytest.mark.megatron

ITERATIONS = 3
PP2 = "--pipeline-model-parallel-size 2"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CHUNKS = "--wlb-chunks on --wlb-quadratic-at 80 --wlb-micro-batch-cost 2 --wlb-max-tokens 80"
WHOLE = "--wlb-chunks off --wlb-max-tokens 128"
ROWS = {
    # processes, layout, recomputation, documents, bytes of a rank for activations
    "one stage": (1, "", UNIFORM, WHOLE, "350000"),
    "PP2, chunks": (2, PP2, UNIFORM, CHUNKS, "300000"),
    "PP2, units of two layers": (2, PP2, UNIFORM.replace("layers 1", "layers 2"), WHOLE, "400000"),
    "PP2, blocks of one layer": (2, PP2, UNIFORM.replace("uniform", "block"), CHUNKS, "400000"),
    "PP2xCP2, memory of ranks differs": (
        4,
        f"{PP2} --context-parallel-size 2",
        UNIFORM,
        CHUNKS,
        "200000,180000",
    ),
    "TP2 with SP, memory of ranks differs": (
        *(2, "--tensor-model-parallel-size 2 --sequence-parallel", UNIFORM, WHOLE, "210000,200000"),
    ),
    "DP2xPP2, overlaps, replicas differ": (
        4,
        f"{PP2} {OVERLAPS}",
        UNIFORM,
        CHUNKS,
        "300000,250000,350000,250000",
    ),
    "EP2xPP2, memory of ranks differs": (
        *(4, f"{PP2} {EP} {MOE.replace('0.01', '0')}", UNIFORM, CHUNKS, "700000,600000,700000,650000"),
    ),
    "VPP2 on PP2": (*(2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", UNIFORM, WHOLE, "350000"),),
}


def run(corpus: Path, out: Path, processes: int, flags: str, **environment: str) -> list[dict[str, Any]]:
    base = [flag for part in (MODEL, MACHINE, TRAINING) for flag in part.split()]
    arguments = [*base, *flags.split(), "--num-layers", "4", "--data-path", str(corpus)]
    arguments += ["--global-batch-size", "8", "--train-iters", str(ITERATIONS), "--wlb-max-delay", "0"]
    arguments += ["--wlb-micro-batches-per-window", "2"]
    return train(arguments, processes, out, **environment)  # type: ignore[arg-type]


def check_equal(ranks: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for rank, other in zip(ranks, others, strict=True):
        assert rank["documents"] == other["documents"]
        assert rank["losses"] == other["losses"]
        for name, (gradient, _) in rank["gradients"].items():
            assert torch.equal(gradient, other["gradients"][name][0]), name


@pytest.mark.parametrize("name", ROWS)
def test_kept_layers_change_no_bit_of_losses_and_gradients(name: str, corpus: Path, tmp_path: Path) -> None:
    processes, layout, recompute, documents, available = ROWS[name]
    flags = f"{layout} {recompute} {documents} --wlb-gpu-memory 1"
    full = run(corpus, tmp_path / "full", processes, f"{flags} --wlb-recompute off")
    kept = run(corpus, tmp_path / "kept", processes, flags, WORKER_AVAILABLE=available)
    check_equal(full, kept)
    layers = 4 // max(1, 1 + max(rank["place"]["pp"] for rank in kept))
    for rank in kept:
        counts = [entry[0] for entry in rank["documents"]]
        for iteration, (numbers, layers_run) in enumerate(
            zip(rank["recomputed"], rank["layers_run"], strict=True)
        ):
            # Every micro-batch through every layer once, and once more through each layer that was to be recomputed.
            micro_batches = counts.count(iteration) // len(numbers[0])
            assert layers_run == micro_batches * layers + sum(map(sum, numbers))
    flat = [number for rank in kept for step in rank["recomputed"] for row in step for number in row]
    assert len(set(flat)) > 1, "the memory is such that some are kept, some are not"


def test_ranks_that_meet_keep_the_same_layers_whatever_memory_they_have(corpus: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    flags = f"{PP2} --context-parallel-size 2 {UNIFORM} {CHUNKS} --wlb-gpu-memory 1 --wlb-log {log}"
    ranks = run(corpus, tmp_path, 4, flags, WORKER_AVAILABLE="200000,250000,180000,250000")
    by_stage: dict[int, list[Any]] = {}
    for rank in ranks:
        by_stage.setdefault(rank["place"]["pp"], []).append(rank["recomputed"])
    assert all(first == second for first, second in by_stage.values())
    assert by_stage[0][0] != by_stage[1][0]  # stages plan by themselves
    for step, line in enumerate(log.read_text(encoding="utf-8").splitlines()):
        stages = [by_stage[stage][0][step] for stage in (0, 1)]
        numbers = [number for stage in stages for row in stage for number in row]
        logged = json.loads(line)
        assert logged["recomputed_share"] == sum(numbers) / (2 * len(numbers)), (
            "the share of both stages' layers"
        )
        assert logged["fullest_stage"] in (0, 1)


def test_multi_token_prediction_trains_the_same_though_blocks_keep_its_layer(
    corpus: Path, tmp_path: Path
) -> None:
    flags = f"{PP2} {UNIFORM} {WHOLE} --mtp-num-layers 1 --wlb-gpu-memory 1"
    full = run(corpus, tmp_path / "full", 2, f"{flags} --wlb-recompute off")
    kept = run(corpus, tmp_path / "kept", 2, flags, WORKER_AVAILABLE="340000")
    check_equal(full, kept)
    last = [number for step in kept[1]["recomputed"] for row in step for number in row]
    assert set(last) > {2}, "some micro-batches run the flags, some blocks"
