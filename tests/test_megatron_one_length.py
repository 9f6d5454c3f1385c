"""Micro-batches padded to windows of one length, for --tp-comm-overlap and CUDA graphs of the MLPs."""

import argparse

import pytest
import torch
from megatron_runs import flags, mean_losses, train, whole_gradients
from training_jobs import training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.refusals import MLP_GRAPHS, Refused, graphed, refuse_unsupported

ACCEPTED = {
    **{"micro_batch_size": 1, "position_embedding_type": "rope", "distributed_backend": "nccl"},
    **{"seq_length": 64, "max_position_embeddings": 128, "global_batch_size": 4},
}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [argparse.Namespace(name="mlp")]}
WINDOWS = WlbConfig(packing="original")


def megatron(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{**ACCEPTED, **changed})


@pytest.mark.parametrize("feature", [{"tp_comm_overlap": True}, GRAPHS], ids=["overlap", "graphs"])
def test_what_takes_one_length_goes_with_windows_alone(feature):
    args = megatron(**feature)
    refuse_unsupported(args, WINDOWS)
    shares = {"context_parallel_size": 2, "tensor_model_parallel_size": 2}
    assert training_job(**feature, **shares, seq_length=64).alignment == 64
    assert training_job(**feature, **shares, seq_length=64, micro_batch_size=2).alignment == 128
    assert training_job(**shares, seq_length=64).alignment == 4
    assert "not a multiple of 4" in str(training_job(**feature, **shares, seq_length=66).window_misfit())
    for changed, config in (
        ({}, WlbConfig()),
        ({}, WlbConfig(packing="original", cp_mode="dynamic")),
        ({"eval_micro_batch_size": 2}, WINDOWS),
    ):
        with pytest.raises(Refused, match="use --wlb-packing original"):
            refuse_unsupported(megatron(**feature, **changed), config)


def test_graphs_are_refused_where_another_shape_would_come_or_more_than_mlps_are_in_them():
    several_windows = {"micro_batch_size": 2, "eval_micro_batch_size": 2}
    experts = {"num_experts": 4, "moe_token_dispatcher_type": "alltoall"}
    for changed in (several_windows, experts, {"rampup_batch_size": [2, 2, 4]}):
        with pytest.raises(Refused, match="a graph takes one number of tokens"):
            refuse_unsupported(megatron(**GRAPHS, **changed), WINDOWS)
    for graphs in (
        {"cuda_graph_impl": "local"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]},
    ):
        assert graphed(megatron(**graphs)) not in (None, MLP_GRAPHS)
        with pytest.raises(Refused, match="leave graphs off"):
            refuse_unsupported(megatron(**graphs), WINDOWS)


@pytest.mark.megatron
def test_padding_to_one_length_changes_neither_losses_nor_gradients(corpus, tmp_path):
    run = f"--data-path {corpus} --global-batch-size 3 --train-iters 2 --split 80,20,0 --eval-iters 2 --eval-interval 2"
    # At most three documents: many windows are then not full.
    arguments = flags(run, "--wlb-packing original --wlb-max-documents 3", context=2)
    short = train(arguments, 2, tmp_path / "short")
    full = train(arguments, 2, tmp_path / "full", WORKER_ONE_LENGTH="1")
    assert {tokens.numel() for rank in full for tokens in rank["tokens"]} == {32}
    assert {rows for rank in full for rows in rank["rows"]} == {32}
    assert min(tokens.numel() for rank in short for tokens in rank["tokens"]) < 32
    assert min(rows for rank in short for rows in rank["rows"]) < 32
    assert mean_losses(full, 2) == pytest.approx(mean_losses(short, 2), rel=1e-6)
    expected, gradients = whole_gradients(short), whole_gradients(full)
    for name, gradient in expected.items():
        smallest = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=smallest)
