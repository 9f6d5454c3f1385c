"""--sft through Megatron's loop: each layout computes what each conversation alone does, by Megatron's tokenizer."""

import json
import random
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
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
    output_of,
    read_ranks,
    refusal_of,
    train,
    whole_gradients,
    without_plugin,
)
from sft_data import build_tokenizer, conversation, megatron_tokenizer, write_jsonl
from test_megatron_layouts import trained
from test_sft_data import documents_of, made_of

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
def tokenizer(tmp_path_factory):
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def jsonl_of(turns: list[list[tuple[int, int]]], path: Path) -> Path:
    generator = random.Random(7)
    return write_jsonl(path, [conversation(generator, each) for each in turns])


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return jsonl_of(TURNS, tmp_path_factory.mktemp("jsonl") / "conversations.jsonl")


@pytest.fixture(scope="module")
def long_conversations(tmp_path_factory):
    return jsonl_of(TURNS[:6] + LONG, tmp_path_factory.mktemp("jsonl") / "long.jsonl")


def sft(tokenizer: Path, data: Path, prompt_format: str = "nemotron-nano-v2") -> str:
    return (
        f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer} --split 1,0,0 "
        f"--sft-tokenizer-prompt-format {prompt_format} --data-path {data} --make-vocab-size-divisible-by 128"
    )


RUN = "--global-batch-size 6 --train-iters 1 --wlb-token-weights step"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """oracle(job, data, documents): one step in which each of these lines is a micro-batch; one process, no plugin.

    It runs once for all layouts that train the same documents.
    """

    @cache
    def run(job: str, data: Path, documents: tuple[int, ...]) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("oracle")
        step = f"--global-batch-size {len(documents)} --train-iters 1"
        environment = {"ORACLE_JSONL": str(data), "ORACLE_DOCUMENTS": json.dumps(documents)}
        environment |= {**cpu_environment(), "WORKER_OUT": str(out)}
        arguments = [*without_plugin([flag for flag in flags(job) if flag != "--sft"]), *step.split()]
        worker = [str(ROOT / "tests" / "megatron_sft_oracle.py")]
        done = forked_ranks.run(worker, arguments, 1, environment, timeout=120)
        assert done.returncode == 0, failure(done)
        return read_ranks(out, 1)

    return run


def trained_documents(ranks: list[dict[str, Any]]) -> tuple[int, ...]:
    """Documents of the first iteration, each of which trains whole."""
    pieces = {piece for iteration, piece in trained(ranks) if iteration == 0}  # each model chunk draws them
    covered: dict[int, int] = {}
    for epoch, document, start, end in sorted(pieces):
        assert epoch == 0 and covered.get(document, 0) == start
        covered[document] = end
    return tuple(sorted(covered))


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
    layout, tokenizer, conversations, oracle, tmp_path
):
    processes, parallel, more = LAYOUTS[layout]
    job = sft(tokenizer, conversations)
    ranks = train(flags(job, RUN, more, **parallel), processes, tmp_path)
    documents = trained_documents(ranks)
    assert len(documents) > 4
    compare(ranks, oracle(f"{job} {MODEL_FLAGS.get(layout, '')}", conversations, documents))


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"pipeline": 2, "context": 2}])
def test_conversations_above_the_window_train_whole_in_chunks(
    parallel, tokenizer, long_conversations, oracle, tmp_path
):
    """By default. Some chunks hold no target; their backward runs."""
    job = sft(tokenizer, long_conversations)
    ranks = train(flags(job, RUN, **parallel), 2 * len(parallel), tmp_path)
    documents = trained_documents(ranks)
    assert {6, 7} & {*documents}
    assert any(count == 0 for rank in ranks for _, count in rank["losses"])
    compare(ranks, oracle(job, long_conversations, documents))


def test_nodes_without_a_shared_folder_tokenize_each_and_one_with_other_tokens_is_named(tokenizer, tmp_path):
    """Two ranks as two nodes, each with its own jsonl and --data-cache-path. Then a word differs: lengths do not."""
    arguments = flags(sft(tokenizer, Path("c.jsonl")), RUN, "--data-cache-path cache")
    for node in "01":
        (tmp_path / node).mkdir()
        jsonl_of(TURNS, tmp_path / node / "c.jsonl")
    train(arguments, 2, tmp_path / "same", WORKER_NODES=str(tmp_path))
    assert all(list((tmp_path / node).glob("cache/wlb_sft/*/c.mask")) for node in "01")
    other = tmp_path / "1" / "c.jsonl"
    other.write_text(other.read_text().replace("yes", "no", 1))
    done = launch(arguments, 2, out=tmp_path / "other", WORKER_NODES=str(tmp_path))
    assert done.returncode != 0
    ranks = r"1 as rank . \(.*\); 1 as rank . \(.*\)"
    assert re.search(f"ranks would plan differently: {ranks}: .*--sft: a node's own jsonl", failure(done))


def mask_of(data: Path, cache: Path) -> tuple[np.ndarray, list[int]]:
    """The mask that a run wrote, and the documents' lengths."""
    from wlb_megatron.documents.indexed import read_index

    (path,) = cache.glob(f"wlb_sft/*/{data.stem}.mask")
    return np.fromfile(path, dtype=np.uint8), [int(n) for n in read_index(path.with_suffix("")).lengths]


def test_equal_weights_divide_by_the_targets_that_windows_have_in_the_mean(
    tokenizer, conversations, oracle, tmp_path
):
    """On two ranks, with documents that wait: the gradient is the sum over targets by that number."""
    job, cached = sft(tokenizer, conversations), f"--data-cache-path {tmp_path}"
    arguments = flags(job, cached, RUN, "--wlb-token-weights equal --wlb-max-delay 8")
    ranks = train(arguments, 2, tmp_path / "ours")
    documents = trained_documents(ranks)
    mask, lengths = mask_of(conversations, tmp_path)
    window = 64 * 6 * mask.sum() / sum(lengths)
    expected = oracle(job, conversations, documents)
    targets = sum(count for _, count in expected[0]["losses"])
    assert len(documents) < len(TURNS)  # some wait
    theirs, ours = whole_gradients(expected), whole_gradients(ranks)
    for name, gradient in theirs.items():
        scaled = gradient * targets / window
        error = torch.linalg.norm(ours[name] - scaled) / torch.linalg.norm(scaled)
        assert error < 0.01, name  # 6 windows, rounded
        direction = torch.nn.functional.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0)
        assert direction > 1 - 1e-6, name


@pytest.mark.parametrize(
    ("parallel", "prompt_format"),
    [({"context": 2}, "nemotron-nano-v2"), ({"pipeline": 2}, "default")],
    ids=str,
)
def test_multi_token_prediction_trains_the_targets_alone(
    parallel, prompt_format, tokenizer, conversations, oracle, tmp_path
):
    """Several conversations in a micro-batch. In `default` each depth has fewer targets than the one before."""
    job = f"{sft(tokenizer, conversations, prompt_format)} --mtp-num-layers 2"
    ranks = train(flags(job, RUN, **parallel), 2, tmp_path)
    documents = trained_documents(ranks)
    assert len(documents) > 4
    compare(ranks, oracle(job, conversations, documents))


def test_further_predictions_count_on_a_rank_that_has_no_first_ones(tokenizer, oracle, tmp_path):
    """CP2 of 64 tokens, of which 49 to 63 are targets: rank 1 holds 16 to 47. Token 47 predicts only 49 and 50."""
    data = jsonl_of([[(35, 12)]], tmp_path / "one.jsonl")
    job = f"{sft(tokenizer, data)} --mtp-num-layers 2"
    arguments = flags(job, RUN, "--global-batch-size 1 --wlb-sharding per-sequence", context=2)
    ranks = train(arguments, 2, tmp_path)
    assert [rank["losses"][0][1] for rank in ranks] == [15, 0]
    compare(ranks, oracle(job, data, (0,)))


def test_evaluation_and_the_log_count_targets(tokenizer, conversations, oracle, tmp_path):
    """Two ranks evaluate a file of its own: the loss is the oracle's mean over all its targets."""
    held_out = jsonl_of(TURNS[3:9], tmp_path / "held.jsonl")
    log, out = tmp_path / "log.jsonl", tmp_path / "ours"
    job = sft(tokenizer, conversations).replace("--split 1,0,0", "")
    job = job.replace("--data-path", "--train-data-path")
    evaluated = f"--valid-data-path {held_out} --eval-iters 1 --eval-interval 1 --full-validation"
    said = output_of(flags(job, evaluated, RUN, f"--lr 0 --min-lr 0 --wlb-log {log}"), 2, out=out)
    held = [float(text) for text in re.findall(r"lm loss value: ([0-9.E+-]+)", said)]
    expected = oracle(sft(tokenizer, held_out), held_out, tuple(range(6)))
    total, count = (sum(column) for column in zip(*expected[0]["losses"], strict=True))
    assert held and held[0] == pytest.approx(total / count, rel=1e-5)
    (row,) = map(json.loads, log.read_text().splitlines())
    targets = sum(count for rank in read_ranks(out, 2) for _, count in rank["losses"])
    assert row["targets"] == targets < row["tokens"] / 1.3
    assert f"tokens: {row['tokens']} ({row['targets']} targets)" in said


def test_targets_are_those_of_megatrons_dataset_with_one_conversation_a_line(
    tokenizer, conversations, tmp_path
):
    """In the nemotron formats. Its lines are padded to the window; its label of token i is our token i + 1."""
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
    documents = documents_of(made_of(conversations, tokenizer, tmp_path))
    for line, (_, mask) in enumerate(documents):
        loss_mask = dataset[line]["loss_mask"]
        assert loss_mask[: len(mask) - 1].int().tolist() == mask[1:]
        assert not loss_mask[len(mask) - 1 :].any()
    assert len(documents) == len(TURNS)


def test_a_conversation_does_not_feel_the_others(tokenizer, tmp_path):
    """Over CP2 and PP2: another text in all others leaves the losses of the one micro-batch's first conversation."""
    kept, losses = TURNS[8], []
    for seed in (1, 2):
        generator = random.Random(9)
        first = conversation(generator, kept)
        generator = random.Random(seed)
        rows = [first, *(conversation(generator, turns) for turns in ([(5, 6)], [(3, 4)], [(2, 9)]))]
        data = write_jsonl(tmp_path / f"{seed}.jsonl", rows)
        run = "--global-batch-size 1 --train-iters 1 --seq-length 128 --wlb-sharding per-document"
        arguments = flags(sft(tokenizer, data), run, context=2)
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


def test_epochs_end_the_run_and_a_resumed_run_is_the_same_to_the_last_bit(tokenizer, conversations, tmp_path):
    """Two epochs, each conversation twice; stopped after two steps and started again."""
    cached = f"--data-cache-path {tmp_path} --ckpt-format torch"
    run = flags(sft(tokenizer, conversations), cached, "--global-batch-size 4 --wlb-train-epochs 2")
    said = output_of(run, 2, out=tmp_path / "whole")
    whole = read_ranks(tmp_path / "whole", 2)
    pieces = [piece for rank in whole for _, _, pieces, _ in rank["documents"] for piece in pieces]
    passed = sorted(piece[:2] for piece in pieces if piece[1] >= 0)
    assert passed == [(epoch, document) for epoch in (0, 1) for document in range(len(TURNS))]
    steps = len(logged_losses(said))
    assert f"take {steps} steps" in said
    run += f"--save {tmp_path}/saved --save-interval 2".split()
    train([*run, "--exit-interval", "2"], 2, tmp_path / "first")
    run += ["--load", str(tmp_path / "saved")]
    resumed = train(run, 2, tmp_path / "resumed")
    assert "digest of targets was" in refusal_of([*run, "--sft-tokenizer-prompt-format", "default"], 2)
    for rank, again in zip(whole, resumed, strict=True):
        count = len(again["losses"])
        assert 0 < count < len(rank["losses"]) and again["losses"] == rank["losses"][-count:]


def test_a_pretrained_checkpoint_and_a_users_own_mask_train(corpus, tokenizer, tmp_path):
    """--finetune from a run on documents; then .bin, .idx and a mask that trains every second token."""
    saved = f"--save {tmp_path}/saved --save-interval 1"
    small = f"--global-batch-size 2 --train-iters 1 --split 1,0,0 --data-path {corpus} --ckpt-format torch"
    output_of(flags(small, saved), 1)
    tokens = corpus.with_suffix(".bin").stat().st_size // 4
    corpus.with_suffix(".mask").write_bytes(bytes(at % 2 for at in range(tokens)))
    load = f"--finetune --load {tmp_path}/saved --no-load-optim --no-load-rng"
    output_of(flags(small, load, f"--sft --wlb-sft-mask-data --wlb-log {tmp_path}/log"), 1)
    (row,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert 0.3 * row["tokens"] < row["targets"] < 0.6 * row["tokens"]
