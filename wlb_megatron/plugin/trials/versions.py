"""Which Megatron, Transformer Engine and apex are here, and whether this plugin was tried with them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from wlb_megatron.refusals import Refused

TESTED_MEGATRON = ("0.16.2", "0.17.1", "0.17.2", "0.18.2", "0.18.3", "0.19.1", "0.19.2", "0.20.0")
"""Versions whose training loop has run with the plugin (scripts/check_versions.sh). PyPI's wheels: WHEELS; the others
are those of the branches core_r0.16.0 to core_r0.19.0 and of main (0.20.0)."""

UNRELEASED = {"0.20.0": "2e28bae90b773a0b"}
"""Of a version that no release has fixed yet, the sources that were tried (sources_digest): those of main at the commit
that docs/support.md names."""

_MEANINGS = (
    "core/packed_seq_params.py",
    "core/pipeline_parallel/schedules.py",
    "core/pipeline_parallel/p2p_communication.py",
    "core/distributed/finalize_model_grads.py",
    "core/distributed/distributed_data_parallel.py",
    "core/distributed/param_and_grad_buffer.py",
    "core/models/gpt/gpt_model.py",
    "core/transformer/attention.py",
    "core/transformer/multi_token_prediction.py",
    "core/transformer/moe/router.py",
    "core/transformer/moe/moe_utils.py",
    "training/training.py",
)
"""Files of Megatron's whose code decides what the plugin's parts mean."""

WHEELS = ("0.17.1", "0.18.2", "0.19.2")
"""Of these, the wheels on PyPI that bring megatron.training."""

MINIMUM_TRANSFORMER_ENGINE, LATEST_TRANSFORMER_ENGINE = (2, 18), (2, 20)
"""First and last release (major, minor) that was tried."""

TRIED_TRANSFORMER_ENGINE = ">=2.18,<2.21"
"""The same for pip, as setup.py has it."""


def megatron_version() -> str:
    """megatron-core's version, from the package itself (a checkout has no metadata), without a commit's hash."""
    try:
        from megatron.core.package_info import __shortversion__
    except ImportError as missing:
        raise Refused(
            f"wlb_megatron needs megatron-core with megatron.training ({missing}): "
            f"pip install megatron-core=={WHEELS[-1]}, or run from a Megatron-LM checkout."
        ) from missing
    return str(__shortversion__)


def check_megatron() -> str:
    """The version found; Refused with one line if it is older than the first one that the plugin was tried with.

    Called before megatron.training is imported, which would stumble over a wrong apex. Any other version that was not
    tried runs a check before it trains, see megatron_trial.py.
    """
    check_apex()
    version = megatron_version()
    if _release(version) < _release(TESTED_MEGATRON[0]):
        raise Refused(
            f"megatron-core {version} is older than the first that wlb_megatron was tried with: install one of "
            f"{tried_versions()}."
        )
    if importlib.util.find_spec("megatron.training") is None:
        raise Refused(
            f"megatron-core {version} is here without megatron.training: install PyPI's wheel "
            f"(pip install megatron-core=={WHEELS[-1]}) or run from a Megatron-LM checkout."
        )
    return version


def tried_versions() -> str:
    """As a message names them."""
    return f"{', '.join(TESTED_MEGATRON)}; pip install megatron-core=={WHEELS[-1]}"


def untried_megatron() -> str | None:
    """The version of a Megatron that was not tried, None of one that was. A checkout of a version that is not released
    yet is recognized by its sources."""
    version = megatron_version()
    if version not in TESTED_MEGATRON:
        return version
    tried = UNRELEASED.get(version)
    return None if tried in (None, sources_digest()) else f"{version} (another commit than the one tried)"


def sources_digest() -> str:
    """Of the files that decide what the plugin's parts mean, wherever they are imported from."""
    digest = hashlib.blake2b(digest_size=8)
    for file in _MEANINGS:
        package, name = file.split("/", 1)
        spec = importlib.util.find_spec(f"megatron.{package}")
        for folder in list(spec.submodule_search_locations or ()) if spec else []:
            path = Path(folder) / name
            digest.update(path.read_bytes() if path.is_file() else b"missing")
    return digest.hexdigest()


def check_apex() -> None:
    """Refuse PyPI's `apex` (a web toolkit): Megatron would import it as NVIDIA's and fail far from the cause."""
    spec = importlib.util.find_spec("apex")  # looked at, not imported: the wrong one may fail on import
    if spec is None:
        return
    folders = list(spec.submodule_search_locations or ())
    if not any(os.path.isdir(os.path.join(folder, "multi_tensor_apply")) for folder in folders):
        raise Refused(
            "the installed `apex` is not NVIDIA's (PyPI's apex is another package): pip uninstall apex, "
            "and build NVIDIA/apex if you want its fused kernels; Megatron runs without it."
        )


def check_transformer_engine(transformer_impl: str) -> None:
    """Refuse a Transformer Engine run where it is missing or older than the first version tried."""
    if transformer_impl != "transformer_engine":
        return
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("transformer_engine") is None:
            raise Refused(
                "wlb_megatron: --transformer-impl transformer_engine, but Transformer Engine is not installed: "
                'pip install "transformer-engine[pytorch]", or on a machine without a GPU set '
                "--transformer-impl local."
            ) from None
        return
    if _release(version) < MINIMUM_TRANSFORMER_ENGINE:
        wanted = ".".join(map(str, MINIMUM_TRANSFORMER_ENGINE))
        raise Refused(
            f"Transformer Engine {version} is older than {wanted}, the first the plugin was tried with: "
            'pip install --upgrade "transformer-engine[pytorch]".'
        )


def untried_transformer_engine(transformer_impl: str) -> str | None:
    """The version of a Transformer Engine that is to run and is newer than those tried, or that tells no version; else
    None."""
    if transformer_impl != "transformer_engine":
        return None
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    return version if _release(version) > LATEST_TRANSFORMER_ENGINE else None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: (2, 20) of 2.20.2+cu13."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
