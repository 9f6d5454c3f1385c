"""No document sees another: one token changed leaves every other document's logits bitwise as they were."""

from typing import Any

import numpy as np
import pytest
import torch
from megatron_runs import LENGTHS, flags, rewrite_corpus, train, write_corpus

pytestmark = pytest.mark.megatron


def logits_by_document(ranks: list[dict[str, Any]]) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
    """{piece: {position: logits}} of all that was trained."""
    by_document: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for (_, _, pieces, rows), logits in zip(rank["documents"], rank["logits"], strict=True):
            at = 0
            for index, start, end in rows:
                for position in range(start, end):
                    by_document.setdefault(pieces[index], {})[position] = logits[at + position - start, 0]
                at += end - start
    return by_document


@pytest.mark.parametrize("sharding", ["per-document", "per-sequence"])
def test_one_changed_token_changes_its_own_document_alone(sharding, tmp_path):
    documents = write_corpus(tmp_path / "before", LENGTHS)

    def logits(corpus: str) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
        run = (
            f"--global-batch-size 2 --train-iters 1 --wlb-sharding {sharding} --data-path {tmp_path}/{corpus}"
        )
        ranks = train(flags(run, context=2), 2, tmp_path / f"{corpus} seen", WORKER_LOGITS="1")
        return logits_by_document(ranks)

    before = logits("before")
    together = [piece for piece in before if piece[1] >= 0]
    assert len(together) > 4
    changed = max(together, key=lambda piece: piece[3] - piece[2])
    place = (changed[3] - changed[2]) // 2
    document = documents[changed[1]] = documents[changed[1]].copy()
    document[changed[2] + place] = (document[changed[2] + place] + 1) % 127
    rewrite_corpus(tmp_path / "after", documents)
    after = logits("after")
    assert before.keys() == after.keys()
    for piece, by_position in before.items():
        same = [torch.equal(value, after[piece][at]) for at, value in sorted(by_position.items())]
        if piece == changed:
            assert all(same[:place]) and not any(same[place:])  # and causal within the document
        else:
            assert all(same), piece
    assert np.any([piece != changed for piece in together])
