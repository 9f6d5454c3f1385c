"""A Transformer Engine that was not tried: reported if its attention is right, else refused with a cure. Gated delta
nets are tried at each start."""

import contextlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from training_jobs import training_job

from wlb_megatron.attention.kernels import before_training
from wlb_megatron.doctor import checks
from wlb_megatron.plugin.flags import versions
from wlb_megatron.plugin.model.delta_nets import AtDocuments
from wlb_megatron.plugin.trials.megatron_trial import try_delta_nets, try_transformer_engine
from wlb_megatron.refusals import Refused


@pytest.fixture
def trial(monkeypatch):
    """trial(version, error): a start with that Transformer Engine, whose attention is off by that much, or raises."""
    backend = ModuleType("wlb_megatron.attention.kernels.te_backend")
    backend.TransformerEngineKernels = object
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setattr(torch.cuda, "device", lambda rank: contextlib.nullcontext())
    known = importlib.metadata.version

    def run(version: str | None, error: float | Exception, **changed: Any) -> None:
        def version_of(name: str) -> str:
            if name != "transformer_engine":
                return known(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        def worst_error(*_: Any) -> float:
            if isinstance(error, Exception):
                raise error
            return error

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(before_training, "worst_error", worst_error)
        try_transformer_engine(training_job(**changed))

    return run


def test_a_version_that_was_tried_is_not_tried_again(trial, capsys):
    for version in ("2.18", "2.20.2+cu13"):
        trial(version, RuntimeError("called"))
    trial("3.0", RuntimeError("called"), transformer_impl="local")
    trial("3.0", RuntimeError("called"), wlb_kernels="fa4")
    assert capsys.readouterr().out == ""


def test_a_newer_version_that_comes_out_right_is_told(trial, capsys):
    trial("2.21.0", 0.004)
    assert "not tried with Transformer Engine 2.21.0; small calls" in capsys.readouterr().out
    trial("2.21.0", 0.004, rank=3)
    assert capsys.readouterr().out == ""
    trial(None, 0.004)
    assert "of unknown version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (0.2, r"off by 2\.0e-01 of the largest value, 3e-02 is tolerated"),
        (float("nan"), "off by nan"),
        (
            TypeError("fused_attn_fwd() takes 12"),
            r"cannot be called \(TypeError\('fused_attn_fwd\(\) takes 12",
        ),
    ],
)
def test_a_newer_version_that_does_not_is_refused_with_those_that_were_tried(trial, error, says):
    with pytest.raises(Refused, match=rf"Transformer Engine 2\.21.*{says}.*>=2\.18,<2\.21'\)"):
        trial("2.21", error)


def test_the_versions_tried_are_those_that_the_packages_asks_for():
    setup = (Path(__file__).parents[1] / "setup.py").read_text()
    assert f'"transformer-engine[pytorch]{versions.TRIED_TRANSFORMER_ENGINE}"' in setup
    low, high = versions.MINIMUM_TRANSFORMER_ENGINE, versions.LATEST_TRANSFORMER_ENGINE
    assert f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}" == versions.TRIED_TRANSFORMER_ENGINE


def test_doctor_tells_of_a_version_that_was_not_tried(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.30")
    monkeypatch.setattr(checks, "gpu_count", lambda: 0)
    finding = next(checks.transformer_engine())
    assert (finding.verdict, finding.found) == (checks.NOTE, "2.30") and "not tried" in finding.cure


NETS = {
    **{"hybrid_layer_pattern": "G-*-", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}


@pytest.fixture
def layers(monkeypatch):
    """The module whose kernels Megatron's layers call; here those of the CPU stand-in."""
    gated_delta_net = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    path = Path(versions.__file__).parents[2] / "cpu" / "fla.py"
    spec = importlib.util.spec_from_file_location("fla", path)
    assert spec is not None and spec.loader is not None
    before, stand_in = set(sys.modules), importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fla", stand_in)
    spec.loader.exec_module(stand_in)
    module = sys.modules[gated_delta_net.GatedDeltaNet.__module__]
    for name in ("causal_conv1d", "chunk_gated_delta_rule"):
        monkeypatch.setattr(module, name, getattr(stand_in, name))
    yield module
    for name in {name for name in sys.modules if name.startswith("fla.")} - before:
        del sys.modules[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_delta_nets_of_packed_documents_are_tried(layers, dtype):
    try_delta_nets(training_job(**NETS, params_dtype=dtype))
    try_delta_nets(training_job())  # without any


@pytest.mark.parametrize("kernel", ["causal_conv1d", "chunk_gated_delta_rule"])
def test_kernels_that_do_not_begin_at_documents_are_refused(layers, monkeypatch, kernel):
    """As where a wrapper of the kernel's own was taken for the one that tells it the starts."""
    alone, begun = getattr(layers, kernel), AtDocuments.__call__

    def call(self: AtDocuments, *args: Any, **kwargs: Any) -> Any:
        return alone(*args, **kwargs) if self.kernel is alone else begun(self, *args, **kwargs)

    monkeypatch.setattr(AtDocuments, "__call__", call)
    with pytest.raises(Refused, match="gated delta nets of packed documents are off by"):
        try_delta_nets(training_job(**NETS))


def test_without_flash_linear_attention_the_job_is_refused_by_its_name(layers, monkeypatch):
    monkeypatch.setattr(layers, "causal_conv1d", None)
    with pytest.raises(Refused, match="pip install flash-linear-attention"):
        try_delta_nets(training_job(**NETS))
