"""Full validation through Megatron's loop: every document of every set once, however it is cut over ranks."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import LENGTHS, flags, output_of, read_ranks, write_corpus

pytestmark = pytest.mark.megatron

FROZEN = "--global-batch-size 4 --train-iters 1 --lr 0 --min-lr 0 --full-validation"
SETS = {"short": [30, 9, 64, 2, 5, 70, 12, 33, 21, 1], "few": [11, 1, 8, 64, 40]}
"""Documents (tokens) of two validation sets; one is longer than the window of 64, one has nothing to predict."""


def evaluated(out: Path, processes: int) -> list[list[tuple[list[Any], float, int]]]:
    """By rank, every micro-batch that was evaluated: its pieces, sum of losses, tokens that predict something."""
    return [rank["evaluated"] for rank in read_ranks(out, processes)]


def documents(micro_batches: Iterable[tuple[list[Any], float, int]]) -> list[tuple[int, int, int]]:
    """(document, start, end) of all real pieces, sorted."""
    return sorted(tuple(piece[1:]) for pieces, _, _ in micro_batches for piece in pieces if piece[1] >= 0)


def cut_at(window: int, ids: range, lengths: list[int]) -> list[tuple[int, int, int]]:
    """(document, start, end) of all pieces of documents with these ids and lengths."""
    documents = zip(ids, lengths, strict=True)
    return [
        (one, at, min(at + window, length)) for one, length in documents for at in range(0, length, window)
    ]


def printed(output: str, where: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{where} \| lm loss value: (\S+)", output)]


def mean(micro_batches: Iterable[tuple[list[Any], float, int]]) -> float:
    losses = list(micro_batches)
    return sum(loss for _, loss, _ in losses) / sum(count for _, _, count in losses)


def test_several_sets_are_each_evaluated_whole_over_two_data_parallel_ranks(corpus, tmp_path):
    """E9: all ranks evaluate as often, the last micro-batches padding alone; twice the same; a loss per token."""
    for seed, (name, lengths) in enumerate(SETS.items()):
        write_corpus(tmp_path / name, lengths, seed=seed)
    paths = f"--train-data-path {corpus} --valid-data-path {tmp_path}/short {tmp_path}/few"
    sets = "--multiple-validation-sets --validation-set-names short few --eval-interval 1"
    said = output_of(flags(FROZEN, paths, sets), 2, out=tmp_path / "out")
    ranks = evaluated(tmp_path / "out", 2)
    assert len(ranks[0]) == len(ranks[1])
    half = len(ranks[0]) // 2  # after iteration 1, and after training
    assert [of_rank[:half] for of_rank in ranks] == [of_rank[half:] for of_rank in ranks]
    for name, ids in (("short", range(10)), ("few", range(10, 15))):  # ids run on over the sets
        mine = [
            [one for one in rank[:half] if all(piece[1] in ids for piece in one[0] if piece[1] >= 0)]
            for rank in ranks
        ]
        assert documents([*mine[0], *mine[1]]) == cut_at(64, ids, SETS[name]), name
        losses = printed(said, f"validation-{name} loss at iteration 1")
        with_documents = [micro_batch for rank in mine for micro_batch in rank if documents([micro_batch])]
        assert losses == pytest.approx([mean(with_documents)], rel=1e-6), name
        assert sum(count for _, _, count in with_documents) == sum(SETS[name]) - len(SETS[name])


def test_all_validation_and_test_documents_without_training(corpus, tmp_path):
    """--skip-train; the test set has its own number of iterations, fewer than the validation set's."""
    skip = f"--skip-train --split 40,45,15 --data-path {corpus}"
    said = output_of(flags(FROZEN, skip), 1, out=tmp_path)
    (rank,) = evaluated(tmp_path, 1)
    ends = [round(len(LENGTHS) * share) for share in (0.4, 0.85, 1)]
    parts = [list(range(ends[0], ends[1])), list(range(ends[1], ends[2]))]
    assert [document for document, _, _ in documents(rank)] == sorted([*parts[0], *parts[1]])
    assert len(rank) % 4 == 0
    for ids, where in zip(parts, ("validation", "test"), strict=True):
        of_part = [micro_batch for micro_batch in rank if any(piece[1] in ids for piece in micro_batch[0])]
        assert printed(said, f"{where} set") == pytest.approx([mean(of_part)], rel=1e-6)


def test_a_checkpoint_is_evaluated_on_other_data_at_another_window_and_batch(corpus, tmp_path):
    """Without any training data; the packing state of the checkpoint is not asked."""
    checkpoint = f"--ckpt-format torch --load {tmp_path}/checkpoint"
    trained = f"--global-batch-size 2 --train-iters 2 --split 1,0,0 --data-path {corpus}"
    output_of(flags(checkpoint, trained, f"--save {tmp_path}/checkpoint --save-interval 2"), 1)
    write_corpus(tmp_path / "other", SETS["short"], seed=5)
    other = f"--valid-data-path {tmp_path}/other --seq-length 32 --no-load-optim --skip-train"
    said = output_of(flags(FROZEN, checkpoint, other), 2, out=tmp_path / "out")
    ranks = evaluated(tmp_path / "out", 2)
    assert documents([*ranks[0], *ranks[1]]) == cut_at(32, range(10), SETS["short"])
    seen = [micro_batch for rank in ranks for micro_batch in rank if documents([micro_batch])]
    assert printed(said, "validation set") == pytest.approx([mean(seen)], rel=1e-6)
    assert "10 documents, packing varlen" in said
