"""Which attention kernels a layer gets, and that the choice is printed, refused or as asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention_module import build
from training_jobs import training_job

from wlb_megatron.attention import core_attention
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen, describe
from wlb_megatron.errors import WlbError
from wlb_megatron.profiler.profile_command import _backend
from wlb_megatron.registry import KERNELS
from wlb_megatron.workload.profile import ProfiledModel

HOPPER = Layer(dim=128, v_dim=128, grouped=True, capability=(9, 0))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(**versions: str | None) -> None:
        installed_versions = dict(KERNELS["fa4"].packages) | {
            name.replace("_", "-"): version for name, version in versions.items()
        }

        def version(package: str) -> str:
            if installed_versions[package] is None:
                raise PackageNotFoundError(package)
            return str(installed_versions[package])

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
def test_auto_takes_flash_attention_where_it_fits_and_says_why_not_elsewhere(
    installed: Callable[..., None], change: dict[str, Any], why: str | None
) -> None:
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
def test_only_the_versions_that_were_tried_are_taken(
    installed: Callable[..., None], versions: dict[str, str | None], why: str
) -> None:
    installed(**versions)
    name, reason = chosen("auto", HOPPER)
    assert name == "cudnn" and why in reason
    assert describe(name, reason) == f"cuDNN's kernels, not FlashAttention-4's: {reason}"
    with pytest.raises(WlbError, match=why):
        chosen("fa4", HOPPER)


def test_a_log_tells_the_version_that_runs() -> None:
    assert describe("fa4", "") == "FlashAttention-4's kernels 4.0.0b36"
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


def test_each_layer_gets_the_kernels_that_serve_it_and_each_kind_is_told_once(
    on_hopper: None, installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed()
    layers = [layer_of(dim) for dim in (128, 128, 260, 260)]
    assert [layer.kernels for layer in layers] == [("fa4", ("fa4", False))] * 2 + [
        ("cudnn", ("te", False))
    ] * 2
    assert [layer.kind[0] for layer in layers] == ["fa4", "fa4", "cudnn", "cudnn"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "> wlb_megatron: attention of 128 channels a head: FlashAttention-4's kernels 4.0.0b36"
    assert "260 channels a head: cuDNN's kernels, not FlashAttention-4's: it takes head dims" in second


def test_a_layer_gets_the_kernels_that_are_asked_for(on_hopper: None, installed: Callable[..., None]) -> None:
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
        ("auto", True, "no", "te"),
        ("te", True, None, "te"),
        ("fa4", True, "no", "WlbError"),
        ("fa4", False, None, "WlbError"),
        ("torch", True, None, "torch"),
    ],
)
def test_a_profile_is_made_with_the_kernels_that_training_takes(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpu: bool, lacks: str | None, expected: str
) -> None:
    monkeypatch.setattr(kernel_choice, "not_installed", {"fa4": lacks}.get)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    cuda = SimpleNamespace(is_available=lambda: gpu, get_device_capability=lambda: (9, 0))
    model = ProfiledModel(hidden=1024, ffn=4096, heads=8, kv_heads=2, head_dim=128, vocab=256)
    try:
        assert _backend(asked, model, SimpleNamespace(cuda=cuda)) == expected
    except WlbError as refused:
        assert expected == "WlbError" and f"--backend {asked}" in str(refused)


def test_the_flags_say_beforehand_which_kernels_the_model_gets(
    on_hopper: None, installed: Callable[..., None]
) -> None:
    installed()
    assert training_job().kernels() == ("fa4", "")
    assert training_job(kv_channels=260).kernels()[0] == "cudnn"
    with pytest.raises(WlbError, match="not 260"):
        training_job(kv_channels=260, wlb_kernels="fa4").kernels()
    latent = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
    latent |= {"multi_latent_attention": True, "v_head_dim": 128, "wlb_kernels": "fa4"}
    assert training_job(**latent).kernels() == ("fa4", "")
    assert training_job(**latent, transformer_impl="local").kernels() == ("torch", "")
