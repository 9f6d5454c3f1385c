"""Corpora that a run cannot train rightly, through Megatron's loop: one line, and a status that is not 0."""

import pytest
from megatron_runs import LENGTHS, flags, refusal_of, rewrite_corpus, write_corpus

pytestmark = pytest.mark.megatron


def test_a_token_id_outside_the_vocabulary_ends_the_run_on_tensor_parallel_ranks(tmp_path):
    """Each rank's embedding would take it for one of the other's rows, and the loss would look fine."""
    documents = write_corpus(tmp_path / "corpus", LENGTHS)
    documents[17][60] = 4999
    rewrite_corpus(tmp_path / "corpus", documents)
    run = f"--data-path {tmp_path}/corpus --global-batch-size 4 --train-iters 8 --split 1,0,0 --num-workers 1"
    # A rank other than 0 puts its number and host before the line.
    last = refusal_of(flags(run, tensor=2), 2).strip().splitlines()[-1]
    assert last.startswith("wlb_megatron: error: ")
    assert f"{tmp_path}/corpus: document 17 has token id 4999 at token 60" in last
