"""Whole models on a CPU, packed through the plugin, against Megatron's own run of one document at a time.

Windows, sinks, YaRN, layers without RoPE, norms of queries and keys, MLA, recomputation: what a layer's neighbours do
with the plan's tensors. Megatron's own attention is the oracle (for MLA, whose head dims its local class cannot
take, a plain softmax).
"""

import contextlib
import math
import os
import socket
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from attention_oracle import padded
from megatron.core import parallel_state
from megatron.core.fusions import fused_softmax
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer import attention, transformer_config
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from wlb_megatron.attention.core_attention import packed_seq_params, window_of
from wlb_megatron.plugin.model import spec
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.workload.memory import layer_bytes
from wlb_megatron.workload.model import Experts, Layout, Model

LENGTHS = [23, 1, 30, 2, 8]
VOCABULARY = 64


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    dist.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    # Megatron compiles a few small functions, which takes half a minute and changes nothing that is looked at here.
    with torch.compiler.set_stance("force_eager"):
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", sliding_window)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        monkeypatch.setattr(random, name, lambda *_, **__: torch.zeros(1))


def sliding_window(queries, keys, size):
    """Megatron's mask, which it makes on a GPU: True where query i does not see key j, i - size[0] <= j <= i."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return ~seen.triu(keys - queries - size[0]).tril(keys - queries + size[1])


class PlainCore(torch.nn.Module):
    """[s, b, heads, dim] in, causal softmax, as Megatron's core attention."""

    def __init__(self, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)
        return out.flatten(2)


def build(planned, position="rope", latent=False, qk_norm=False, **options):
    shared = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    shared |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.3}
    fusions = "masked_softmax_fusion", "apply_rope_fusion", "bias_dropout_fusion"
    shared |= dict.fromkeys(fusions, False) | options
    if latent:
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
        config = MLATransformerConfig(**shared, **sizes, v_head_dim=6)
    else:
        config = TransformerConfig(**shared, num_query_groups=2, qk_layernorm=qk_norm)
    for name, value in YARN.items() if position == "yarn" else ():
        setattr(config, name, value)
    layers = get_gpt_layer_local_spec(multi_latent_attention=latent, qk_layernorm=qk_norm)
    if planned:
        layers = spec.with_wlb_attention(layers)
    elif latent:
        layers.submodules.self_attention.submodules.core_attention = PlainCore
    torch.manual_seed(3)
    kind = {"position_embedding_type": "none" if latent else position, "rotary_base": 100}
    model = GPTModel(config, layers, VOCABULARY, 64, **kind, parallel_output=False)
    for name, parameter in model.named_parameters():  # sinks that matter
        if name.endswith("softmax_offset"):
            parameter.data.normal_(0, 2)
    if planned:
        spec.plan_positions(model)
    return model.train()


YARN = {
    "yarn_rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
WINDOW = {"window_size": (5, 0), "window_attn_skip_freq": 2}
LISTED = {"window_size": (7, 0), "window_attn_skip_freq": [1, 1, 0]}
SELECTIVE = {"recompute_granularity": "selective"}
MODELS = {
    "plain": {},
    "window in some layers": WINDOW,
    "window in listed layers, sinks": LISTED | {"softmax_type": "learnable"},
    "off-by-one softmax": {"softmax_type": "off-by-one"},
    "YaRN": {"position": "yarn"},
    "no RoPE in some layers": {"no_rope_freq": [0, 1, 0]},
    "no positions": {"position": "none"},
    "interleaved RoPE": {"rotary_interleaved": True},
    "norms of queries and keys": {"qk_norm": True},
    "softmax scale": {"softmax_scale": 0.9},
    "query-key layer scaling": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    "MLA, YaRN": {"latent": True, "rope_type": "yarn", "rotary_scaling_factor": 4.0},
    "MLA, RoPE": {"latent": True, "rope_type": "rope"},
    "full recomputation": WINDOW
    | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recomputed attention": SELECTIVE | {"recompute_modules": ["core_attn"]},
    "MLA, recomputed projections": SELECTIVE | {"latent": True, "recompute_modules": ["mla_up_proj"]},
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_compute_what_megatron_computes_for_each_alone(name):
    options = {k: v for k, v in MODELS[name].items() if not k.startswith("recompute")}
    lengths = padded(LENGTHS, 1)
    tokens = torch.randint(0, VOCABULARY, (1, int(lengths.sum())), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(int(lengths.sum()), VOCABULARY, generator=torch.Generator().manual_seed(2))

    alone = build(False, **options)
    parts, start = [], 0
    for length in lengths.tolist():
        document = tokens[:, start : start + length]
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        parts.append(alone(document, torch.arange(length)[None], hidden)[0])
        start += length
    expected = torch.cat(parts)
    (expected * weights).sum().backward()

    packed = build(True, **MODELS[name])
    plan = shard(lengths, 1, "per-document")
    params = packed_seq_params(attention_layout(plan, 0, window_of(packed.config)), "cpu")
    positions = torch.from_numpy(plan.positions(0))[None]
    got = packed(tokens, positions, None, packed_seq_params=params)[0]
    (got * weights).sum().backward()

    assert (got - expected).abs().max() < 2e-4 * expected.abs().max()
    theirs = dict(alone.named_parameters())
    for parameter_name, parameter in packed.named_parameters():
        reference = theirs[parameter_name].grad
        error = (parameter.grad - reference).norm() / reference.norm().clamp_min(1e-12)
        assert error < 1e-3, (parameter_name, float(error))


def rotate(x, frequencies, interleaved=False):
    """As Transformer Engine's function is called, with Megatron's own arithmetic."""
    return rope_utils._apply_rotary_pos_emb_bshd(x, frequencies, rotary_interleaved=interleaved)


def split_and_rotate(mixed, queries, keys, widths, interleaved=False):
    q, k, v = mixed.split(widths, dim=3)
    q = q.reshape(*q.shape[:2], -1, widths[1])
    return rotate(q, queries, interleaved), rotate(k, keys, interleaved), v


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("interleaved RoPE", 3),
        ("no RoPE in some layers", 2),
        ("YaRN", 0),
        ("norms of queries and keys", 0),
        ("full recomputation", 6),  # each layer twice
        ("recomputed attention", 3),
    ],
)
def test_projections_split_and_rotated_in_one_kernel_change_no_bit(name, layers, monkeypatch):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_: True)
    tokens = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    plan, results = shard(LENGTHS, 1, "per-document"), []
    for fused in (False, True):
        kernel = MagicMock(side_effect=split_and_rotate)
        monkeypatch.setattr(attention, "HAVE_FUSED_QKV_ROPE", fused)
        monkeypatch.setattr(attention, "apply_fused_qkv_rotary_pos_emb", kernel, raising=False)
        model = build(True, apply_rope_fusion=True, **MODELS[name])
        params = packed_seq_params(attention_layout(plan, 0, window_of(model.config)), "cpu")
        out = model(tokens, torch.from_numpy(plan.positions(0))[None], None, packed_seq_params=params)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in model.parameters())])
        assert kernel.call_count == layers * fused
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rotation_counts_elements_in_32_bits():
    """Beyond, Megatron splits and rotates: 2**26 tokens of 8 heads of 4 channels are 2**31 elements."""
    seen = []

    class Layer:
        num_attention_heads_per_partition, num_query_groups_per_partition = 4, 2
        hidden_size_per_attention_head = 4

        def forward(self, *, rotary_pos_emb):
            seen.append(rotary_pos_emb)

    layer = spec._rotating(Layer)()
    for tokens in (2**25, 2**26 - 1, 2**26, 2**27):
        layer.forward(rotary_pos_emb=torch.empty(1).expand(tokens, 1, 1))
    assert [x is not None for x in seen] == [False, False, True, True]


def test_the_models_differ_where_their_names_say():
    """Else the comparison above could not fail: each option changes the output."""
    tokens = torch.randint(0, VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(1, 1, 30, 30, dtype=torch.bool).triu(1)

    def output(**options):
        return build(False, **options)(tokens, torch.arange(30)[None], hidden)

    plain = output()
    for name in ("window in some layers", "off-by-one softmax", "YaRN", "no positions", "softmax scale"):
        assert (output(**MODELS[name]) - plain).abs().max() > 1e-2 * plain.abs().max(), name


class GroupedMatrices(torch.autograd.Function):
    """One matrix product an expert, which keeps what Transformer Engine's GroupedLinear does: its input."""

    @staticmethod
    def forward(ctx, rows, weights, counts):
        ctx.save_for_backward(rows, weights)
        return torch.cat([part @ weight.T for part, weight in zip(rows.split(counts), weights, strict=True)])


class GroupedLinear(torch.nn.Module):
    def __init__(self, experts, inputs, outputs, **_):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(experts, outputs, inputs))

    def forward(self, rows, counts):
        return GroupedMatrices.apply(rows, self.weights, counts), None


@pytest.mark.parametrize("kind", ["dense", "one expert after the other", "grouped", "shared experts"])
def test_feed_forward_layers_keep_the_bytes_that_the_memory_model_counts(kind, monkeypatch):
    """Of all tensors that autograd saves, each storage once, beside the weights."""
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: MagicMock())
    shared = 48 if kind == "shared experts" else 0
    experts = None if kind == "dense" else Experts(8, 96, imbalance=100, shared=shared)
    options = {
        **{"num_moe_experts": 8, "moe_ffn_hidden_size": 96, "moe_token_dispatcher_type": "alltoall"},
        **{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    }
    config = TransformerConfig(
        **{"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False},
        **{"bias_activation_fusion": True, "bf16": True, "params_dtype": torch.bfloat16},
        **{"use_cpu_initialization": True, "moe_shared_expert_intermediate_size": shared or None},
        **(options if experts else {}),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    made = get_gpt_layer_local_spec(num_experts=8 if experts else None).submodules.mlp
    old = isinstance(made, ModuleSpec)
    more = {} if experts else {"is_mtp_layer": False}
    how = {} if old and not experts else {"pg_collection": groups, **more}
    layer = (partial(build_module, made) if old else made)(config=config, **how)
    if kind == "grouped":
        layer.experts = TEGroupedMLP(8, config, GroupedMLPSubmodules(GroupedLinear, GroupedLinear), groups)
    layer.train().bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(256, 1, 64, dtype=torch.bfloat16, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden)
    saved = sum(kept[at].untyped_storage().nbytes() for at in kept.keys() - weights)
    shape = Model(hidden=64, ffn=96, layers=1, heads=4, kv_heads=4, head_dim=16, vocab=8)
    attention = layer_bytes(shape, Layout()) - 3 * 96 * 2
    counted = layer_bytes(replace(shape, experts=experts), Layout()) - attention + 64 * 2
    assert saved == pytest.approx(256 * counted, rel=0.002)
