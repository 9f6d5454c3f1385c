"""`wlb-megatron doctor`: what it tells, what it makes of a broken machine, and that its self-test can fail."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_runs import ROOT, cpu_environment

from wlb_megatron import errors
from wlb_megatron.attention.kernels import kernel_choice, torch_backend
from wlb_megatron.cli import main
from wlb_megatron.doctor import attention_check, doctor_command
from wlb_megatron.errors import WlbError
from wlb_megatron.registry import KERNELS


def run(*arguments: str, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = cpu_environment()
    paths = environment["PYTHONPATH"].split(":")[1:]  # without the shim that answers for a GPU
    environment["PYTHONPATH"] = ":".join([str(first_on_path)] * (first_on_path is not None) + paths)
    command = [sys.executable, "-m", "wlb_megatron.cli", "doctor", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.megatron
def test_a_machine_that_can_train_is_told_so_after_a_self_test() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("torch", "CUDA", "Transformer Engine", "apex"):
        assert f"{part}: " in done.stdout, part
    for line in ("megatron-core: 0.19.2 in", "symbols", "attention"):
        assert line in done.stdout, line
    assert (
        "self-test on CPU, CP=2: a small step's loss, gradients and routers' losses come out" in done.stdout
    )
    line = "training can start" + (" here" if torch.cuda.is_available() else " where there are GPUs")
    assert done.stdout.splitlines()[-1].endswith(line)


@pytest.mark.megatron
def test_pypis_apex_and_an_unknown_megatron_are_named_and_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("__shortversion__ = '0.12.0'")
    done = run("--no-self-test", first_on_path=tmp_path)
    assert done.returncode == 2
    assert "FIX   apex: the installed `apex` is not NVIDIA's (PyPI's apex is another package)" in done.stdout
    (tmp_path / "apex" / "__init__.py").unlink()
    (tmp_path / "apex").rmdir()
    checkout = run("--no-self-test", "--checkout", str(tmp_path))
    assert checkout.returncode == 2
    assert "megatron-core 0.12.0 is older than the first" in checkout.stdout
    assert "to fix: megatron" in checkout.stderr


def test_without_torch_the_rest_is_still_told(monkeypatch, capsys):
    version = doctor_command.installed_version
    monkeypatch.setattr(
        doctor_command, "installed_version", lambda name: None if name == "torch" else version(name)
    )
    assert main(["doctor"]) == 2
    printed = capsys.readouterr()
    cure = f"planning works without it; to train: pip install '{ROOT}[gpu]'"
    assert f"FIX   torch: missing\n      {cure}" in printed.out
    assert "megatron-core: " in printed.out and "self-test" not in printed.out
    assert "to fix: torch" in printed.err


def test_the_cpu_that_answers_for_a_gpu_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cpu_cuda", sys)
    monkeypatch.setattr(torch.version, "cuda", None)
    (gpus,) = [finding for finding in doctor_command.torch_and_gpus() if finding.what.startswith("GPU")]
    assert gpus.found == "none"
    assert (Path(gpus.cure.split("put ")[1].split(" on PYTHONPATH")[0]) / "sitecustomize.py").exists()
    assert all(finding.verdict != doctor_command.FIX for finding in doctor_command.transformer_engine())


def test_flash_attention_of_another_version_and_what_stock_makes_of_it_are_told(monkeypatch):
    def version(package: str) -> str | None:
        return {**KERNELS["fa4"].packages, **changed}.get(package)

    monkeypatch.setattr(kernel_choice, "version", version)
    monkeypatch.setattr(doctor_command, "installed_version", version)
    changed: dict[str, str] = {}
    assert list(doctor_command.flash_attention()) == [doctor_command.Finding("FlashAttention-4", "4.0.0b36")]
    changed["transformer-engine"] = "2.20.2"
    _, stock = doctor_command.flash_attention()
    assert stock.verdict == doctor_command.NOTE and "NVTE_FLASH_ATTN=0" in stock.cure
    del changed["transformer-engine"]
    changed["flash-attn-4"] = "4.0.0b11"
    (finding,) = doctor_command.flash_attention()
    assert (finding.found, finding.verdict) == ("4.0.0b11", doctor_command.NOTE)
    assert finding.cure == "flash-attn-4 is 4.0.0b11, tried is 4.0.0b36"


def test_a_check_that_breaks_is_a_finding_and_a_checkout_that_is_none_is_refused():
    def broken_part():  # type: ignore[no-untyped-def]
        yield doctor_command.Finding("first", "fine")
        raise RuntimeError("no\n such  library")

    first, second = doctor_command.examine(broken_part)
    assert first.verdict == doctor_command.OK
    assert second == doctor_command.Finding("broken part", "no such library", doctor_command.FIX)
    with pytest.raises(WlbError, match="has no folder megatron"):
        doctor_command.run_doctor(argparse.Namespace(checkout="/nowhere", no_self_test=True))


def test_the_self_test_sees_a_key_too_many_and_a_rank_that_fails_is_told_by_its_last_line(
    monkeypatch, tmp_path
):
    """One rank of what GPUs run, in this process: right, and with a mask that lets each query see its next key."""
    init, threads = dist.init_process_group, torch.get_num_threads()
    monkeypatch.setattr(dist, "init_process_group", lambda _, **how: init("gloo", **how))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel_choice, "chosen", lambda *_: ("torch", ""))
    monkeypatch.setattr(kernel_choice, "kernels", lambda _: torch_backend.TorchKernels())
    monkeypatch.setattr(attention_check, "DEVICE", "cpu")
    assert attention_check.rank_error(1, str(tmp_path / "one"), 0) < 1e-2
    right = torch_backend._scores
    monkeypatch.setattr(torch_backend, "_scores", leaking(right))
    assert attention_check.rank_error(1, str(tmp_path / "two"), 0) > attention_check.TOLERATED
    monkeypatch.setattr(torch_backend, "_scores", lambda call, *rest: right(call, *rest) * torch.nan)
    assert math.isnan(attention_check.rank_error(1, str(tmp_path / "three"), 0))
    torch.set_num_threads(threads)
    monkeypatch.setattr(attention_check.sys, "executable", shutil.which("false"))
    with pytest.raises(WlbError, match="self-test of attention failed"):
        attention_check.run(2)


@pytest.mark.parametrize("errors", [("nan", "1e-3"), ("1e-3", "nan"), ("1e-3", "0.1")])
def test_an_error_of_one_rank_that_is_too_large_or_no_number_fails_the_self_test(monkeypatch, errors):
    monkeypatch.setattr(attention_check, "run_ranks", lambda *_: [f"{error}\n" for error in errors])
    with pytest.raises(WlbError, match="attention is off by "):
        attention_check.run(2)


def leaking(scores):
    """Attention's scores, with what no query may see at -3."""
    return lambda call, *rest: scores(call, *rest).nan_to_num(neginf=-3.0)


def test_an_extra_is_installed_from_a_checkout_and_never_from_an_index(monkeypatch, tmp_path):
    assert errors.install("gpu") == f"pip install '{ROOT}[gpu]'"
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    assert errors.install("gpu") == "pip install '.[gpu]' in a checkout of this project"
    places = ["--", "wlb_megatron", "docs", "README.md", "scripts"]
    search = ["git", "grep", "-lE", r"install .*wlb.megatron\[", *places]
    assert subprocess.run(search, cwd=ROOT, capture_output=True, text=True, check=False).stdout == ""


def test_json_holds_what_the_lines_say_and_nothing_else_is_printed(monkeypatch, capsys):
    for check in ("torch_and_gpus", "transformer_engine", "flash_attention", "apex"):
        monkeypatch.setattr(doctor_command, check, lambda: iter(()))
    wrong = doctor_command.Finding("Megatron", "none", doctor_command.FIX, "install it")
    monkeypatch.setattr(doctor_command, "megatron", lambda: iter([wrong]))
    assert main(["doctor", "--json", "--no-self-test"]) == 2
    results = json.loads(capsys.readouterr().out)
    assert results[0]["what"] == "Python" and results[0]["verdict"] == "ok"
    assert results[-1] == {"what": "Megatron", "found": "none", "verdict": "FIX", "cure": "install it"}
