"""Routers' balancing loss of a sequence (seq_aux_loss), taken of each document.

Megatron takes it of the whole packed sequence. Here a document's tokens are summed wherever they are held, and each
document weighs by its tokens, so that its part does not depend on which others share its micro-batch. Routers are not
given the micro-batch that they route: it is noted before its forward, and again when its backward begins, for layers
that are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wlb_megatron.plugin.job_state import part


@dataclass(frozen=True, slots=True)
class Documents:
    """index: int64[t], of which of `count` documents each of the tokens is that a router here gets; padding is one."""

    index: Tensor
    count: int


@dataclass(slots=True)
class Routed:
    """documents: of the micro-batch whose tokens routers get now."""

    documents: Documents | None = None


def begin(documents: Documents | None) -> None:
    """Note whose tokens are routed from now on."""
    part(Routed).documents = documents


def begin_backward(documents: Documents | None, output: Any) -> None:
    """Note it again when the backward of the micro-batch that gave `output` begins."""
    if documents is not None and output.requires_grad:
        output.register_hook(lambda _: begin(documents))


def wrap_apply_seq_aux_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """TopKRouter._apply_seq_aux_loss by document, where a planned micro-batch is routed."""

    def _apply_seq_aux_loss(
        self: Any, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *rest: Any, **more: Any
    ) -> Any:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        documents = part(Routed).documents
        if documents is None or coefficient == 0:
            return original(self, probs, scores_for_aux_loss, routing_map, *rest, **more)
        group = self.tp_cp_group
        loss, tokens = balance(scores_for_aux_loss, routing_map, documents, self.topk, group)
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            coefficient * loss,
            "seq_load_balancing_loss",
            group,
            valid_token_count=tokens / group.size(),  # see routing.wrap_token_counts
        )

    return _apply_seq_aux_loss


def balance(
    scores: Tensor, routes: Tensor, documents: Documents, topk: int, group: Any
) -> tuple[Tensor, Tensor]:
    """This rank's part of the loss, a mean over the micro-batch's tokens; and how many these are.

    scores: [t, experts], 0 where a token is padding. routes: bool[t, experts], False there. Of a document of n tokens
    it is experts x sum over experts of (mean score) x (share of the routes), and the documents weigh by n. Parts add
    up over `group`: scores are a rank's own, routes are counted over all.
    """
    experts = scores.shape[1]
    counts = routes.new_zeros((documents.count, experts), dtype=torch.float32)
    counts.index_add_(0, documents.index, routes.float())
    if group.size() > 1:
        torch.distributed.all_reduce(counts, group=group)
    lengths = counts.sum(1) / topk
    shares = counts / (topk * lengths.clamp(min=1)).unsqueeze(1)
    # n x (sum of scores / n) x share, of each token's document.
    sums = (scores.float() * shares.index_select(0, documents.index)).sum()
    tokens = lengths.sum()
    return experts * sums / tokens.clamp(min=1), tokens
