"""--sft through Megatron's loop: each layout computes what each conversation alone does, by Megatron's tokenizer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import forked_ranks
import numpy as np
import pytest
import torch
from megatron_combinations import MOE
from megatron_runs import (
    failure,
    flags,
    launch,
    logged_losses,
    mean_losses,
    train,
    whole_gradients,
    without_plugin,
)
from sft_data import build_tokenizer, conversation, megatron_tokenizer, write_jsonl

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
    "CP2": (2, {"context": 2}, "--wlb-sharding adaptive"),
    "TP2 with SP": (2, {"tensor": 2}, "--sequence-parallel --make-vocab-size-divisible-by 64"),
    "DP2, delayed": (2, {}, "--wlb-max-delay 8"),
    "PP2": (2, {"pipeline": 2}, ""),
    "CP2, processes that plan and read": (2, {"context": 2}, "--wlb-plan-process always --num-workers 1"),
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
    assert any(count == 0 for rank in ranks for _, count in rank["losses"])
    compare(ranks, oracle([*flags(), *data], long_conversations, documents, tmp_path / "oracle"))


def test_nodes_without_a_shared_folder_tokenize_each_and_one_with_other_tokens_is_named(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Two ranks as two nodes, each with its own jsonl and --data-cache-path. Then a word differs: lengths do not."""
    data = sft(tokenizer, Path("c.jsonl"))
    arguments = [*flags(), *data, *RUN, "--data-cache-path", "cache"]
    for node in "01":
        (tmp_path / node).mkdir()
        jsonl_of(TURNS, tmp_path / node / "c.jsonl")
    train(arguments, 2, tmp_path / "same", WORKER_NODES=str(tmp_path))
    assert all(list((tmp_path / node).glob("cache/wlb_sft/*/c.mask")) for node in "01")
    other = tmp_path / "1" / "c.jsonl"
    other.write_text(other.read_text().replace("yes", "no", 1))
    done = launch(arguments, 2, out=tmp_path / "other", WORKER_NODES=str(tmp_path))
    assert done.returncode != 0
    assert re.search(
        r"ranks would plan differently: 1 as rank . \(.*\); 1 as rank . \(.*\): .*--sft: a node's own jsonl",
        failure(done),
    )


def mask_of(data: Path, cache: Path) -> tuple[np.ndarray, list[int]]:
    """The mask that a run wrote, and the documents' lengths."""
    from wlb_megatron.documents.indexed import read_index

    (path,) = cache.glob(f"wlb_sft/*/{data.stem}.mask")
    return np.fromfile(path, dtype=np.uint8), [int(n) for n in read_index(path.with_suffix("")).lengths]


def test_equal_weights_divide_by_the_targets_that_windows_have_in_the_mean(
    tokenizer: Path, conversations: Path, tmp_path: Path
) -> None:
    """On two ranks, with documents that wait: the gradient is the sum over targets by that number."""
    data = [*sft(tokenizer, conversations), "--data-cache-path", str(tmp_path)]
    run = [*RUN[:-1], "equal", "--wlb-max-delay", "8"]
    ranks = train([*flags(), *data, *run], 2, tmp_path / "ours")
    documents = trained_documents(ranks)
    mask, lengths = mask_of(conversations, tmp_path)
    window = 64 * 6 * mask.sum() / sum(lengths)
    expected = oracle(
        [*flags(), *sft(tokenizer, conversations)], conversations, documents, tmp_path / "oracle"
    )
    targets = sum(count for _, count in expected[0]["losses"])
    assert len(documents) < len(TURNS)  # some wait
    theirs, ours = whole_gradients(expected), whole_gradients(ranks)
    for name, gradient in theirs.items():
        scaled = gradient * targets / window
        assert torch.linalg.norm(ours[name] - scaled) / torch.linalg.norm(scaled) < 0.01, (
            name
        )  # 6 windows, rounded
        direction = torch.nn.functional.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0)
        assert direction > 1 - 1e-6, name


@pytest.mark.parametrize(
    ("parallel", "prompt_format"),
    [({"context": 2}, "nemotron-nano-v2"), ({"pipeline": 2}, "default")],
    ids=str,
)
def test_multi_token_prediction_trains_the_targets_alone(
    parallel: dict[str, int], prompt_format: str, tokenizer: Path, conversations: Path, tmp_path: Path
) -> None:
    """Several conversations in a micro-batch. In `default` each depth has fewer targets than the one before."""
    data, depths = sft(tokenizer, conversations, prompt_format), ["--mtp-num-layers", "2"]
    ranks = train([*flags(**parallel), *data, *RUN, *depths], 2, tmp_path / "ours")
    documents = trained_documents(ranks)
    assert len(documents) > 4
    compare(ranks, oracle([*flags(), *data, *depths], conversations, documents, tmp_path / "oracle"))


def test_further_predictions_count_on_a_rank_that_has_no_first_ones(tokenizer: Path, tmp_path: Path) -> None:
    """CP2 of 64 tokens, of which 49 to 63 are targets: rank 1 holds 16 to 47. Token 47 predicts only 49 and 50."""
    data = sft(tokenizer, jsonl_of([[(35, 12)]], tmp_path / "one.jsonl"))
    more = [*RUN, "--global-batch-size", "1", "--wlb-sharding", "per-sequence", "--mtp-num-layers", "2"]
    ranks = train([*flags(context=2), *data, *more], 2, tmp_path / "ours")
    assert [rank["losses"][0][1] for rank in ranks] == [15, 0]
    arguments = [*flags(), *data, "--mtp-num-layers", "2"]
    compare(ranks, oracle(arguments, tmp_path / "one.jsonl", [0], tmp_path / "oracle"))


def test_evaluation_and_the_log_count_targets(tokenizer: Path, conversations: Path, tmp_path: Path) -> None:
    """Two ranks evaluate a file of its own: the loss is the oracle's mean over all its targets."""
    held_out = jsonl_of(TURNS[3:9], tmp_path / "held.jsonl")
    log = tmp_path / "log.jsonl"
    data = sft(tokenizer, conversations)
    at = data.index("--data-path")
    data[at] = "--train-data-path"
    del data[data.index("--split") : data.index("--split") + 2]
    data += [
        "--valid-data-path",
        str(held_out),
        "--eval-iters",
        "1",
        "--full-validation",
        "--lr",
        "0",
        "--min-lr",
        "0",
    ]
    arguments = [*flags(), *data, *RUN, "--eval-interval", "1", "--wlb-log", str(log)]
    out = tmp_path / "ours"
    done = launch(arguments, 2, out=out)
    assert done.returncode == 0, failure(done)
    held = [float(text) for text in re.findall(r"lm loss value: ([0-9.E+-]+)", done.stdout)]
    expected = oracle([*flags(), *sft(tokenizer, held_out)], held_out, list(range(6)), tmp_path / "oracle")
    total, count = (sum(column) for column in zip(*expected[0]["losses"], strict=True))
    assert held and held[0] == pytest.approx(total / count, rel=1e-5)
    (row,) = map(json.loads, log.read_text().splitlines())
    ranks = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert row["targets"] == sum(count for rank in ranks for _, count in rank["losses"]) < row["tokens"] / 1.3
    assert f"tokens: {row['tokens']} ({row['targets']} targets)" in done.stdout


def test_targets_are_those_of_megatrons_dataset_with_one_conversation_a_line(
    tokenizer: Path, conversations: Path, tmp_path: Path
) -> None:
    """In the nemotron formats. Its lines are padded to the window; its label of token i is our token i + 1."""
    from types import SimpleNamespace

    from megatron.training.datasets.sft_dataset import SFTDataset

    theirs = megatron_tokenizer(tokenizer, "nemotron-nano-v2")
    config = SimpleNamespace(
        tokenizer=SimpleNamespace(
            eod=theirs.eod, pad=theirs.pad_id, tokenize_conversation=theirs.tokenize_conversation
        ),
        **{"sequence_length": 128, "context_parallel_size": 1, "reset_position_ids": False},
        **{"create_attention_mask": False, "reset_attention_mask": False},
        **{"dynamic_context_parallel": False, "sequence_parallel_size": 1},  # dev
    )
    dataset = SFTDataset.__new__(SFTDataset)
    lines = conversations.read_text().splitlines()
    dataset.dataset, dataset.indices = [json.loads(line)["messages"] for line in lines], np.arange(len(TURNS))
    dataset.config, dataset.num_samples = config, len(TURNS)
    train(
        [*flags(), *sft(tokenizer, conversations), *RUN, "--data-cache-path", str(tmp_path)],
        1,
        tmp_path / "o",
    )
    mask, lengths = mask_of(conversations, tmp_path)
    begin = 0
    for line, length in enumerate(lengths):
        item = dataset[line]
        trained = item["loss_mask"][: length - 1].numpy().astype(int).tolist()
        assert trained == mask[begin + 1 : begin + length].tolist()
        assert not item["loss_mask"][length - 1 :].any()
        begin += length


def test_a_conversation_does_not_feel_the_others(tokenizer: Path, tmp_path: Path) -> None:
    """Over CP2 and PP2: another text in all others leaves the losses of the one micro-batch's first conversation."""
    kept, losses = TURNS[8], []
    for seed in (1, 2):
        generator = random.Random(9)
        first = conversation(generator, kept)
        generator = random.Random(seed)
        rows = [first, *(conversation(generator, turns) for turns in ([(5, 6)], [(3, 4)], [(2, 9)]))]
        data = write_jsonl(tmp_path / f"{seed}.jsonl", rows)
        arguments = [
            *flags(context=2),
            *sft(tokenizer, data),
            "--global-batch-size",
            "1",
            "--train-iters",
            "1",
        ]
        arguments += ["--seq-length", "128", "--wlb-sharding", "per-document"]
        ranks = train(arguments, 2, tmp_path / f"out{seed}", WORKER_LOGITS="1")
        (_, _, pieces, _) = ranks[0]["documents"][0]
        assert len(pieces) >= 3
        number = [piece[1] for piece in pieces].index(0)
        held = []
        for rank in ranks:
            at = 0
            for index, start, end in rank["documents"][0][3]:
                if index == number:
                    held.append((start, rank["logits"][0][at : at + end - start]))
                at += end - start
        losses.append(torch.cat([logits for _, logits in sorted(held, key=lambda pair: pair[0])]))
    assert losses[0].shape == losses[1].shape and len(losses[0]) > 20
    assert torch.allclose(losses[0], losses[1], atol=2e-6)


def test_epochs_end_the_run_and_a_resumed_run_is_the_same_to_the_last_bit(
    tokenizer: Path, conversations: Path, tmp_path: Path
) -> None:
    """Two epochs, each conversation twice; stopped after two steps and started again."""
    data = [*sft(tokenizer, conversations), "--data-cache-path", str(tmp_path)]
    run = [*flags(), *data, "--global-batch-size", "4", "--wlb-train-epochs", "2", "--ckpt-format", "torch"]

    def seen(name: str, *more: str) -> tuple[list[dict[str, Any]], str]:
        done = launch([*run, *more], 2, out=tmp_path / name)
        assert done.returncode == 0, failure(done)
        ranks = [torch.load(tmp_path / name / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
        return ranks, done.stdout

    whole, said = seen("whole")
    trained = sorted(
        piece for rank in whole for _, _, pieces, _ in rank["documents"] for piece in pieces if piece[1] >= 0
    )
    assert [(epoch, document) for epoch, document, _, _ in trained] == [
        (epoch, document) for epoch in (0, 1) for document in range(len(TURNS))
    ]
    steps = len(logged_losses(said))
    assert f"take {steps} steps" in said
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    seen("first", *save, "--exit-interval", "2")
    resumed, _ = seen("resumed", *save, "--load", str(tmp_path / "saved"))
    other = launch(
        [*run, *save, "--load", str(tmp_path / "saved"), "--sft-tokenizer-prompt-format", "default"], 2
    )
    assert other.returncode != 0 and "digest of targets was" in other.stderr
    for rank, again in zip(whole, resumed, strict=True):
        count = len(again["losses"])
        assert 0 < count < len(rank["losses"]) and again["losses"] == rank["losses"][-count:]


def test_a_pretrained_checkpoint_and_a_users_own_mask_train(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """--finetune from a run on documents; then .bin, .idx and a mask that trains every second token."""
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "1", "--ckpt-format", "torch"]
    small = ["--global-batch-size", "2", "--train-iters", "1", "--split", "1,0,0"]
    done = launch([*flags(), *small, "--data-path", str(corpus), *saved], 1)
    assert done.returncode == 0, failure(done)
    tokens = corpus.with_suffix(".bin").stat().st_size // 4
    corpus.with_suffix(".mask").write_bytes(bytes(at % 2 for at in range(tokens)))
    load = [
        "--finetune",
        "--load",
        str(tmp_path / "saved"),
        "--no-load-optim",
        "--no-load-rng",
        "--ckpt-format",
        "torch",
    ]
    tuned = ["--sft", "--wlb-sft-mask-data", "--data-path", str(corpus), "--wlb-log", str(tmp_path / "log")]
    done = launch([*flags(), *small, *load, *tuned], 1)
    assert done.returncode == 0, failure(done)
    (row,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert 0.3 * row["tokens"] < row["targets"] < 0.6 * row["tokens"]
