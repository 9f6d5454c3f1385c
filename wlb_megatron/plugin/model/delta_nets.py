"""Gated delta nets over packed documents: convolution and rule begin anew at each document.

Megatron's layer exchanges heads for tokens over the context-parallel ranks, so that each computes all tokens of some
heads. It takes them to be cut in zigzag. Here they are put in the documents' order by the plan, and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wlb_megatron.attention.core_attention import WlbPackedSeqParams
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.micro_batches.loaded import DocumentRows
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.workload.model import DeltaNets


@dataclass(slots=True)
class Running:
    """documents: those of the micro-batch whose layer runs, None outside of one."""

    documents: DocumentRows | None = None


class _Permuted(torch.autograd.Function):
    """Rows in another order. index_select's own backward adds, with atomics, what can be copied."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _Permuted.apply(gradient, back, order), None, None


def wrap_init(original: Original, self: Any, *args: Any, cp_comm_type: Any = None, **kwargs: Any) -> None:
    """GatedDeltaNet.__init__ of megatron-core 0.18, which cannot be built at context parallelism otherwise."""
    original(self, *args, **kwargs)


def wrap_layer(original: Original, *args: Any, **kwargs: Any) -> Any:
    """A method of GatedDeltaNet that runs with the documents of the micro-batch whose packed_seq_params it gets."""
    values = (*args, *kwargs.values())
    packed_params = next((value for value in values if isinstance(value, WlbPackedSeqParams)), None)
    documents = getattr(packed_params, "documents", None)
    if documents is None:
        raise WlbError(
            "a gated delta net got no plan of the micro-batch: feed the model through wlb_megatron's forward_step"
        )
    running = part(Running)
    outer, running.documents = running.documents, documents
    try:
        return original(*args, **kwargs)
    finally:
        running.documents = outer


def _running_documents() -> DocumentRows:
    documents = part(Running).documents
    assert documents is not None  # `wrap_layer` has set them, or has raised
    return documents


def wrap_undo(original: Original, input_: Tensor, *_: Any, **__: Any) -> Tensor:
    """_undo_attention_load_balancing that puts rows [tokens, 1, channels] of all ranks in the documents' order."""
    documents = _running_documents()
    return _Permuted.apply(input_, documents.order, documents.gathered)


def wrap_redo(original: Original, input_: Tensor, *_: Any, **__: Any) -> Tensor:
    """_redo_attention_load_balancing that puts them rank by rank again."""
    documents = _running_documents()
    return _Permuted.apply(input_, documents.gathered, documents.order)


def is_delta_net(module: Any) -> bool:
    """Whether it is Megatron's GatedDeltaNet; main's GatedDeltaNet2 and wrappers of either are not."""
    return type(module).__name__ == "GatedDeltaNet"


def begin_at_documents(layer: Any) -> None:
    """Tell a built layer's convolution, which is its module's, and its rule where documents begin."""
    sys.modules[type(layer).__module__].causal_conv1d, layer.gated_delta_rule = kernels()  # type: ignore[attr-defined]


def _module() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return sys.modules[GatedDeltaNet.__module__]


def kernels() -> tuple[AtDocuments, AtDocuments]:
    """The convolution and the rule that begin at documents, of the functions that Megatron's layers call."""
    return AtDocuments.of(_module().causal_conv1d), AtDocuments.of(_module().chunk_gated_delta_rule)


def exact_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Megatron's own rule in plain torch, of one document."""
    rule: Callable[..., Any] = _module().torch_chunk_gated_delta_rule
    return rule(q, k, v, g=g, beta=beta)[0]


@dataclass(frozen=True, slots=True)
class AtDocuments:
    """A kernel of flash-linear-attention that begins anew at each document of the micro-batch whose layer runs."""

    kernel: Callable[..., Any]

    @classmethod
    def of(cls, kernel: Callable[..., Any]) -> AtDocuments:
        """Of a kernel, or of what is made of one already: each layer asks for the module's convolution."""
        return kernel if isinstance(kernel, AtDocuments) else cls(kernel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = _running_documents()
        starts = {"cu_seqlens": documents.starts, "cu_seqlens_cpu": documents.starts_on_host}
        return self.kernel(*args, **(kwargs | starts))


LENGTHS = (70, 1, 129, 3, 2, 5, 1, 4, 2, 3, 5, 1, 4)
"""Tokens of the documents; the rule is computed over 64 at once. Short ones, because a leak shows at their starts."""

TOLERATED = 0.1
"""Largest error of a tensor relative to its norm. bf16 with sums in fp32 comes to 0.003, a leak to 0.29 or more."""


def try_delta_nets(job: TrainingJob) -> None:
    """Refuse the job if its gated delta nets cannot be run, or leak between documents, on this rank's device.

    A leak from one document to the next would not be seen in a loss. The kernels are another package's, which is called
    through Megatron, so they are tried right before a job trains with them.
    """
    nets, sizes = job.model.shape.delta_nets, job.sizes
    if nets is None:
        return
    device = torch.device("cuda", job.device.index) if torch.cuda.is_available() else torch.device("cpu")
    heads = sizes.tensor * sizes.context
    try:
        error = worst_error(nets, heads, getattr(torch, job.model.dtype), device)
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


def worst_error(nets: DeltaNets, parts: int, dtype: torch.dtype, device: torch.device) -> float:
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
    convolution, rule = kernels()
    running = part(Running)
    running.documents = DocumentRows(ends.to(device), ends)
    try:
        convolved = convolution(x=x, weight=weight, bias=None, activation="silu")[0]
        answered = rule(*fed[:3], g=fed[3], beta=fed[4], output_final_state=False)[0]
    finally:
        running.documents = None

    def convolve(rows: Tensor, weight: Tensor) -> Tensor:
        padded = functional.pad(rows.transpose(1, 2), (nets.width - 1, 0))
        convolved = functional.conv1d(padded, weight[:, None], groups=channels)
        return functional.silu(convolved).transpose(1, 2)

    return max(
        _error(convolved, [x], [weight], convolve, draw(1, tokens, channels)),
        _error(answered, fed, [], exact_rule, draw(*values.shape)),
    )


def _error(
    out: Tensor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    exact: Callable[..., Tensor],
    gradient: Tensor,
) -> float:
    """Of the outputs and gradients of packed rows [1, tokens, ..] against `exact` of each document in fp32."""
    wide_rows, wide_weights = (
        [tensor.detach().float().requires_grad_() for tensor in tensors] for tensors in (rows, weights)
    )
    documents = zip(*(tensor.split(LENGTHS, dim=1) for tensor in wide_rows), strict=True)
    exact_out = torch.cat([exact(*document, *wide_weights) for document in documents], dim=1)
    gradient = gradient.to(out)
    results = [out, *torch.autograd.grad(out, [*rows, *weights], gradient)]
    expected = [exact_out, *torch.autograd.grad(exact_out, [*wide_rows, *wide_weights], gradient.float())]
    errors = [
        float(((result.float() - exact).norm() / exact.norm()).detach())
        for result, exact in zip(results, expected, strict=True)
    ]
    return max(errors, key=lambda error: error if error == error else float("inf"))
