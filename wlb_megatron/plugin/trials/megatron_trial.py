"""A Megatron or Transformer Engine that was not tried must compute a small case right before a job trains with it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.flags.versions import (
    TRIED_TRANSFORMER_ENGINE,
    tried_versions,
    untried_megatron,
    untried_transformer_engine,
)
from wlb_megatron.rank_processes import run_ranks
from wlb_megatron.refusals import Refused
from wlb_megatron.registry import USUAL_KERNELS

RANKS = 2
"""Context-parallel ranks of the check."""

TOLERATED = 1e-2
"""Largest relative error: fp32 against fp64 comes to 1e-5; a factor of 1 / RANKS is 0.5."""

SECONDS = 180
"""A check that takes longer has failed. It takes about ten, most of them imports."""

_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")
"""Beginnings of environment variables that would make the check's processes ranks of the job."""


class Comparison(NamedTuple):
    """`what` was compared, its error relative to the right value, and its strength: 1 where it is right."""

    what: str
    error: float
    strength: float


def try_megatron() -> None:
    """On all ranks at once: check a Megatron that was not tried, on rank 0, which tells the others.

    A warning on rank 0 if it passes; Refused on all ranks, with what differs, if it does not.
    """
    refusal: list[str | None] = [None]
    if dist.get_rank() == 0 and (version := untried_megatron()) is not None:
        refusal = [_refusal(version)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0]:
        raise Refused(refusal[0])


def _refusal(version: str) -> str | None:
    """Why it is not to be trained with; None, with a warning, where it may be."""
    try:
        largest_error = check()
    except (WlbError, OSError, ValueError) as wrong:
        return (
            f"wlb_megatron was not tried with megatron-core {version}, and its check of it fails: {wrong}. Install a "
            f"version that was tried ({tried_versions()})"
        )
    print(
        f"WARNING: wlb_megatron was not tried with megatron-core {version}; a small step of it comes out right: loss, "
        f"gradients and routers' losses within {largest_error:.0e}",
        flush=True,
    )
    return None


def check() -> float:
    """Run the check's ranks on this machine's CPU; the largest error. WlbError with what differs, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, "-P", "-m", "wlb_megatron.plugin.trials.megatron_check"]
        try:
            outputs = run_ranks(
                [[*command, str(rank), meeting] for rank in range(RANKS)], _environment(), SECONDS
            )
        except TimeoutError:
            raise WlbError(f"it did not finish within {SECONDS} s") from None
    return judged([Comparison(*figures) for out in outputs for figures in json.loads(out.splitlines()[-1])])


def judged(comparisons: list[Comparison]) -> float:
    """The largest error. WlbError with each finding that is out of bounds."""
    failures = {
        comparison.what: comparison for comparison in comparisons if not comparison.error <= TOLERATED
    }
    if failures:
        raise WlbError(
            "; ".join(
                f"{comparison.what}: {comparison.strength:.3g} times the right strength, "
                f"off by {comparison.error:.1e} of it"
                for comparison in failures.values()
            )
        )
    return max(comparison.error for comparison in comparisons)


def _environment() -> dict[str, str]:
    """Of a process that is no rank of the job, sees no GPU, and imports what this one does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_JOB)}
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def try_transformer_engine(job: TrainingJob) -> None:
    """Tell of a Transformer Engine newer than those tried, and refuse it unless small calls of each kind come out
    right on this rank's GPU: the plugin calls entry points below its modules, which may change without a word."""
    version = untried_transformer_engine(job.model.implementation)
    if version is None or not job.device.on_gpu or job.given.kernels not in ("auto", USUAL_KERNELS):
        return
    cure = f"install a tried one (pip install 'transformer-engine[pytorch]{TRIED_TRANSFORMER_ENGINE}')"
    try:
        from wlb_megatron.attention.kernels.kernel_check import TOLERATED, worst_error
        from wlb_megatron.attention.kernels.te_backend import TransformerEngineKernels

        with torch.cuda.device(job.device.index):
            largest_error = worst_error(TransformerEngineKernels(), torch.bfloat16, "cuda")
    except Exception as error:
        raise Refused(
            f"wlb_megatron was not tried with Transformer Engine {version}, and its attention cannot be called "
            f"({error!r}): {cure}"
        ) from error
    if not largest_error <= TOLERATED:
        raise Refused(
            f"wlb_megatron was not tried with Transformer Engine {version}, and its attention is off by "
            f"{largest_error:.1e} of the largest value, {TOLERATED:.0e} is tolerated: {cure}"
        )
    if job.device.rank == 0:
        print(
            f"WARNING: wlb_megatron was not tried with Transformer Engine {version}; small calls of its attention come "
            f"out right (within {largest_error:.0e} of the largest value)",
            flush=True,
        )
