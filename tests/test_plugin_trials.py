"""A Megatron that was not tried: a small step of it must come out right."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import spawn
from megatron_runs import free_port
from training_jobs import training_job

from wlb_megatron.attention.kernels import before_training
from wlb_megatron.doctor import doctor_command
from wlb_megatron.errors import CPU, WlbError
from wlb_megatron.plugin import hooks, megatron_trial
from wlb_megatron.plugin.flags import versions
from wlb_megatron.plugin.megatron_trial import Comparison, try_transformer_engine
from wlb_megatron.plugin.model.delta_nets import AtDocuments, try_delta_nets
from wlb_megatron.refusals import Refused

RIGHT = [Comparison("loss", 1e-8, 1.0), Comparison("gradients", 2e-6, 1.0)]
WRONG = [*RIGHT, Comparison("routers' auxiliary loss (its gradients)", 0.5, 0.5)]


@pytest.fixture
def start(monkeypatch):
    """start(version, comparisons, sources): a start on rank 0 with that Megatron; how often its check has run so far.
    sources: their digest, None for those of the version."""
    runs: list[str] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)

    def run(version: str, comparisons: list[Comparison] | None, sources: str | None = None) -> int:
        def check() -> float:
            runs.append(version)
            assert comparisons is not None
            return megatron_trial.judged(comparisons)

        digest = sources or versions.TRIED_MEGATRON.get(version, f"of {version}")
        monkeypatch.setattr(versions, "megatron_version", lambda: version)
        monkeypatch.setattr(versions, "sources_digest", lambda: digest)
        monkeypatch.setattr(megatron_trial, "check", check)
        versions.check_megatron()
        megatron_trial.try_megatron()
        return len(runs)

    return run


def test_a_version_or_patch_release_whose_sources_were_tried_is_not_checked(start, capsys):
    for version in ("0.18.2", "0.19.2"):
        assert start(version, None) == 0
    assert capsys.readouterr().out == ""
    assert start("0.18.1", None, sources=versions.TRIED_MEGATRON["0.18.2"]) == 0


@pytest.mark.parametrize("version", ["0.19.3", "0.21.0", "1.0.0"])
def test_an_untried_version_that_comes_out_right_is_warned_of(version, start, capsys):
    assert start(version, RIGHT) == 1
    warned = f"wlb_megatron was not tried with megatron-core {version} (its sources are none of those tried); a small"
    assert capsys.readouterr().out.count(warned) == 1


def test_an_untried_version_that_does_not_is_refused_with_what_differs_each_time(start):
    says = r"0\.19\.3.*routers' auxiliary loss \(its gradients\): 0\.5 times the right strength.*0\.19\.2"
    for runs in (1, 2):
        with pytest.raises(Refused, match=says) as refused:
            start("0.19.3", WRONG)
        assert "gradients: " not in str(refused.value).replace("(its gradients): ", "")
        assert len(str(refused.value).splitlines()) == 1, runs


def test_an_older_version_than_any_tried_or_a_figure_that_is_no_number_is_refused(start):
    with pytest.raises(Refused, match=r"0\.17\.1 is older than the first .* 0\.18\.2.* 0\.19\.2"):
        start("0.17.1", RIGHT)
    with pytest.raises(Refused, match="gradients: nan times"):
        start("0.19.3", [Comparison("gradients", float("nan"), float("nan"))])


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2", "0.20.0"])
def test_a_fork_that_keeps_a_tried_versions_number_is_untried(version, start):
    assert start(version, RIGHT, sources="changed") == 1
    with pytest.raises(Refused, match=f"{version}.*routers' auxiliary loss"):
        start(version, WRONG, sources="changed again")


def test_lines_without_code_do_not_count(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: spec)
    file = tmp_path / "recompute.py"
    digests = []
    for text in (
        "x = 1\nif x:\n    y = '# 2'\n",
        "# Copyright\n\nx = 1\nif x:\n    # why\n    y = '# 2'\n\n",
        "x = 1\nif x:\n    y = '# 3'\n",
        "x = 1\nif x:\n    x = 2\n    y = '# 2'\n",
    ):
        file.write_text(text)
        digests.append(versions.sources_digest())
    assert digests[0] == digests[1] and len({*digests}) == 3


@pytest.mark.megatron
def test_this_megatron_is_tried_and_a_copy_that_halves_an_output_is_refused(tmp_path):
    """The copy keeps the version number; the check alone tells what it does."""
    import megatron.core

    assert versions.untried_megatron() is None
    package = Path(megatron.core.__file__).parents[1]
    copy = tmp_path / "megatron"
    shutil.copytree(package, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "core" / "pipeline_parallel" / "schedules.py"
    source, line = changed.read_text(), "output_tensor, num_tokens, loss_reduced = outputs"
    assert source.count(line) == 1
    changed.unlink()
    changed.write_text(source.replace(line, f"{line}; output_tensor = output_tensor / 2"))
    script = (
        "from wlb_megatron.plugin.flags import versions\n"
        "from wlb_megatron.plugin import megatron_trial\n"
        "print(megatron_trial._refusal(versions.untried_megatron()))"
    )
    environment = megatron_trial._environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    said = done.stdout.splitlines()[-1]
    # Halved, a deferred loss would be lost, which ends the check before it compares gradients.
    assert "its sources are none of those tried" in said
    assert "of 2 micro-batches 0 have run their losses" in said


def test_the_digest_is_of_the_files_that_are_imported(monkeypatch, tmp_path):
    def find_spec(name: str) -> Any:
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / name.split(".")[1])])

    monkeypatch.setattr(versions.importlib.util, "find_spec", find_spec)
    seen = {versions.sources_digest()}
    for name in versions._MEANINGS:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("changed")
        seen.add(versions.sources_digest())
    assert len(seen) == 1 + len(versions._MEANINGS)


def one_of_two(rank: int, port: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    megatron_trial.untried_megatron = lambda: "0.19.3"

    def check() -> float:
        assert rank == 0, "one rank checks"
        raise WlbError("gradients: 4 times the right strength")

    megatron_trial.check = check
    try:
        megatron_trial.try_megatron()
    except Refused as refused:
        (out / f"{rank}").write_text(str(refused))
    dist.destroy_process_group()


def test_all_ranks_learn_what_rank_0_finds(tmp_path):
    spawn(one_of_two, (free_port(), tmp_path), 2)
    messages = [(tmp_path / name).read_text() for name in "01"]
    assert messages[0] == messages[1] and "gradients: 4 times the right strength" in messages[0]


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Any:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        setattr(owner, name, original)


def check_of_changed_megatrons(rank: int, folder: Path) -> None:
    """This rank's comparisons: Megatron as it is, with weaker routers' losses, with undivided gradients, with attention
    to keys that are hidden, and with deferred losses halved."""
    sys.path.insert(0, str(CPU))
    importlib.import_module("cpu_cuda")
    from megatron.core.transformer.moe import moe_utils

    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    comparisons = {"none": megatron_trial.rank_comparisons(str(folder / "none"), rank, hooks.install)}
    scaler, whole = moe_utils.MoEAuxLossAutoScaler, finalize.finalize_model_grads
    weak = staticmethod(lambda scale, set_scale=scaler.set_loss_scale: set_scale(scale / 2))
    with changed(scaler, "set_loss_scale", weak):
        comparisons["weak"] = megatron_trial.rank_comparisons(str(folder / "weak"), rank, hooks.install)
    undivided = lambda model, tokens=None, **more: whole(model, None, **more)  # noqa: E731
    with changed(finalize, "finalize_model_grads", undivided):
        comparisons["undivided"] = megatron_trial.rank_comparisons(
            str(folder / "undivided"), rank, hooks.install
        )
    from wlb_megatron.attention.kernels import torch_backend

    def leaking(call: Any, *rest: Any, scores: Any = torch_backend._scores) -> torch.Tensor:
        return scores(call, *rest).nan_to_num(neginf=-3.0)

    with changed(torch_backend, "_scores", leaking):
        comparisons["leaking"] = megatron_trial.rank_comparisons(str(folder / "leak"), rank, hooks.install)
    from wlb_megatron.plugin.step.losses import DeferredLoss

    with changed(DeferredLoss, "run", lambda self, run=DeferredLoss.run: run(self) / 2):
        comparisons["late"] = megatron_trial.rank_comparisons(str(folder / "late"), rank, hooks.install)
    (folder / f"rank{rank}.json").write_text(json.dumps(comparisons))


@pytest.mark.megatron
def test_the_check_passes_this_megatron_and_names_what_a_changed_one_does(tmp_path):
    spawn(check_of_changed_megatrons, (tmp_path,), 2)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    comparisons = {
        case: [Comparison(*fields) for rank in results for fields in rank[case]] for case in results[0]
    }
    assert megatron_trial.judged(comparisons["none"]) < 1e-4
    says = {}
    for case in ("weak", "undivided", "leaking", "late"):
        with pytest.raises(WlbError) as wrong:
            megatron_trial.judged(comparisons[case])
        says[case] = str(wrong.value)
    assert re.search(r"^routers' auxiliary loss \(its gradients\): 0\.5 times", says["weak"])
    assert "routers' z-loss (its gradients): 0.5 times" in says["weak"] and "loss:" not in says["weak"]
    assert says["late"].startswith("gradients of deferred losses: 0.5 times the right strength")
    assert says["leaking"].startswith("gradients: ")
    predictions = sum(length - 1 for lengths in megatron_trial.LENGTHS for length in lengths)
    assert f"gradients: {predictions} times the right strength" in says["undivided"]


@pytest.mark.megatron
def test_the_checks_processes_are_no_ranks_of_the_job(monkeypatch):
    """They would meet the job's ranks at its address, or wait for a rank 7."""
    job = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert not set(job) & set(megatron_trial._environment())
    assert megatron_trial.check() < 1e-4


def test_a_check_that_cannot_run_says_its_last_line(monkeypatch):
    broken = megatron_trial._environment() | {"PYTHONPATH": ""}
    monkeypatch.setattr(megatron_trial, "_environment", lambda: broken | {"PYTHONSAFEPATH": "1"})
    monkeypatch.setattr(megatron_trial.sys, "executable", "/bin/false")
    with pytest.raises(WlbError, match="a rank ended with status 1"):
        megatron_trial.check()


def test_doctor_checks_a_version_that_was_not_tried(monkeypatch):
    monkeypatch.setattr(versions, "sources_digest", lambda: "changed")
    monkeypatch.setattr(megatron_trial, "check", lambda: 3e-6)
    by_name = {result.what: result for result in doctor_command.megatron()}
    assert (
        by_name["megatron-core"].verdict == doctor_command.NOTE
        and "not tried" in by_name["megatron-core"].cure
    )
    (finding,) = doctor_command.small_step()
    assert "come out right within 3e-06 (" in finding.found


# A Transformer Engine that was not tried: reported if its attention is right, else refused with a cure.


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
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
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
    monkeypatch.setattr(doctor_command, "gpu_count", lambda: 0)
    finding = next(doctor_command.transformer_engine())
    assert (finding.verdict, finding.found) == (doctor_command.NOTE, "2.30") and "not tried" in finding.cure


NETS = {
    **{"hybrid_layer_pattern": "G-*-", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}


@pytest.fixture
def layers(monkeypatch):
    """The module whose kernels Megatron's layers call; here those of the CPU stand-in."""
    gated_delta_net = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    path = Path(__file__).parent / "stand_ins" / "fla.py"
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
