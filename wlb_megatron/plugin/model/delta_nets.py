"""Gated delta nets over packed documents: convolution and rule begin anew at each document.

Megatron's layer exchanges heads for tokens over the context-parallel ranks, so that each computes all tokens of some
heads. It takes them to be cut in zigzag. Here they are put in the documents' order by the plan, and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wlb_megatron.attention.core_attention import WlbPackedSeqParams
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import DocumentRows


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


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """GatedDeltaNet.__init__ of megatron-core 0.18, which cannot be built at context parallelism otherwise."""

    def __init__(self: Any, *args: Any, cp_comm_type: Any = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    return __init__


def wrap_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of GatedDeltaNet that runs with the documents of the micro-batch whose packed_seq_params it gets."""

    def method(*args: Any, **kwargs: Any) -> Any:
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

    return method


def _running_documents() -> DocumentRows:
    documents = part(Running).documents
    assert documents is not None  # `wrap_layer` has set them, or has raised
    return documents


def wrap_undo(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """_undo_attention_load_balancing that puts rows [tokens, 1, channels] of all ranks in the documents' order."""

    def undo(input_: Tensor, *_: Any, **__: Any) -> Tensor:
        documents = _running_documents()
        return _Permuted.apply(input_, documents.order, documents.gathered)

    return undo


def wrap_redo(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """_redo_attention_load_balancing that puts them rank by rank again."""

    def redo(input_: Tensor, *_: Any, **__: Any) -> Tensor:
        documents = _running_documents()
        return _Permuted.apply(input_, documents.gathered, documents.order)

    return redo


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
