"""A TrainingJob holds what Megatron's flags say, with each part's own words for it."""

import argparse
from dataclasses import FrozenInstanceError, asdict
from functools import reduce
from typing import Any

import pytest
import torch
from test_profile_fit import GPU, made_samples
from training_jobs import VALIDATED, training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags.limits import fullest_stage
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.workload.fit import fit
from wlb_megatron.workload.model import ONE_KERNEL, DeltaNets, Experts
from wlb_megatron.workload.profile import FORMAT, ProfiledModel, write_profile

MOE = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_router_topk": 2}
MLA = {
    **{"multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 512},
    **{"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 96},
}
NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
}
QWEN = {
    **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, "num_layers": 4},
    **NETS,
}
PP2, CPU = {"pipeline_model_parallel_size": 2}, {"distributed_backend": "gloo"}
BLOCKS, SEQ = {"recompute_method": "block"}, "seq_aux_loss"
ARRIVES: list[tuple[dict[str, Any], str, Any]] = [
    ({"num_layers": 6}, "model.shape.layers", 6),
    ({"group_query_attention": False}, "model.shape.kv_heads", 16),
    ({"kv_channels": None, "hidden_size": 4096}, "model.shape.head_dim", 256),
    ({"swiglu": False}, "model.shape.gated", False),
    ({"qk_layernorm": True}, "model.shape.qk_norm", True),
    ({"untie_embeddings_and_output_weights": False}, "model.shape.tied", True),
    ({"hidden_dropout": 0.1}, "model.shape.dropout", True),
    ({"padded_vocab_size": 512}, "model.vocabulary", 512),
    ({"max_position_embeddings": 131072}, "model.positions", 131072),
    ({"mtp_num_layers": 2}, "model.depths", 2),
    ({"window_size": (1024, 0), "window_attn_skip_freq": 2}, "model.window", 1024),
    ({"window_size": (1024, 0), "window_attn_skip_freq": 2}, "model.whole_layers", 0.5),
    ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "model.rows", 32),
    ({"params_dtype": torch.float16}, "model.dtype", "float16"),
    ({"transformer_impl": "local"}, "model.implementation", "local"),
    (MOE, "model.active_ffn", 2048),
    ({**MOE, "moe_ffn_hidden_size": None}, "model.active_ffn", 2 * 5632),
    (MOE | {"moe_router_load_balancing_type": [SEQ]}, "trainer.balancing", (SEQ,)),
    (MOE, "model.shape.experts", Experts(8, 1024)),
    (MOE | {"moe_layer_freq": 2}, "model.shape.experts.dense_layers", 4),
    (MOE | {"moe_layer_freq": [0] + [1] * 7}, "model.shape.experts.dense_layers", 1),
    (MLA, "model.shape.kv_heads", 16),
    (MLA, "model.shape.head_dim", 192),
    (MLA, "model.value_dim", 96),
    (PP2 | {"virtual_pipeline_model_parallel_size": 3}, "sizes.micro_step_multiple", 2),
    (PP2, "sizes.micro_step_multiple", 1),
    ({"seq_length": 8192, "micro_batch_size": 2}, "batches.joined_window", 16384),
    ({"eval_global_batch_size": 8}, "batches.evaluated", 8),
    ({"eval_iters": 3}, "evaluation.iterations", 3),
    ({"multiple_validation_sets": True}, "evaluation.each_set", True),
    ({"validation_set_names": ["a", "b"]}, "evaluation.names", ("a", "b")),
    (CPU, "device.on_gpu", False),
    ({"num_layers": 6}, "model.stage_layers", 6),
    (BLOCKS | {"recompute_num_layers": 3}, "recompute_blocks", 3),
    ({"hybrid_layer_pattern": "*-*-|*E--/*-"}, "model.shape.layers", 3),
    ({"hybrid_layer_pattern": "*-*---*-"}, "model.ffn", 5632 * 5 // 3),
    ({"hybrid_layer_pattern": "**-*|-*--", "pipeline_model_parallel_size": 2}, "model.stage_layers", "**-*"),
    (
        {"hybrid_layer_pattern": "G-G-|*-*-", **NETS},
        "model.shape.delta_nets",
        DeltaNets(layers=2, key_heads=2, value_heads=4, key_dim=8, value_dim=16),
    ),
    (PP2 | {"hybrid_layer_pattern": "GG|**-*", **NETS}, "model.stage_layers", "**-*"),
    (QWEN, "model.shape.layers", 1),
    (QWEN, "model.ffn", 5632 * 4),
    ({**QWEN, "linear_attention_freq": [1, 0, 0, 1]}, "model.shape.layers", 2),
    ({**QWEN, "pipeline_model_parallel_size": 2}, "model.stage_patterns", (("NN",), ("NN",))),
    ({"hybrid_layer_pattern": "*-|-|E|*E/*-"}, "model.stage_patterns", (("*-", "-", "E", "*E"),)),
    ({"hybrid_layer_pattern": "*-|-|E|*E/*-/*-"}, "model.depth_layers", "*-*-"),
    (BLOCKS | {"hybrid_layer_pattern": "*-*-*-*-", "recompute_num_layers": 4}, "recompute_blocks", 2),
    ({"local_rank": 3, "rank": 11}, "device.index", 3),
    ({"local_rank": 3, "rank": 11}, "device.rank", 11),
    ({"skip_train": True}, "trains", False),
    ({"seed": 7}, "seed", 7),
    ({"num_workers": 5}, "workers", 5),
    ({"exit_signal_handler": True}, "ignored_signal", 15),
    ({"recompute_granularity": "full"}, "sizes.recompute", "full"),
    ({"distributed_timeout_minutes": 3}, "timeout", 3),
    ({"wlb_chunks": "off"}, "given.chunks", "off"),
    ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, "alignment", 4),
]
"""Flags, a field that they set, and its value then."""


@pytest.mark.parametrize(("flags", "field", "value"), ARRIVES)
def test_a_flag_arrives_in_its_field(flags, field, value):
    def value_of(job: TrainingJob) -> Any:
        return reduce(lambda of, name: getattr(of, name, None), field.split("."), job)

    assert value_of(training_job(**flags)) == value
    if flags is not MLA and field != "sizes.micro_step_multiple":
        assert value_of(training_job()) != value, "the flag is what sets it"


def test_latent_attention_has_the_weights_of_its_compressions():
    """2048 wide, 16 heads: queries 2048 x 16 x 192, keys and values 2048 x (512 + 64) down and 512 x 16 x (128 + 96)
    up, output 16 x 96 x 2048; a gated MLP of 5632."""
    weights = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 224 + 16 * 96 * 2048 + 3 * 2048 * 5632
    assert training_job(**MLA).model.layer_parameters == weights
    shape = fullest_stage(training_job(**MLA))
    assert (shape.projections, shape.compressed) == (weights - 3 * 2048 * 5632, 512 + 64)


@pytest.mark.parametrize(("values", "counted"), [(128, 160), (96, 192)])
def test_memory_counts_the_mean_of_keys_and_values_where_kernels_take_narrower_ones(values, counted):
    """Keys of 192 channels. Values of 96 are padded."""
    job = training_job(**MLA | {"v_head_dim": values})
    assert fullest_stage(job).head_dim == counted


def test_the_square_of_a_length_is_the_work_of_the_layers_with_attention_alone():
    """NNNT: three nets of 2048 x (2 x 16 + 3 x 64 + 2 x 4) and 4 x (2 x 16 + 64) weights, whose states of 4 x 8 x 16
    are counted four times, and four MLPs, beside one layer of attention as without them."""
    whole, mixed = (training_job(**flags).model.layer_parameters for flags in ({}, QWEN))
    net = 2048 * (2 * 16 + 3 * 64 + 2 * 4) + 4 * (2 * 16 + 64) + 4 * 4 * 8 * 16
    assert mixed - whole == 3 * (net + 3 * 2048 * 5632)


def test_the_vocabulary_is_known_once_the_tokenizer_is_built():
    job = training_job(vocab_size=None)
    assert job.model.vocabulary is None and job.with_vocabulary(640).model.vocabulary == 640
    with pytest.raises(FrozenInstanceError):
        job.seed = 1


def test_whole_evaluation_is_told_apart_from_what_megatron_is_told():
    """Megatron is then given another --full-validation than the user gave (take_over.py)."""
    args = argparse.Namespace(**VALIDATED)
    assert not TrainingJob.of(args, WlbConfig()).evaluation.full
    args.full_validation = True
    evaluation = TrainingJob.of(args, WlbConfig()).evaluation
    assert evaluation.full and evaluation.iterations


def test_one_kernel_multiplies_all_experts_where_the_environment_says_so(monkeypatch):
    def one_kernel(**flags: Any) -> bool:
        experts = training_job(**MOE | flags).model.shape.experts
        assert experts is not None
        return experts.one_kernel

    assert not one_kernel(moe_grouped_gemm=True)
    monkeypatch.setenv(ONE_KERNEL, "1")
    assert one_kernel(moe_grouped_gemm=True)
    assert not one_kernel() and not one_kernel(moe_grouped_gemm=True, fp8="hybrid", fp8_recipe="delayed")


def test_a_profile_must_be_of_the_jobs_experts(tmp_path):
    model = training_job(**MOE).model.shape
    experts = {"count": 8, "ffn": 1024, "parallel": 1, "tensor": 1, "chosen": 2}
    sizes = {"hidden": model.hidden, "ffn": 2048, "heads": model.heads, "kv_heads": model.kv_heads}
    sizes |= {"head_dim": model.head_dim, "gated": model.gated, "vocab": 100, "tp": 1, "cp": 1}
    sizes["fused"] = False
    costs = asdict(fit(ProfiledModel(**sizes), made_samples(), GPU))
    settings = {"model": {**sizes, "experts": experts}, "gpu": "a GPU", "versions": {}}
    path = tmp_path / "profile.json"
    write_profile(path, {"format": FORMAT, "settings": settings, "samples": [], "fit": costs})
    profile = training_job(**MOE, wlb_profile=str(path)).profile
    assert profile is not None and profile.model.rank_experts == 8
    with pytest.raises(WlbError, match="another model or layout \\(experts' chosen 2 there, 4 here\\)"):
        training_job(**MOE | {"moe_router_topk": 4}, wlb_profile=str(path))
    with pytest.raises(WlbError, match="experts' count 8 there, None here"):
        training_job(wlb_profile=str(path))
