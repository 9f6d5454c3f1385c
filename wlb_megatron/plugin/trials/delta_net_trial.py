"""Gated delta nets of packed documents must come out as those of each document alone, on this rank's device.

A leak from one document to the next would not be seen in a loss. The kernels are another package's, which is called
through Megatron, so they are tried before a job trains with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import DocumentRows
from wlb_megatron.plugin.model.delta_nets import AtDocuments, Running, exact_rule, kernels
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.workload.memory import DeltaNets

LENGTHS = (70, 1, 129, 3, 2, 5, 1, 4, 2, 3, 5, 1, 4)
"""Tokens of the documents; the rule is computed over 64 at once. Short ones, because a leak shows at their starts."""

TOLERATED = 0.1
"""Largest error of a tensor relative to its norm. bf16 with sums in fp32 comes to 0.003, a leak to 0.29 or more."""


def try_delta_nets(job: TrainingJob) -> None:
    """Refuse the job if its gated delta nets cannot be run, or leak between documents, on this rank's device."""
    nets, sizes = job.model.delta_nets, job.sizes
    if nets is None:
        return
    device = torch.device("cuda", job.device.index) if torch.cuda.is_available() else torch.device("cpu")
    heads = sizes.tensor * sizes.context
    try:
        error = worst_error(nets, heads, getattr(torch, job.model.dtype), device, *kernels())
    except Exception as problem:
        raise RefusedHere(
            f"gated delta nets cannot be run here ({problem!r}): install flash-linear-attention "
            "(pip install flash-linear-attention==0.4.2)"
        ) from problem
    if not error <= TOLERATED:
        raise RefusedHere(
            f"gated delta nets of packed documents are off by {error:.1e} from those of each document alone "
            f"({TOLERATED} is tolerated): use another release of flash-linear-attention (0.4.2 was run)"
        )


def worst_error(
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
