"""Which Megatron, Transformer Engine and apex are here, and whether this plugin was tried with them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path

from wlb_megatron.errors import installed_version
from wlb_megatron.refusals import Refused

TRIED_MEGATRON = {
    "0.18.2": "9a81b03def7d4b42",
    "core_r0.18.0": "9a81b03def7d4b42",
    "0.19.2": "9220e05e028535ef",
    "core_r0.19.0": "de590ad18c181c76",
    "main": "f10a215ae7cd718b",
    "main after pull request 6742": "ffb0e6f85f06d5f3",
    "dev": "c3632e9f481165b9",
}
"""Megatrons whose training loop has run with the plugin (scripts/check_versions.sh): PyPI's wheels and branches at the
commits that docs/support.md names, with their sources_digest. A version number alone tells nothing: forks keep it."""

OLDEST_MEGATRON = (0, 18)
"""The first release (major, minor) of them."""

_MEANINGS = (
    "core/packed_seq_params.py",
    "core/recompute.py",
    "core/rerun_state_machine.py",
    "core/num_microbatches_calculator.py",
    "core/pipeline_parallel/schedules.py",
    "core/pipeline_parallel/p2p_communication.py",
    "core/pipeline_parallel/fine_grained_activation_offload.py",
    "core/distributed/finalize_model_grads.py",
    "core/distributed/distributed_data_parallel.py",
    "core/distributed/param_and_grad_buffer.py",
    "core/distributed/torch_fully_sharded_data_parallel.py",
    "core/models/common/language_module/language_module.py",
    "core/models/gpt/gpt_model.py",
    "core/models/hybrid/hybrid_block.py",
    "core/models/hybrid/hybrid_model.py",
    "core/ssm/gated_delta_net.py",  # to 0.18
    "core/ssm/gated_delta_net/common.py",  # from 0.19
    "core/ssm/gated_delta_net/gdn.py",  # from 0.19
    "core/ssm/mamba_context_parallel.py",
    "core/tensor_parallel/cross_entropy.py",
    "core/tensor_parallel/mappings.py",
    "core/tensor_parallel/random.py",
    "core/transformer/attention.py",
    "core/transformer/multi_latent_attention.py",
    "core/transformer/multi_token_prediction.py",
    "core/transformer/transformer_block.py",
    "core/transformer/transformer_layer.py",
    "core/transformer/moe/moe_layer.py",
    "core/transformer/moe/moe_logging.py",
    "core/transformer/moe/moe_utils.py",
    "core/transformer/moe/router.py",
    "core/transformer/moe/token_dispatcher.py",
    "training/training.py",
)
"""Files of Megatron's whose code decides what the plugin's parts mean."""

_NO_CODE = re.compile(rb"^[ \t]*(#.*)?\r?\n", re.MULTILINE)
"""A line that is empty, or a comment alone."""

WHEEL = "0.19.2"
"""Of these, PyPI's newest."""

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
            f"pip install megatron-core=={WHEEL}, or run from a Megatron-LM checkout."
        ) from missing
    return str(__shortversion__)


def check_megatron() -> str:
    """The version found; Refused with one line if it is older than the first one that the plugin was tried with.

    Called before megatron.training is imported, which would stumble over a wrong apex. Any other version that was not
    tried runs a check before it trains, see megatron_trial.py.
    """
    check_apex()
    version = megatron_version()
    if _release(version) < OLDEST_MEGATRON:
        raise Refused(
            f"megatron-core {version} is older than the first that wlb_megatron was tried with: install one of "
            f"{tried_versions()}."
        )
    if importlib.util.find_spec("megatron.training") is None:
        raise Refused(
            f"megatron-core {version} is here without megatron.training: install PyPI's wheel "
            f"(pip install megatron-core=={WHEEL}) or run from a Megatron-LM checkout."
        )
    return version


def tried_versions() -> str:
    """As a message names them."""
    return f"{', '.join(TRIED_MEGATRON)}; pip install megatron-core=={WHEEL}"


def untried_megatron() -> str | None:
    """The version of a Megatron that was not tried, None of one that was: its sources decide, whatever its version."""
    if sources_digest() in TRIED_MEGATRON.values():
        return None
    return f"{megatron_version()} (its sources are none of those tried)"


def sources_digest() -> str:
    """Of the files that decide what the plugin's parts mean, wherever they are imported from, without lines that are
    empty or comments alone. Takes 20 ms."""
    digest = hashlib.blake2b(digest_size=8)
    for file in _MEANINGS:
        package, name = file.split("/", 1)
        spec = importlib.util.find_spec(f"megatron.{package}")
        for folder in list(spec.submodule_search_locations or ()) if spec else []:
            path = Path(folder) / name
            digest.update(_NO_CODE.sub(b"", path.read_bytes()) if path.is_file() else b"missing")
            digest.update(b"\0")
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


def check_transformer_engine(transformer_impl: str) -> str | None:
    """The version of a Transformer Engine that is to run and is newer than those tried, or that tells no version; else
    None. Refused where it is missing or older than the first version tried."""
    if transformer_impl != "transformer_engine":
        return None
    version = installed_version("transformer_engine")
    if version is None:
        if importlib.util.find_spec("transformer_engine") is None:
            raise Refused(
                "--transformer-impl transformer_engine, but Transformer Engine is not installed: "
                'pip install "transformer-engine[pytorch]", or on a machine without a GPU set '
                "--transformer-impl local."
            )
        return "of unknown version"
    if _release(version) < MINIMUM_TRANSFORMER_ENGINE:
        minimum = ".".join(map(str, MINIMUM_TRANSFORMER_ENGINE))
        raise Refused(
            f"Transformer Engine {version} is older than {minimum}, the first the plugin was tried with: "
            'pip install --upgrade "transformer-engine[pytorch]".'
        )
    return version if _release(version) > LATEST_TRANSFORMER_ENGINE else None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: (2, 20) of 2.20.2+cu13."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
