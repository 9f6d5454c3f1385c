"""Which Megatron, Transformer Engine and apex are here, and whether this plugin was tried with them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re

from wlb_megatron.refusals import Refused

TESTED_MEGATRON = ("0.16.2", "0.17.1", "0.17.2", "0.18.2", "0.18.3", "0.19.1", "0.19.2", "0.20.0")
"""Versions whose training loop has run with the plugin (scripts/check_versions.sh). PyPI's wheels: WHEELS; the others
are those of the branches core_r0.16.0 to core_r0.19.0 and of main (0.20.0)."""

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
    """The version found; Refused with one line if it is not one the plugin was tried with.

    Called before megatron.training is imported, which would stumble over a wrong apex.
    """
    check_apex()
    version = megatron_version()
    if version not in TESTED_MEGATRON:
        raise Refused(
            f"wlb_megatron was not tried with megatron-core {version}: install one of "
            f"{', '.join(TESTED_MEGATRON)} (pip install megatron-core=={WHEELS[-1]})."
        )
    if importlib.util.find_spec("megatron.training") is None:
        raise Refused(
            f"megatron-core {version} is here without megatron.training: install PyPI's wheel "
            f"(pip install megatron-core=={WHEELS[-1]}) or run from a Megatron-LM checkout."
        )
    return version


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
        found = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("transformer_engine") is None:
            raise Refused(
                "wlb_megatron: --transformer-impl transformer_engine, but Transformer Engine is not installed: "
                'pip install "transformer-engine[pytorch]", or on a machine without a GPU set '
                "--transformer-impl local."
            ) from None
        return
    if _release(found) < MINIMUM_TRANSFORMER_ENGINE:
        wanted = ".".join(map(str, MINIMUM_TRANSFORMER_ENGINE))
        raise Refused(
            f"Transformer Engine {found} is older than {wanted}, the first the plugin was tried with: "
            'pip install --upgrade "transformer-engine[pytorch]".'
        )


def untried_transformer_engine(transformer_impl: str) -> str | None:
    """The version of a Transformer Engine that is to run and is newer than those tried, or that tells no version; else
    None."""
    if transformer_impl != "transformer_engine":
        return None
    try:
        found = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
    return found if _release(found) > LATEST_TRANSFORMER_ENGINE else None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: (2, 20) of 2.20.2+cu13."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
