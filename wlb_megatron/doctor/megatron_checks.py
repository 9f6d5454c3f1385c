"""Checks of Megatron, and the two that compute: a self-test of attention, and a small step of an untested Megatron."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Iterator

from wlb_megatron.doctor import attention_check, findings
from wlb_megatron.doctor.findings import NOTE, OK, Finding


def megatron() -> Iterator[Finding]:
    """Megatron's version, and whether every symbol that the plugin replaces exists."""
    from wlb_megatron.plugin.flags.versions import check_megatron, untried_megatron

    version, untried = check_megatron(), untried_megatron() is not None
    where = importlib.util.find_spec("megatron.core")
    places = list(where.submodule_search_locations or ()) if where else []
    yield Finding(
        "megatron-core",
        f"{version} in {places[0] if places else 'unknown'}",
        NOTE if untried else OK,
        "not tried with the plugin: a small step of it is checked, with the self-test here and when a job starts"
        if untried
        else "",
    )
    if findings.version("torch") is None:
        return
    from wlb_megatron.plugin import install

    count = len([install.locate(hook) for hook in install.rows()])
    yield Finding("Megatron's symbols that the plugin replaces", f"all {count} found")
    yield dataset_helpers()
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
            NOTE,
            "tensor and sequence parallelism need 1 in the job's environment (the batch script sets it)",
        )


def dataset_helpers() -> Finding:
    """Megatron's C++ helpers. The plugin builds no samples and needs none; Megatron's own datasets do."""
    what = "Megatron's dataset helpers"
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return Finding(what, "built")
    tools = {"make": "make", "a C++ compiler": "g++", "python3-config": "python3-config"}
    missing = [name for name, command in tools.items() if shutil.which(command) is None]
    missing += [] if importlib.util.find_spec("pybind11") else ["pybind11 (pip install pybind11)"]
    cure = "Megatron builds them at its start"
    if missing:
        cure += f"; it lacks: {', '.join(missing)}"
    return Finding(what, "not built: the plugin does not need them, --wlb-off does", NOTE, cure)


def self_test() -> Iterator[Finding]:
    """Compares sharded attention with one document at a time, on each kind of device."""
    if findings.version("torch") is None:
        return
    gpus = findings.gpus()
    for size, gpu in [(2, False)] + ([(min(2, gpus), True)] if gpus else []):
        start = time.perf_counter()
        largest_error = attention_check.run(size, gpu=gpu)
        yield Finding(
            f"self-test on {'GPU' if gpu else 'CPU'}, CP={size}",
            f"attention and its gradients equal one document at a time within {largest_error:.0e} "
            f"({time.perf_counter() - start:.1f} s)",
        )


def untried_step() -> Iterator[Finding]:
    """Checks a small step of an untested Megatron version."""
    if importlib.util.find_spec("megatron") is None or findings.version("torch") is None:
        return
    from wlb_megatron.plugin.flags.versions import untried_megatron

    if untried_megatron() is None:
        return
    from wlb_megatron.plugin.trials import megatron_trial

    largest_error = megatron_trial.check()
    yield Finding(
        "check of this Megatron",
        f"a small step's loss, gradients and routers' losses come out right within {largest_error:.0e}",
    )
