"""The core_attention module on Megatron's own classes, on a CPU, and which kernels it gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_oracle import Member, Tensors, ThreadGroup, one_document_at_a_time, random_tensors
from chunk_oracle import cached_bytes
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from training_jobs import training_job

from wlb_megatron.attention import core_attention
from wlb_megatron.attention.core_attention import (
    WlbCoreAttention,
    packed_seq_params,
    window_of,
    wlb_core_attention,
)
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen, describe
from wlb_megatron.attention.kv_exchange import clear_caches
from wlb_megatron.errors import WlbError
from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import Piece
from wlb_megatron.profiler.profile_command import _backend
from wlb_megatron.registry import KERNELS
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard, shard_all
from wlb_megatron.workload.profile import ProfiledModel

HEADS, KV_HEADS, DIM = 4, 2, 4


def config(**options):
    sizes = {"num_layers": 1, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS}
    sizes |= {"num_query_groups": KV_HEADS, "attention_dropout": 0.0, "masked_softmax_fusion": False}
    return TransformerConfig(**sizes | options)


def build(cls=DotProductAttention, cp=None, mask=AttnMaskType.causal, module_options=None, **options):
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=cp or Member(ThreadGroup(1), 0))
    arguments = {"config": config(**options), "layer_number": 1, "attn_mask_type": mask}
    arguments |= {"attention_type": "self", "cp_comm_type": None, "softmax_scale": None}
    return wlb_core_attention(cls)(**arguments | {"pg_collection": groups} | (module_options or {}))


def test_the_module_is_a_subclass_of_megatrons_class_with_its_checkpoint_keys_and_one_alone():
    module = build()
    assert isinstance(module, WlbCoreAttention) and isinstance(module, DotProductAttention)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    plain = DotProductAttention(config(), 1, AttnMaskType.causal, "self", pg_collection=groups)
    assert module.state_dict().keys() == plain.state_dict().keys()
    cls = wlb_core_attention(DotProductAttention)
    assert cls is wlb_core_attention(cls) is wlb_core_attention(ModuleSpec(module=DotProductAttention))
    with pytest.raises(WlbError, match="not a module class"):
        wlb_core_attention("flash")
    # Megatron's local class refuses context parallelism.
    assert build(context_parallel_size=2).config.context_parallel_size == 2


def test_it_attends_within_documents_at_megatrons_scale_whatever_mask_stands_in():
    lengths = [5, 1, 10]
    x = random_tensors(16)
    expected, *_ = one_document_at_a_time(lengths, x, scale=DIM**-0.5)
    params = packed_seq_params(attention_layout(shard(lengths, 1, "per-document"), 0), "cpu")
    qkv, options = [t.unsqueeze(1) for t in (x.q, x.k, x.v)], {"attn_mask_type": AttnMaskType.causal}
    out = build()(*qkv, None, **options, attention_bias=None, packed_seq_params=params)
    assert out.shape == (16, 1, HEADS * DIM)
    assert (out - expected.flatten(1).unsqueeze(1)).abs().max() < 1e-12
    x = random_tensors(8)
    params = packed_seq_params(attention_layout(shard([8], 1, "per-document"), 0), "cpu")
    qkv = [t.unsqueeze(1) for t in (x.q, x.k, x.v)]
    plain = build()(*qkv, None, packed_seq_params=params)
    assert torch.equal(plain, build()(*qkv, torch.ones(1, dtype=torch.bool), packed_seq_params=params))


def test_megatron_keeps_queries_apart_from_its_packed_format():
    params = packed_seq_params(attention_layout(shard([8, 4], 2, "per-document"), 1), "cpu")
    assert isinstance(params, PackedSeqParams)
    assert params.qkv_format != "thd" and params.cu_seqlens_q is None and params.max_seqlen_q == 8


@pytest.mark.parametrize("params", [None, PackedSeqParams(qkv_format="thd")])
def test_without_a_plan_it_never_falls_back_to_the_parent(params):
    x = random_tensors(8)
    with pytest.raises(WlbError, match="instead of the plugin's plan"):
        build()(*(t.unsqueeze(1) for t in (x.q, x.k, x.v)), None, packed_seq_params=params)


def test_a_batch_dimension_and_a_bias_are_refused():
    params = packed_seq_params(attention_layout(shard([8], 1, "per-document"), 0), "cpu")
    x = random_tensors(8)
    with pytest.raises(WlbError, match="one packed sequence"):
        build()(*(t.unsqueeze(1).expand(-1, 2, -1, -1) for t in (x.q, x.k, x.v)), packed_seq_params=params)
    qkv = [t.unsqueeze(1) for t in (x.q, x.k, x.v)]
    with pytest.raises(WlbError, match="bias"):
        build()(*qkv, attention_bias=torch.zeros(1), packed_seq_params=params)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0"),
        ({"qk_clip": True}, "drop --qk-clip"),
        ({"mask": AttnMaskType.no_mask}, "use a causal language model"),
        ({"module_options": {"k_channels": 128, "v_channels": 192}}, "wider than keys"),
        ({"module_options": {"attention_type": "cross"}}, "decoder-only"),
    ],
)
def test_what_it_cannot_do_is_refused_when_built(options, says):
    with pytest.raises(WlbError, match=says):
        build(**options)


def test_a_machine_without_transformer_engine_or_megatron_imports_the_executor():
    code = (
        "import sys; sys.modules['transformer_engine'] = sys.modules['megatron'] = None\n"
        "import wlb_megatron.attention.sharded_attention, wlb_megatron.attention.kernels.torch_backend\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fp8", "recipe", "multiple"),
    [(None, None, 4), ("hybrid", "tensorwise", 64), ("e4m3", "blockwise", 64), ("hybrid", "mxfp8", 128)],
)
def test_each_ranks_tokens_fit_the_rows_that_fp8_products_want(fp8, recipe, multiple):
    """CP=2, TP=2 with sequence parallelism: a rank's GEMMs see a quarter of a micro-batch's tokens."""

    def job(window):
        sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "seq_length": window}
        return training_job(**sizes, fp8=fp8, fp8_recipe=recipe)

    assert job(64).alignment == multiple
    assert job(5 * multiple).window_misfit() is None
    message = job(4 * multiple + 2).window_misfit()
    assert f"{4 * multiple + 2} tokens are not a multiple of {multiple}," in message
    assert f"set it to {5 * multiple}" in message
    told = [part in message for part in ("FP8", f"x {multiple // 4} rows")]
    assert told == [fp8 is not None] * 2


def test_windows_as_megatron_gives_them():
    assert window_of(SimpleNamespace(window_size=None)) is None
    assert window_of(SimpleNamespace(window_size=(-1, 0))) is None
    assert window_of(SimpleNamespace(window_size=(128, 0))) == 128
    windowed = {"window_size": (8, 0), "window_attn_skip_freq": 2}
    built = [build(**windowed, module_options={"layer_number": n}) for n in (1, 2)]
    assert [module._windowed for module in built] == [True, False]


def test_each_layer_keeps_the_keys_of_a_document_in_chunks_for_itself():
    pieces = [[Piece(0, 0, 0, 9)], [Piece(0, 0, 9, 16, 9)]]
    plans = shard_all([[9], [7]], 1, "per-document", links=links_of(pieces))
    x, layers = random_tensors(16), [build(), build()]
    qkv = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    outs = []
    for plan, rows in zip(plans, (slice(0, 9), slice(9, 16)), strict=True):
        params = packed_seq_params(attention_layout(plan, 0), "cpu")
        # Two layers whose keys differ, each with its own of the first chunk.
        inputs = [t[rows].unsqueeze(1) for t in qkv]
        keys = [n * inputs[1] for n in (1, 2)]
        pairs = zip(layers, keys, strict=True)
        outs.append([layer(inputs[0], key, inputs[2], packed_seq_params=params) for layer, key in pairs])
    assert cached_bytes() == 2 * 9 * 2 * KV_HEADS * DIM * 8
    for rows, both in ((slice(9, 16), outs[1]), (slice(0, 9), outs[0])):
        torch.autograd.backward(both, [x.dout[rows].flatten(1).unsqueeze(1)] * 2)
    assert cached_bytes() == 0
    grads = []
    for n in (1, 2):
        tensors = Tensors(x.q, n * x.k, x.v, x.dout)
        out, dq, dk, dv = one_document_at_a_time([16], tensors, scale=DIM**-0.5)
        got = torch.cat([of_layers[n - 1] for of_layers in outs]).squeeze(1)
        assert (got - out.flatten(1)).abs().max() < 1e-12
        grads.append((dq, n * dk, dv))
    for tensor, first, second in zip(qkv, *grads, strict=True):
        assert (tensor.grad - first - second).abs().max() < 1e-12
    clear_caches()


# --- which attention kernels a layer gets: the choice is printed, refused or as asked ---

HOPPER = Layer(dim=128, v_dim=128, grouped=True, capability=(9, 0))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(**versions: str | None) -> None:
        changed = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(package: str) -> str:
            if (found := (KERNELS["fa4"].packages | changed)[package]) is None:
                raise PackageNotFoundError(package)
            return found

        monkeypatch.setattr(kernel_choice, "version", version)

    return install


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"dtype": "float16"}, None),
        ({"dim": 64, "v_dim": 64}, None),
        ({"dim": 256, "v_dim": 256}, None),
        ({"dim": 192, "v_dim": 128, "grouped": False}, None),
        ({"capability": None}, "no GPU"),
        ({"capability": (8, 0)}, "not on 8.0"),
        ({"capability": (10, 0)}, "not on 10.0"),
        ({"dtype": "float32"}, "not float32"),
        ({"dim": 100, "v_dim": 100}, "multiples of 8 up to 256, not 100"),
        ({"dim": 264, "v_dim": 264}, "not 264"),
        ({"dim": 192, "v_dim": 128}, "values of 128 channels beside grouped keys of 192"),
    ],
)
def test_auto_takes_flash_attention_where_it_fits_and_says_why_not_elsewhere(installed, change, why):
    installed()
    layer = replace(HOPPER, **change)
    name, reason = chosen("auto", layer)
    if why is None:
        assert (name, reason) == chosen("fa4", layer) == ("fa4", "")
    else:
        assert name == "cudnn" and why in reason
        with pytest.raises(WlbError, match="--wlb-kernels fa4 cannot be used"):
            chosen("fa4", layer)
    assert chosen("cudnn", layer) == ("cudnn", "")


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ({"flash_attn_4": None}, "flash-attn-4 is not installed"),
        ({"flash_attn_4": "4.0.0b11"}, "flash-attn-4 is 4.0.0b11, tried is 4.0.0b36"),
        ({"nvidia_cutlass_dsl": "4.9.0"}, "nvidia-cutlass-dsl is 4.9.0"),
        ({"quack_kernels": None}, "quack-kernels is not installed"),
    ],
)
def test_only_the_versions_that_were_tried_are_taken(installed, versions, why):
    installed(**versions)
    name, reason = chosen("auto", HOPPER)
    assert name == "cudnn" and why in reason
    assert describe(name, reason) == f"cuDNN's kernels, not FlashAttention-4's: {reason}"
    with pytest.raises(WlbError, match=why):
        chosen("fa4", HOPPER)
    assert describe("fa4", "") == "FlashAttention-4's kernels 4.0.0b36", "a log tells the version that runs"
    assert describe("cudnn", "") == "cuDNN's kernels"


class Engine(torch.nn.Module):
    """Stands for Transformer Engine's attention module."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


Engine.__module__ = "transformer_engine.pytorch"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name, made in (("fa4", "FlashAttention4Kernels"), ("te", "TransformerEngineKernels")):
        module: Any = ModuleType(name)
        setattr(module, made, lambda deterministic, name=name: (name, deterministic))
        module.refuse_unfit = lambda *_: None
        monkeypatch.setitem(sys.modules, f"wlb_megatron.attention.kernels.{name}_backend", module)
    core_attention._say_once.cache_clear()


def layer_of(dim: int, asked: str = "auto", **options: Any) -> Any:
    module = build(Engine, kv_channels=dim, params_dtype=torch.bfloat16, **options)
    module.asked_kernels = asked
    return module


def test_each_layer_gets_the_kernels_that_serve_it_and_each_kind_is_told_once(on_hopper, installed, capsys):
    installed()
    layers = [layer_of(dim) for dim in (128, 128, 260, 260)]
    flash, cudnn = ("fa4", ("fa4", False)), ("cudnn", ("te", False))
    assert [layer.kernels for layer in layers] == [flash, flash, cudnn, cudnn]
    assert [layer.kind[0] for layer in layers] == ["fa4", "fa4", "cudnn", "cudnn"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "> wlb_megatron: attention of 128 channels a head: FlashAttention-4's kernels 4.0.0b36"
    assert "260 channels a head: cuDNN's kernels, not FlashAttention-4's: it takes head dims" in second


def test_a_layer_gets_the_kernels_that_are_asked_for(on_hopper, installed):
    installed()
    assert layer_of(128, "cudnn").kernels == ("cudnn", ("te", False))
    assert layer_of(128, "fa4", deterministic_mode=True).kernels == ("fa4", ("fa4", True))
    with pytest.raises(WlbError, match="not 260"):
        _ = layer_of(260, "fa4").kernels


@pytest.mark.parametrize(
    ("asked", "gpu", "lacks", "expected"),
    [
        ("auto", False, None, "torch"),
        ("auto", True, None, "fa4"),
        ("auto", True, "no", "cudnn"),
        ("te", True, None, "cudnn"),
        ("fa4", True, "no", "WlbError"),
        ("fa4", False, None, "WlbError"),
        ("torch", True, None, "torch"),
    ],
)
def test_a_profile_is_made_with_the_kernels_that_training_takes(monkeypatch, asked, gpu, lacks, expected):
    monkeypatch.setattr(kernel_choice, "not_installed", {"fa4": lacks}.get)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    cuda = SimpleNamespace(is_available=lambda: gpu, get_device_capability=lambda: (9, 0))
    model = ProfiledModel(hidden=1024, ffn=4096, heads=8, kv_heads=2, head_dim=128, vocab=256)
    try:
        assert _backend(asked, model, SimpleNamespace(cuda=cuda)) == expected
    except WlbError as refused:
        assert expected == "WlbError" and f"--backend {asked}" in str(refused)


def test_the_flags_say_beforehand_which_kernels_the_model_gets(on_hopper, installed):
    installed()
    assert training_job().kernels() == "fa4"
    assert training_job(kv_channels=260).kernels() == "cudnn"
    with pytest.raises(WlbError, match="not 260"):
        training_job(kv_channels=260, wlb_kernels="fa4").kernels()
    latent = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
    latent |= {"multi_latent_attention": True, "v_head_dim": 128, "wlb_kernels": "fa4"}
    assert training_job(**latent).kernels() == "fa4"
    assert training_job(**latent, transformer_impl="local").kernels() == "torch"
