"""Experts' routers that count documents' tokens alone, not the padding at a micro-batch's end.

Megatron's routers take a padding mask (True where nothing is to be counted) for their balancing losses and their
experts' biases; the plugin's forward_step gives it. What remains is here: the mask of a pipeline stage under sequence
parallelism, two places where Megatron's routers do not expect that ranks hold unequally much padding, and the strength
of routers' losses before 0.19.

Their balancing loss of a sequence (seq_aux_loss) is taken of each document.
Megatron takes it of the whole packed sequence. Here a document's tokens are summed wherever they are held, and each
document weighs by its tokens, so that its part does not depend on which others share its micro-batch. Routers are not
given the micro-batch that they route: it is noted before its forward, and again when its backward begins, for layers
that are recomputed.

A document in chunks is routed over several micro-batches. The gradient of a score is the share of the whole document's
routes, and all its chunks run forward before the first of them runs backward. So each forward adds its routes to the
document's, and the backward takes the shares of all. The last chunk logs the whole document's loss. Chunks of 6 and 2
tokens, of which 3 and 2 go to an expert: in both backwards its share is 5/8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from wlb_megatron.plan import Piece
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.logs.logged_losses import weighed
from wlb_megatron.sharding.segments import Chunks


def unwrapped(model: Any) -> Any:
    """The model inside DDP and mixed precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def stage_padding_mask(mask: torch.Tensor, model: Any, sequence_parallel: bool) -> torch.Tensor:
    """bool[1, t]: the mask as this model chunk takes it.

    A GPTModel's chunk that embeds cuts it over tensor-parallel ranks itself, as it does the tokens; later chunks get
    hidden states that are cut already, and here their part of the mask. A HybridModel cuts no mask.
    """
    model = unwrapped(model)
    cuts = model.pre_process and not hasattr(model, "hybrid_layer_pattern")
    return mask if cuts else stage_part(mask, sequence_parallel)


def stage_part(values: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """Of [.., t], what this tensor-parallel rank's routers get: under sequence parallelism its part of the tokens."""
    from megatron.core import parallel_state

    if not sequence_parallel:
        return values
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return values.chunk(size, dim=-1)[rank]


def wrap_token_counts(
    original: Original,
    routing_map: Any,
    reduce_group: Any,
    topk: Any = None,
    with_padding_mask: bool = False,
    reduce_groups: Any = None,  # instead of reduce_group, in Megatron's dev branch
) -> Any:
    """get_tokens_per_expert_and_token_count whose count of a rank is the mean over its ranks.

    A rank's part of the balancing loss is weighted by its count times the ranks, to undo the division by all tokens.
    Where ranks hold 30 and 28 tokens (and 2 of padding), weights 60 and 56 would count the first rank's part for more:
    both get 58.
    """
    several = {} if reduce_groups is None else {"reduce_groups": reduce_groups}
    experts, local, total = original(
        routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask, **several
    )
    ranks = prod(group.size() for group in reduce_groups or (reduce_group,))
    return experts, total / ranks if with_padding_mask else local, total


def wrap_apply_expert_bias(original: Original, self: Any, routing_map: Any, padding_mask: Any = None) -> Any:
    """TopKRouter._apply_expert_bias given the routes that count; up to 0.19 it fails on a mask of tokens.

    It takes `map[tokens, experts] & mask[tokens]`, which does not broadcast.
    """
    if padding_mask is not None:
        routing_map = routing_map & ~padding_mask.view(-1, 1)
    return original(self, routing_map)


def wrap_set_loss_scale(original: Original, scale: torch.Tensor) -> None:
    """MoEAuxLossAutoScaler.set_loss_scale, for Megatron before 0.19: times the ranks that share a micro-batch.

    Gradients are divided by the tokens of all micro-batches. Up to 0.18 a router therefore multiplies its losses
    (balancing and z-loss) by the tokens of its own rank: with tensor parallelism of T (and sequence parallelism) and
    context parallelism of C, 1/(T * C) of the micro-batch. From 0.19 it multiplies by T * C as well.
    """
    from megatron.core import parallel_state

    original(scale * parallel_state.get_tensor_and_context_parallel_group().size())


@dataclass(frozen=True, slots=True)
class Chunk:
    """Piece `piece` of a micro-batch. document: epoch, document, and where its part of the document starts."""

    piece: int
    document: tuple[int, int, int]
    last: bool


@dataclass(frozen=True, slots=True)
class Documents:
    """Whose tokens a router gets.

    Args:
        index: int64[t], each token's document, of `count`; padding is one.
        chunks: the documents that are chunks.
        calls: how often each router has run; a layer of multi-token prediction may be used several times.
    """

    index: Tensor
    count: int
    chunks: tuple[Chunk, ...] = ()
    calls: Counter[Any] = field(default_factory=Counter)


@dataclass(slots=True)
class WholeDocument:
    """What a router has seen of a document in chunks. counts, sums: float32[experts], its routes on all ranks and the
    sums of this rank's scores. complete: its last chunk is among them."""

    counts: Tensor
    sums: Tensor
    complete: bool = False


@dataclass(slots=True)
class Routed:
    """What routers are told, and have seen.

    Args:
        documents: those of the micro-batch that is routed now.
        in_backward: its backward runs.
        chunked: documents in chunks, by router, its call in a micro-batch, and document. Cleared where a step begins,
            ends or fails.
    """

    documents: Documents | None = None
    in_backward: bool = False
    chunked: dict[tuple[Any, int, tuple[int, int, int]], WholeDocument] = field(default_factory=dict)


def chunks_of(pieces: Sequence[Piece], shared: Chunks | None) -> tuple[Chunk, ...]:
    """The pieces that continue an earlier micro-batch's, or that a later one continues. shared: ShardPlan.chunks."""
    if shared is None:
        return ()
    continued = set(shared.continued.tolist())
    return tuple(
        Chunk(number, (piece.epoch, piece.document, piece.start - piece.prefix), number not in continued)
        for number, piece in enumerate(pieces)
        if piece.prefix or number in continued
    )


def begin(documents: Documents | None, *, in_backward: bool = False) -> None:
    """Note whose tokens are routed from now on. in_backward: so that what has counted does not count twice."""
    part(Routed).documents, part(Routed).in_backward = documents, in_backward


def begin_backward(documents: Documents | None, output: Any) -> None:
    """Note it again when the backward of the micro-batch that gave `output` begins."""
    if documents is not None and output.requires_grad:
        output.register_hook(lambda _: begin(documents, in_backward=True))


def wrap_apply_seq_aux_loss(
    original: Original,
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """TopKRouter._apply_seq_aux_loss by document, where a planned micro-batch is routed."""
    from megatron.core import parallel_state

    coefficient = self.get_aux_loss_coeff("seq_aux_loss")
    documents = part(Routed).documents
    if documents is None or coefficient == 0:
        return original(self, probs, scores_for_aux_loss, routing_map, *args, **kwargs)
    group = self.tp_cp_group
    loss, tokens = balance(self, scores_for_aux_loss, routing_map, documents)
    with weighed(tokens, parallel_state.get_data_parallel_world_size()):
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            coefficient * loss,
            "seq_load_balancing_loss",
            group,
            valid_token_count=tokens / group.size(),  # see routing.wrap_token_counts
        )


def wrap_routing(
    original: Original,
    self: Any,
    logits: Tensor,
    padding_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """TopKRouter.routing that counts the routes of chunks, too, in a forward that will be recomputed.

    Megatron takes no balancing loss there, and the first recomputation, of a last chunk, needs all routes.
    """
    documents = part(Routed).documents
    counts = self.training and not torch.is_grad_enabled() and self.get_aux_loss_coeff("seq_aux_loss")
    if counts and documents is not None and documents.chunks:
        from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

        routes, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, logits.shape[-1]),
            self.topk,
            self.score_function,
            fused=self.config.moe_router_fusion,
            padding_mask=None if padding_mask is None else padding_mask.reshape(-1),
        )
        _count(self, scores, routes, documents)
    return original(self, logits, padding_mask, *args, **kwargs)


def balance(router: Any, scores: Tensor, routes: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """This rank's part of the loss, a mean over the micro-batch's tokens; and how many these are.

    scores: [t, experts], 0 where a token is padding. routes: bool[t, experts], False there. Of a document of n tokens
    it is experts x sum over experts of (mean score) x (share of the routes), and the documents weigh by n. Parts add
    up over the router's ranks: scores are a rank's own, routes are counted over all. Its value has a document in chunks
    in the last one, its gradient in each.
    """
    counts, chunked = _count(router, scores, routes, documents)
    tokens = counts.sum() / router.topk
    loss: Tensor = _ScoresTimesShares.apply(scores.float(), documents.index, counts, chunked)
    return scores.shape[1] * loss / tokens.clamp(min=1), tokens


def _count(
    router: Any, scores: Tensor, routes: Tensor, documents: Documents
) -> tuple[Tensor, list[tuple[Chunk, WholeDocument]]]:
    """Routes of each document on all ranks, float32[documents, experts]. And each chunk's whole document, to which the
    chunk is added."""
    counts = routes.new_zeros((documents.count, routes.shape[1]), dtype=torch.float32)
    counts.index_add_(0, documents.index, routes.float())
    if router.tp_cp_group.size() > 1:
        torch.distributed.all_reduce(counts, group=router.tp_cp_group)
    state, chunked = part(Routed), []
    documents.calls[router] -= state.in_backward  # the last call is recomputed first
    for chunk in documents.chunks:
        nothing = WholeDocument(*counts.new_zeros((2, counts.shape[1])))
        document = state.chunked.setdefault((router, documents.calls[router], chunk.document), nothing)
        if not state.in_backward:
            document.complete = chunk.last
            document.counts += counts[chunk.piece]
            mine = (documents.index == chunk.piece).unsqueeze(1)
            document.sums += (scores.detach().float() * mine).sum(0)
        chunked.append((chunk, document))
    documents.calls[router] += not state.in_backward
    return counts, chunked


class _ScoresTimesShares(torch.autograd.Function):
    """Sum over tokens and experts of a score times the expert's share of the routes of the token's document.

    scores: float32[t, experts]; the rest as in Documents and _count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        index: Tensor,
        counts: Tensor,
        chunked: Sequence[tuple[Chunk, WholeDocument]],
    ) -> Tensor:
        ctx.index, ctx.counts, ctx.chunked = index, counts, chunked
        shares = _shares(counts)
        for chunk, _ in chunked:
            shares[chunk.piece] = 0
        loss = (scores * shares.index_select(0, index)).sum()
        return sum((d.sums @ _shares(d.counts) for chunk, d in chunked if chunk.last), loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        for chunk, document in ctx.chunked:
            if not document.complete:
                raise RuntimeError("backward of a chunk before the forward of its document's last one")
            ctx.counts[chunk.piece] = document.counts
        return (gradient * _shares(ctx.counts)).index_select(0, ctx.index), None, None, None


def _shares(counts: Tensor) -> Tensor:
    """Of each expert: float32[.., experts] from counts of routes."""
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
