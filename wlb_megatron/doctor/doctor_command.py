"""`wlb-megatron doctor`: runs the checks, prints what they find, and says what to fix.

Each check is a function that yields findings. A check that raises becomes a finding itself, so the others still run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen, describe, not_installed
from wlb_megatron.doctor import attention_check
from wlb_megatron.errors import CPU, PREFIX, WlbError, install, installed_version

OK, NOTE, FIX = "ok", "note", "FIX"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `found` of `what`, the verdict, and what to do if that is not OK."""

    what: str
    found: str
    verdict: str = OK
    cure: str = ""


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Flags of `wlb-megatron doctor`."""
    parser.description = (
        "Prints versions, which attention runs, and what to fix. Then trains a small step on the CPU, and runs a small "
        "plan's attention on GPUs if there are some. Exit code 0 if nothing needs fixing, else 2."
    )
    parser.add_argument(
        "--checkout", metavar="PATH", help="check this Megatron-LM checkout instead of pip's megatron-core"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for an issue")
    parser.add_argument(
        "--no-self-test", action="store_true", help="print versions only (10 to 20 seconds less)"
    )
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> None:
    """Print the findings. WlbError with what to fix, if there is anything."""
    if args.checkout is not None:
        if not os.path.isdir(os.path.join(args.checkout, "megatron")):
            raise WlbError(f"--checkout {args.checkout} has no folder megatron; give a Megatron-LM checkout")
        sys.path.insert(0, os.path.abspath(args.checkout))
    checks: list[Callable[[], Iterator[Finding]]] = [
        python,
        torch_and_gpus,
        transformer_engine,
        flash_attention,
        apex,
        megatron,
    ]
    if not args.no_self_test:
        checks += [small_step, sharded_attention]
    results = []
    for check in checks:
        for finding in examine(check):
            results.append(finding)
            if args.json:
                continue
            cure = f"\n      {finding.cure}" if finding.cure else ""
            print(f"{finding.verdict:4}  {finding.what}: {finding.found}{cure}", flush=True)
    if args.json:
        print(json.dumps([asdict(finding) for finding in results], indent=1))
    failed = [finding.what for finding in results if finding.verdict == FIX]
    if failed:
        raise WlbError(f"training cannot start here yet; to fix: {', '.join(failed)}")
    if args.json:
        return
    if gpu_count():
        print("training can start here")
    else:
        print("nothing to fix: training can start where there are GPUs")


def examine(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields a check's findings; a failure becomes a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from check()
    except (Exception, SystemExit) as error:
        line = " ".join(str(error).replace(PREFIX, "").split()) or type(error).__name__
        yield Finding(check.__name__.replace("_", " "), line, FIX)


def gpu_count() -> int:
    """Number of GPUs that torch sees; 0 without torch, or if wlb_megatron/cpu answers for CUDA."""
    if installed_version("torch") is None:
        return 0
    import torch

    if "cpu_cuda" in sys.modules:  # of wlb_megatron/cpu, imported with torch: the CPU answers for CUDA
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def python() -> Iterator[Finding]:
    """The interpreter and numpy."""
    yield Finding("Python", platform.python_version())
    yield Finding("numpy", installed_version("numpy") or "missing")
    yield Finding("wlb-megatron", installed_version("wlb-megatron") or "from a checkout, not installed")


def torch_and_gpus() -> Iterator[Finding]:
    """torch with its CUDA, cuDNN and NCCL, and the GPUs it sees."""
    if installed_version("torch") is None:
        yield Finding("torch", "missing", FIX, f"planning works without it; to train: {install('gpu')}")
        return
    import torch

    yield Finding("torch", torch.__version__)
    gpus = gpu_count()
    built = torch.version.cuda
    if built is None:
        yield Finding(
            "CUDA", "this torch is built for CPUs", NOTE, "to train on GPUs install torch's CUDA build"
        )
    else:
        yield Finding("CUDA", built)
        number = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
        cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "missing"
        yield Finding("cuDNN", cudnn)
        nccl = (
            torch.cuda.nccl.version() if gpus else installed_version(f"nvidia-nccl-cu{built.split('.')[0]}")
        )
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


def transformer_engine() -> Iterator[Finding]:
    """Transformer Engine's version, and which attention will run."""
    from wlb_megatron.plugin.flags.versions import check_transformer_engine

    gpus = gpu_count()
    version = installed_version("transformer-engine")
    if version is None and importlib.util.find_spec("transformer_engine") is not None:
        version = "here, of unknown version"
    if version is None:
        cure = 'pip install "transformer-engine[pytorch]"' if gpus else "needed on GPUs only"
        yield Finding("Transformer Engine", "missing", FIX if gpus else NOTE, cure)
    else:
        untried = check_transformer_engine("transformer_engine") is not None
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
    version, lacks = installed_version("flash-attn-4"), not_installed("fa4")
    if version is not None:
        yield Finding("FlashAttention-4", version, OK if lacks is None else NOTE, lacks or "")
        if installed_version("transformer-engine") is not None:
            yield Finding("FlashAttention-4 in runs without the plugin", "do not use it", NOTE, STOCK_FA4)
        return
    hopper = False
    if gpu_count():
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
    if installed_version("torch") is None:
        return
    from wlb_megatron.plugin import hooks

    count = len([hooks.locate(hook) for hook in hooks.rows()])
    yield Finding("Megatron's symbols that the plugin replaces", f"all {count} found")


def small_step() -> Iterator[Finding]:
    """Trains a small step on the CPU and compares it with plain torch."""
    if importlib.util.find_spec("megatron") is None or installed_version("torch") is None:
        return
    from wlb_megatron.plugin import megatron_trial

    start = time.perf_counter()
    largest_error = megatron_trial.check()
    yield Finding(
        f"self-test on CPU, CP={megatron_trial.RANKS}",
        f"a small step's loss, gradients and routers' losses come out right within {largest_error:.0e} "
        f"({time.perf_counter() - start:.1f} s)",
    )


def sharded_attention() -> Iterator[Finding]:
    """Compares attention of several GPUs, or of one, with one document at a time."""
    if not gpu_count():
        return
    size, start = min(2, gpu_count()), time.perf_counter()
    largest_error = attention_check.run(size)
    yield Finding(
        f"self-test on GPU, CP={size}",
        f"attention and its gradients equal one document at a time within {largest_error:.0e} "
        f"({time.perf_counter() - start:.1f} s)",
    )
