"""--sft through Megatron's loop: each layout computes what each conversation alone does, by Megatron's tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from megatron_combinations import MOE
from megatron_runs import (
    failure,
    flags,
    mean_losses,
    train,
    whole_gradients,
    without_plugin,
)
from sft_data import build_tokenizer, conversation, write_jsonl

from scripts.environment import ROOT, cpu_environment

pytest.importorskip("transformers")
pytestmark = pytest.mark.megatron

TURNS = [
    *([(4, 9)], [(20, 1)], [(3, 2), (5, 14)], [(11, 7)], [(1, 1)], [(9, 18)], [(2, 4), (2, 4), (1, 3)]),
    *([(30, 2)], [(6, 25)], [(12, 12)], [(3, 33)], [(8, 6), (7, 5)], [(25, 10)], [(1, 29)]),
]
"""Words of a user and of the assistant: conversations of 17 to 60 tokens; the window is 64."""
LONG = [[(60, 9)], [(5, 40), (20, 15)]]
"""Conversations longer than the window."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def jsonl_of(turns: list[list[tuple[int, int]]], path: Path) -> Path:
    generator = random.Random(7)
    return write_jsonl(path, [conversation(generator, each) for each in turns])


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl_of(TURNS, tmp_path_factory.mktemp("jsonl") / "conversations.jsonl")


@pytest.fixture(scope="module")
def long_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl_of(TURNS[:6] + LONG, tmp_path_factory.mktemp("jsonl") / "long.jsonl")


def sft(tokenizer: Path, data: Path, prompt_format: str = "nemotron-nano-v2") -> list[str]:
    return [
        *("--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer)),
        *("--sft-tokenizer-prompt-format", prompt_format, "--data-path", str(data), "--split", "1,0,0"),
        *("--make-vocab-size-divisible-by", "128"),
    ]


RUN = ["--global-batch-size", "6", "--train-iters", "1", "--wlb-token-weights", "step"]


def oracle(arguments: list[str], data: Path, documents: list[int], out: Path) -> list[dict[str, Any]]:
    """One step in which each of these lines is a micro-batch; one process, no plugin."""
    out.mkdir(parents=True)
    plain = without_plugin([each for each in arguments if each != "--sft"])
    environment = {
        "WORKER_OUT": str(out),
        "ORACLE_JSONL": str(data),
        "ORACLE_DOCUMENTS": json.dumps(documents),
    }
    done = forked_ranks.run(
        [str(ROOT / "tests" / "megatron_sft_oracle.py")],
        [*plain, "--global-batch-size", str(len(documents)), "--train-iters", "1"],
        1,
        {**cpu_environment(), **environment},
        timeout=120,
    )
    assert done.returncode == 0, failure(done)
    return [torch.load(out / "rank0.pt", weights_only=False)]


def trained_documents(ranks: list[dict[str, Any]]) -> list[int]:
    """Documents of the first iteration, each of which trains whole."""
    pieces = {
        piece
        for rank in ranks
        if not any(rank["place"][axis] for axis in ("tp", "cp", "pp"))
        for iteration, _, of_micro_batch, _ in rank["documents"]
        for piece in of_micro_batch
        if piece[1] >= 0 and iteration == 0
    }  # each model chunk of a stage draws them
    covered: dict[int, int] = {}
    for epoch, document, start, end in sorted(pieces):
        assert epoch == 0 and covered.get(document, 0) == start
        covered[document] = end
    return sorted(covered)


LAYOUTS = {
    "one process": (1, {}, ""),
    "CP2": (2, {"context": 2}, "--wlb-sharding hybrid"),
    "TP2 with SP": (2, {"tensor": 2}, "--sequence-parallel --make-vocab-size-divisible-by 64"),
    "DP2": (2, {}, ""),
    "PP2": (2, {"pipeline": 2}, ""),
    "PP2 x CP2": (4, {"pipeline": 2, "context": 2}, ""),
    "VPP2": (2, {"pipeline": 2}, "--num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "dynamic groups": (2, {}, "--wlb-cp-mode dynamic"),
    "EP2": (2, {}, f"{MOE.replace('0.01', '0')} --expert-model-parallel-size 2"),
}
MODEL_FLAGS = {"VPP2": "--num-layers 4", "EP2": MOE.replace("0.01", "0")}


def compare(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Sums of losses, numbers of targets and gradients."""
    (loss,) = mean_losses(ranks, 1)
    total, count = (sum(column) for column in zip(*expected[0]["losses"], strict=True))
    assert loss == pytest.approx(total / count, rel=5e-6)
    theirs, ours = whole_gradients(expected), whole_gradients(ranks)
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        error = torch.linalg.norm(ours[name] - gradient) / torch.linalg.norm(gradient)
        assert error <= 5e-6, f"{name}: {error:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_each_conversation_alone(
    layout: str, tokenizer: Path, conversations: Path, tmp_path: Path
) -> None:
    processes, parallel, more = LAYOUTS[layout]
    data = sft(tokenizer, conversations)
    ranks = train([*flags(**parallel), *data, *RUN, *more.split()], processes, tmp_path / "ours")
    documents = trained_documents(ranks)
    assert len(documents) > 4
    arguments = [*flags(), *data, *MODEL_FLAGS.get(layout, "").split()]
    compare(ranks, oracle(arguments, conversations, documents, tmp_path / "oracle"))


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"pipeline": 2, "context": 2}])
def test_conversations_above_the_window_train_whole_in_chunks(
    parallel: dict[str, int], tokenizer: Path, long_conversations: Path, tmp_path: Path
) -> None:
    """By default. Some chunks hold no target; their backward runs."""
    data = sft(tokenizer, long_conversations)
    ranks = train([*flags(**parallel), *data, *RUN], 2 * len(parallel), tmp_path / "ours")
    documents = trained_documents(ranks)
    assert {6, 7} & {*documents}
    compare(ranks, oracle([*flags(), *data], long_conversations, documents, tmp_path / "oracle"))
