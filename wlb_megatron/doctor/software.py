"""Checks of Python, torch, the GPUs, Transformer Engine, FlashAttention-4 and apex."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen, describe, not_installed
from wlb_megatron.doctor import findings
from wlb_megatron.doctor.findings import FIX, NOTE, OK, Finding
from wlb_megatron.errors import install

CPU = Path(__file__).resolve().parents[1] / "cpu"
"""The folder that lets Megatron's loop run without a GPU (docs/cpu.md)."""


def python() -> Iterator[Finding]:
    """The interpreter and numpy."""
    supported = sys.version_info >= (3, 10)
    yield Finding(
        "Python",
        platform.python_version(),
        OK if supported else FIX,
        "" if supported else "use 3.10 or newer",
    )
    yield Finding("numpy", findings.version("numpy") or "missing")
    yield Finding("wlb-megatron", findings.version("wlb-megatron") or "from a checkout, not installed")


def torch_and_gpus() -> Iterator[Finding]:
    """torch with its CUDA, cuDNN and NCCL, and the GPUs it sees."""
    if findings.version("torch") is None:
        yield Finding("torch", "missing", FIX, f"planning works without it; to train: {install('gpu')}")
        return
    import torch

    yield Finding("torch", torch.__version__)
    gpus = findings.gpus()
    built = torch.version.cuda
    if built is None:
        yield Finding(
            "CUDA", "this torch is built for CPUs", NOTE, "to train on GPUs install torch's CUDA build"
        )
    else:
        yield Finding("CUDA", built)
        yield from cudnn(torch.backends.cudnn.version())
        nccl = torch.cuda.nccl.version() if gpus else findings.version(f"nvidia-nccl-cu{built.split('.')[0]}")
        yield Finding("NCCL", nccl if isinstance(nccl, str) else ".".join(map(str, nccl or ("unknown",))))
    if not gpus:
        yield Finding(
            "GPUs",
            "none",
            NOTE,
            f"Megatron's loop asks for CUDA; to try it on CPUs put {CPU} on PYTHONPATH, and add "
            "--transformer-impl local --distributed-backend gloo (docs/cpu.md has the whole command)",
        )
    for index in range(gpus):
        about = torch.cuda.get_device_properties(index)
        able = (about.major, about.minor) >= (9, 0)
        yield Finding(
            f"GPU {index}",
            f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}",
            OK if able else FIX,
            "" if able else "attention over packed documents by cuDNN needs Hopper or newer (9.0)",
        )


def cudnn(version: int | None) -> Iterator[Finding]:
    """cuDNN's version, and whether the kernel graphs that are built before step 1 are those that steps need."""
    yield Finding("cuDNN", _dotted(version))
    if version:
        rounds = version < BY_SEQUENCES
        yield Finding(
            "attention graphs built before step 1",
            "fit the sizes that steps use: Transformer Engine rounds sizes up"
            if rounds
            else "fit the sizes that steps use: the plugin rounds the number of sequences up, because Transformer "
            "Engine does not with this cuDNN (checked on plans, not on a GPU)",
        )


BY_SEQUENCES = 92400
"""cuDNN 9.24.0. From this version on, Transformer Engine caches forward graphs by the number of sequences."""


def transformer_engine() -> Iterator[Finding]:
    """Transformer Engine's version, and which attention will run."""
    from wlb_megatron.plugin.flags.versions import check_transformer_engine, untried_transformer_engine

    gpus = findings.gpus()
    version = findings.version("transformer-engine")
    if version is None and importlib.util.find_spec("transformer_engine") is not None:
        version = "here, of unknown version"
    if version is None:
        cure = 'pip install "transformer-engine[pytorch]"' if gpus else "needed on GPUs only"
        yield Finding("Transformer Engine", "missing", FIX if gpus else NOTE, cure)
    else:
        check_transformer_engine("transformer_engine")
        untried = untried_transformer_engine("transformer_engine") is not None
        yield Finding(
            "Transformer Engine",
            version,
            NOTE if untried else OK,
            "not tried with the plugin: its attention is checked here if there is a GPU, and when a job starts"
            if untried
            else "",
        )
    fused = version is not None and gpus
    yield Finding(
        "attention with --transformer-impl transformer_engine",
        _kernels() if fused else "cannot run here",
        OK if fused else FIX if gpus else NOTE,
    )
    yield Finding(
        "attention with --transformer-impl local", "torch, one document at a time: any device, slow"
    )


def _kernels() -> str:
    """The kernels that --wlb-kernels auto chooses for heads of 128 channels."""
    import torch

    layer = Layer(dim=128, v_dim=128, grouped=True, capability=torch.cuda.get_device_capability())
    return f"{describe(*chosen('auto', layer))}; bf16 and fp16 (--wlb-kernels auto; NVTE_* are not read)"


STOCK_FA4 = (
    "called by Transformer Engine (2.20.2 with 4.0.0b36), it attends to no key under a causal mask, without an error "
    "(TransformerEngine issue 3528); give such runs NVTE_FLASH_ATTN=0. The plugin calls it itself and is not affected"
)


def flash_attention() -> Iterator[Finding]:
    """FlashAttention-4, which is optional, and whether its versions are the tested ones."""
    version, lacks = findings.version("flash-attn-4"), not_installed("fa4")
    if version is not None:
        yield Finding("FlashAttention-4", version, OK if lacks is None else NOTE, lacks or "")
        if findings.version("transformer-engine") is not None:
            yield Finding("FlashAttention-4 in runs without the plugin", "do not use it", NOTE, STOCK_FA4)
        return
    hopper = False
    if findings.gpus():
        import torch

        hopper = torch.cuda.get_device_capability()[0] == 9
    cure = f"faster than cuDNN's kernels on this GPU: {install('fa4')}"
    yield Finding("FlashAttention-4", "missing: optional", NOTE if hopper else OK, cure if hopper else "")


def apex() -> Iterator[Finding]:
    """NVIDIA's apex, which is not PyPI's package of that name."""
    from wlb_megatron.plugin.flags.versions import check_apex

    check_apex()  # raises with the cure
    here = importlib.util.find_spec("apex") is not None
    yield Finding(
        "apex", "NVIDIA's" if here else "none: Megatron runs without it (PyPI's apex is another package)"
    )


def _dotted(number: int | None) -> str:
    """cuDNN's 91900 as 9.19.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "missing"
