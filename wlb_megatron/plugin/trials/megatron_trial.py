"""What must compute a small case right before a job trains with it: a Megatron or Transformer Engine that was not
tried, and gated delta nets of packed documents, which must come out as those of each document alone.

Of the latter a leak from one document to the next would not be seen in a loss. Their kernels are another package's,
which is called through Megatron, so they are tried on each rank's device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from wlb_megatron.child import run_ranks
from wlb_megatron.errors import CPU, WlbError
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.flags.versions import (
    TRIED_TRANSFORMER_ENGINE,
    tried_versions,
    untried_megatron,
    untried_transformer_engine,
)
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import DocumentRows
from wlb_megatron.plugin.model.delta_nets import AtDocuments, Running, exact_rule, kernels
from wlb_megatron.refusals import Refused, RefusedHere
from wlb_megatron.registry import USUAL_KERNELS
from wlb_megatron.workload.model import DeltaNets

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
        "PYTHONPATH": os.pathsep.join([str(CPU), *filter(None, sys.path)]),
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
        from wlb_megatron.attention.kernels.before_training import TOLERATED, worst_error
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


LENGTHS = (70, 1, 129, 3, 2, 5, 1, 4, 2, 3, 5, 1, 4)
"""Tokens of the documents; the rule is computed over 64 at once. Short ones, because a leak shows at their starts."""

NETS_TOLERATED = 0.1
"""Largest error of a tensor relative to its norm. bf16 with sums in fp32 comes to 0.003, a leak to 0.29 or more."""


def try_delta_nets(job: TrainingJob) -> None:
    """Refuse the job if its gated delta nets cannot be run, or leak between documents, on this rank's device."""
    nets, sizes = job.model.shape.delta_nets, job.sizes
    if nets is None:
        return
    device = torch.device("cuda", job.device.index) if torch.cuda.is_available() else torch.device("cpu")
    heads = sizes.tensor * sizes.context
    try:
        error = worst_net_error(nets, heads, getattr(torch, job.model.dtype), device, *kernels())
    except Exception as problem:
        raise RefusedHere(
            f"gated delta nets cannot be run here ({problem!r}): install flash-linear-attention "
            "(pip install flash-linear-attention==0.4.2)"
        ) from problem
    if not error <= NETS_TOLERATED:
        raise RefusedHere(
            f"gated delta nets of packed documents are off by {error:.1e} from those of each document alone "
            f"({NETS_TOLERATED} is tolerated): use another release of flash-linear-attention (0.4.2 was run)"
        )


def worst_net_error(
    nets: DeltaNets,
    parts: int,
    dtype: torch.dtype,
    device: torch.device,
    convolution: AtDocuments,
    rule: AtDocuments,
) -> float:
    """The largest relative error of outputs and gradients. parts: ranks over which heads are spread."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = sum(LENGTHS), max(1, nets.value_heads // parts)
    channels = max(1, (2 * nets.keys + nets.values) // parts)
    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def given(values: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        return values.to(device, dtype).requires_grad_()

    x, weight = given(draw(1, tokens, channels)), given(draw(channels, nets.width))
    keys = [given(functional.normalize(draw(1, tokens, heads, nets.key_dim), dim=-1)) for _ in range(2)]
    values, strength = draw(1, tokens, heads, nets.value_dim), draw(1, tokens, heads)
    # A decay as slow as that of many tokens carries much of a document into the next.
    fed = [*keys, given(values), given(-0.02 * strength.abs(), torch.float32), given(strength.sigmoid())]
    running = part(Running)
    running.documents = DocumentRows(ends.to(device), ends)
    try:
        convolved = convolution(x=x, weight=weight, bias=None, activation="silu")[0]
        answered = rule(*fed[:3], g=fed[3], beta=fed[4], output_final_state=False)[0]
    finally:
        running.documents = None

    def convolve(rows: Tensor) -> Tensor:
        padded = functional.pad(rows.transpose(1, 2), (nets.width - 1, 0))
        convolved = functional.conv1d(padded, wide_weight[:, None], groups=channels)
        return functional.silu(convolved).transpose(1, 2)

    wide_weight = weight.detach().float().requires_grad_()
    return max(
        _error(convolved, [x], [weight], convolve, [wide_weight], draw(1, tokens, channels)),
        _error(answered, fed, [], exact_rule, [], draw(*values.shape)),
    )


def _error(
    out: Tensor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    exact: Callable[..., Tensor],
    exact_weights: Sequence[Tensor],
    gradient: Tensor,
) -> float:
    """Of the outputs and gradients of packed rows [1, tokens, ..] against `exact` of each document in fp32."""
    wide_rows = [tensor.detach().float().requires_grad_() for tensor in rows]
    documents = zip(*(tensor.split(LENGTHS, dim=1) for tensor in wide_rows), strict=True)
    exact_out = torch.cat([exact(*document) for document in documents], dim=1)
    gradient = gradient.to(out)
    results = [out, *torch.autograd.grad(out, [*rows, *weights], gradient)]
    expected = [exact_out, *torch.autograd.grad(exact_out, [*wide_rows, *exact_weights], gradient.float())]
    errors = [
        float(((result.float() - exact).norm() / exact.norm()).detach())
        for result, exact in zip(results, expected, strict=True)
    ]
    return max(errors, key=lambda error: error if error == error else float("inf"))
