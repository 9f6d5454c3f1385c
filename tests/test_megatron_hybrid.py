"""A HybridModel of attention, MLP and experts trains as the GPTModel of the same layers, to the last bit."""

import json

import pytest
import torch
from megatron.training import checkpointing
from megatron_combinations import CHUNKS, MOE
from megatron_runs import LENGTHS, differences, flags, train, without_plugin, write_corpus

pytestmark = pytest.mark.megatron

TRAINED = "--global-batch-size 8 --train-iters 2 --eval-iters 1 --eval-interval 2 --split 98,1,1"
PP2 = "--pipeline-model-parallel-size 2"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--moe-z-loss-coeff 0.01 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
OF_GPT = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "CP2": ("*-*-", "--context-parallel-size 2", ""),
    "PP2, chunks": ("*-|*-", f"{PP2} {CHUNKS}", ""),
    "TP2+SP, EP2": ("*E*E", f"{SP} {MOE} {EP2}", ""),
    "VPP2, chunks": ("*-|*-|*-|*-", f"{PP2} {CHUNKS}", OF_GPT),
}
"""The pattern, flags of both models, and of the GPTModel alone."""


SPEC = "--spec scripts.local_hybrid stack --hybrid-layer-pattern"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hybrid_model_trains_as_a_gpt_model_does(tmp_path, layout):
    pattern, both, of_gpt = LAYOUTS[layout]
    write_corpus(tmp_path / "corpus", LENGTHS * 6)
    shared = f"--data-path {tmp_path}/corpus {TRAINED} {both}"
    pipelined = layout[:3] == "PP2"
    saves = f"--save {tmp_path}/saved --save-interval 1 --ckpt-format torch_dist" * pipelined
    gpt = train(flags(shared, of_gpt, saves), 2, tmp_path / "gpt")
    model = flags(shared, SPEC, pattern)
    hybrid = train(model, 2, tmp_path / "hybrid")
    for theirs, ours in zip(gpt, hybrid, strict=True):
        assert ours["documents"] == theirs["documents"]
        assert ours["losses"] == theirs["losses"] and ours["evaluated"] == theirs["evaluated"]
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, (gradient, _) in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][name][0], gradient), name
    if not pipelined or not hasattr(checkpointing, "_maybe_setup_gpt_to_hybrid_load"):
        return  # before 0.19 Megatron loads no other model's checkpoint
    resumed = train([*model, "--load", f"{tmp_path}/saved", "--ckpt-step", "1"], 2, tmp_path / "resumed")
    for theirs, ours in zip(gpt, resumed, strict=True):
        trained = [entry for entry in theirs["documents"] if entry[0] == 1]
        assert ours["documents"] == trained and trained
        assert ours["losses"] == theirs["losses"][len(theirs["losses"]) - len(ours["losses"]) :]
        assert ours["evaluated"] == theirs["evaluated"]
    assert resumed[-1]["losses"]


DELTA_NETS = """--hybrid-layer-pattern G-*-G --linear-num-key-heads 2 --linear-num-value-heads 4
--linear-key-head-dim 8 --linear-value-head-dim 8 --spec scripts.local_hybrid stack"""


def test_gated_delta_nets_over_packed_documents_are_those_of_each_document_alone(tmp_path):
    """The documents of a step, on two context-parallel ranks, and each alone in Megatron's own deterministic mode. Its
    layers run through the hooks with --wlb-off."""
    write_corpus(tmp_path / "corpus", LENGTHS)
    arguments = flags(DELTA_NETS, f"--data-path {tmp_path}/corpus --train-iters 1")
    packed = "--global-batch-size 4 --context-parallel-size 2 --split 1,0,0 --wlb-token-weights step"
    ranks = train([*arguments, *packed.split()], 2, tmp_path / "packed")
    trained = {piece for _, _, pieces, _ in ranks[0]["documents"] for piece in pieces if piece[1] >= 0}
    documents = sorted(document for _, document, _, end in trained if end > 1)
    assert any(len(rows) > 1 for _, _, _, rows in ranks[0]["documents"])
    one_step = [*arguments, "--global-batch-size", str(len(documents)), "--deterministic-mode"]
    stock = {"stock": True, "NCCL_ALGO": "Ring", "WORKER_ALONE": json.dumps(documents)}
    alone = train([*without_plugin(one_step), "--wlb-off"], 1, tmp_path / "alone", **stock)
    loss, gradient, parameter = differences(alone, ranks, 1)

    assert loss <= 5e-6 and gradient <= 1e-4, parameter
