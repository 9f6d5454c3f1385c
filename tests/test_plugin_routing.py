"""Routers' statistics leave padding out, on every rank and pipeline stage."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
)

from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import Piece, PlanSummary
from wlb_megatron.plugin import hooks
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import padding_mask
from wlb_megatron.plugin.micro_batches.planning import PlannedMicroBatch
from wlb_megatron.plugin.model import routing
from wlb_megatron.plugin.model.routing import (
    Documents,
    balance,
    chunks_of,
    stage_padding_mask,
    wrap_apply_expert_bias,
    wrap_apply_seq_aux_loss,
    wrap_routing,
    wrap_set_loss_scale,
    wrap_token_counts,
)
from wlb_megatron.sharding.cut import cut, pad, shard
from wlb_megatron.workload.kernel_table import h100

SUMMARY = PlanSummary(0, 0, 0, 0, 1.0, 1.0, 1.0, 1, 0, 0.0, 0, 0)


@pytest.mark.parametrize("sharding", ["per-sequence", "per-document", "hybrid"])
def test_ranks_together_mask_just_the_padding_piece(sharding):
    """Documents of 13 and 5 tokens on 4 ranks: two tokens of padding, as a third piece."""
    pieces = pad((Piece(0, 0, 0, 13), Piece(0, 1, 0, 5)), 4)
    plan = shard(np.array([13, 5, 2]), 4, sharding)
    planned = PlannedMicroBatch(0, 0, pieces, plan, SUMMARY, 0.0)
    masked = []
    for rank in range(4):
        mask = padding_mask(planned, rank)
        assert len(mask) == plan.tokens_per_rank[rank]
        masked += plan.packed_index(rank)[mask].tolist()
    assert sorted(masked) == [18, 19]


def test_nothing_is_masked_where_nothing_is_padded():
    plan = shard(np.array([6, 2]), 2, "per-document")
    planned = PlannedMicroBatch(0, 0, (Piece(0, 0, 0, 6), Piece(0, 1, 0, 2)), plan, SUMMARY, 0.0)
    assert not any(padding_mask(planned, rank).any() for rank in range(2))


def test_ranks_weigh_alike_where_one_holds_the_padding():
    """Of two ranks, this one with 28 tokens and 2 of padding: both weigh 58 / 2."""
    counts = partial(wrap_token_counts, lambda *_, **__: ("experts", torch.tensor(28.0), torch.tensor(58.0)))
    ranks = SimpleNamespace(size=lambda: 2)
    assert counts(None, ranks, topk=1, with_padding_mask=True) == ("experts", 29.0, 58.0)
    assert counts(None, ranks, topk=1) == ("experts", 28.0, 58.0)
    groups = (ranks, SimpleNamespace(size=lambda: 4))  # of Megatron's dev branch
    assert counts(None, ranks, topk=1, with_padding_mask=True, reduce_groups=groups)[1] == 58 / 8


def test_biases_count_no_padding_and_megatron_gets_no_mask_to_fail_on():
    seen: list[Any] = []
    apply = partial(wrap_apply_expert_bias, lambda *arguments: seen.append(arguments))
    routes = torch.tensor([[True, False, True], [True, True, False]])
    apply("router", routes, torch.tensor([False, True]))
    apply("router", routes)
    unpadded = [[True, False, True], [False, False, False]]
    assert [arguments[1].tolist() for arguments in seen] == [unpadded, routes.tolist()]
    assert all(len(arguments) == 2 for arguments in seen)


def test_routers_losses_weigh_by_the_whole_micro_batch_before_0_19(monkeypatch):
    """TP=2 with CP=3: up to 0.18 a router multiplies its losses by its own sixth of the tokens alone."""
    ranks = SimpleNamespace(size=lambda: 6)
    monkeypatch.setattr(parallel_state, "get_tensor_and_context_parallel_group", lambda: ranks)
    scales: list[float] = []
    set_loss_scale = partial(wrap_set_loss_scale, lambda scale: scales.append(float(scale)))
    set_loss_scale(torch.tensor([2.0]))
    assert scales == [12.0]


@pytest.mark.parametrize(("version", "mended"), [("0.18.3", True), ("0.19.1", False)])
def test_the_strength_of_routers_losses_is_mended_where_megatron_does_not(version, mended, monkeypatch):
    monkeypatch.setattr(hooks, "megatron_version", lambda: version)
    assert any(hook.wrap is wrap_set_loss_scale for hook in hooks.rows()) == mended


def test_a_later_stage_gets_its_part_of_the_mask(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    mask = torch.tensor([[False, False, False, True]])
    first = SimpleNamespace(module=SimpleNamespace(pre_process=True))
    later = SimpleNamespace(module=SimpleNamespace(pre_process=False))
    assert stage_padding_mask(mask, first, True) is mask
    assert stage_padding_mask(mask, later, False) is mask
    assert stage_padding_mask(mask, later, True).tolist() == [[False, True]]


LENGTHS_OF = (5, 1, 9, 3)
"""Documents (tokens); the last is padding."""


def routed(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [18, 4] of tokens that each go to two experts, the routes, and each token's document."""
    index = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS_OF))
    scores = torch.rand(18, 4, generator=generator, dtype=torch.float64).softmax(-1)
    routes = torch.zeros(18, 4, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    real = (index != 3).unsqueeze(1)
    return (scores * real).requires_grad_(), routes & real, index


class Router:
    """As far as the balance of documents looks at one. ranks: that hold parts of its tokens."""

    topk, training, score_function = 2, True, "softmax"
    config = SimpleNamespace(moe_router_fusion=False)

    def __init__(self, ranks: int = 1) -> None:
        self.tp_cp_group = SimpleNamespace(size=lambda: ranks)

    def get_aux_loss_coeff(self, kind: str) -> float:
        return float(kind == "seq_aux_loss")


def balance_of_each(
    scores: torch.Tensor, routes: torch.Tensor, index: torch.Tensor, count: int
) -> torch.Tensor:
    """The sum of Megatron's losses of so many documents, each alone and times its tokens."""
    losses = []
    for mine in (index == document for document in range(count)):
        length = int(mine.sum())
        loss = switch_load_balancing_loss_func(scores[mine], routes[mine].sum(0), length, 2, 4, 1.0)
        losses.append(length * loss)
    return torch.stack(losses).sum()


def test_a_documents_balance_is_megatrons_of_it_alone_and_weighs_by_its_tokens(monkeypatch):
    """On one rank, and as parts of two that hold tokens of all documents."""
    scores, routes, index = routed(torch.Generator().manual_seed(0))
    right = balance_of_each(scores, routes, index, 3) / sum(LENGTHS_OF[:3])
    (wanted,) = torch.autograd.grad(right, scores)
    loss, tokens = balance(Router(), scores, routes, Documents(index, 4))
    assert tokens == 15 and torch.allclose(loss.double(), right, rtol=1e-6)
    halves, pair = (index % 2 == 0, index % 2 == 1, torch.arange(18) % 3 == 0), Router(2)
    for mine in (halves[0], halves[2]):
        other = Documents(index[~mine], 4)
        theirs = torch.zeros(4, 4).index_add_(0, other.index, routes[~mine].float())
        monkeypatch.setattr(
            torch.distributed, "all_reduce", lambda counts, group, theirs=theirs: counts.add_(theirs)
        )
        part, tokens = balance(pair, scores[mine], routes[mine], Documents(index[mine], 4))
        assert tokens == 15
        (gradient,) = torch.autograd.grad(part, scores)
        assert torch.allclose(gradient[mine], wanted[mine], rtol=1e-5) and not gradient[~mine].any()


IN_CHUNKS = (
    (Piece(0, 0, 0, 4), Piece(0, 1, 0, 3)),
    (Piece(0, 0, 4, 7, 4), Piece(0, 2, 0, 2)),
    (Piece(0, 0, 7, 9, 7),),
)
"""Three micro-batches: a document of 9 tokens in chunks, and two whole ones."""


@pytest.mark.parametrize("recomputed", [False, True])
def test_chunks_balance_as_their_document_whole_whether_their_layer_is_recomputed_or_not(recomputed):
    """Values add up to the whole documents', and each token's gradient is that of its whole document."""
    logits = torch.randn(14, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    pieces = [piece for row in IN_CHUNKS for piece in row]
    document = torch.tensor([piece.document for piece in pieces for _ in range(piece.tokens)])
    routes, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    right = balance_of_each(scores, routes, document, 3)
    (wanted,) = torch.autograd.grad(right, logits)
    lengths = [np.array([piece.tokens for piece in row]) for row in IN_CHUNKS]
    plans = cut(lengths, 1, "per-document", h100(), links_of(IN_CHUNKS))
    micro_batches = []
    for row, size, plan in zip(IN_CHUNKS, lengths, plans, strict=True):
        of_tokens = torch.arange(len(row)).repeat_interleave(torch.tensor(size))
        micro_batches.append(Documents(of_tokens, len(row), chunks_of(row, plan.chunks)))
    router, held = Router(), logits.split([7, 5, 2])

    def loss_of(at: int) -> torch.Tensor:
        routes, scores = compute_routing_scores_for_aux_loss(held[at], 2, "softmax")
        loss, tokens = balance(router, scores, routes, micro_batches[at])
        return loss * tokens

    losses = {}
    for at, documents in enumerate(micro_batches):
        routing.begin(documents)
        if recomputed:
            with torch.no_grad():
                assert wrap_routing(lambda _, logits, mask: logits, router, held[at][:, None]).shape[1] == 1
        else:
            losses[at] = loss_of(at)
        if at == 1 and not recomputed:
            with pytest.raises(RuntimeError, match="before the forward of its document's last one"):
                losses[0].backward(retain_graph=True)
    total, gradient = 0.0, torch.zeros_like(wanted)
    for at in (2, 1, 0):
        routing.begin(micro_batches[at], in_backward=True)
        loss = losses[at] if at in losses else loss_of(at)
        total += float(loss.detach())
        gradient += torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert total == pytest.approx(float(right.detach()), rel=1e-6)
    assert torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    part(routing.Routed).chunked.clear()
    assert not part(routing.Routed).chunked


def test_routers_of_a_layer_that_is_recomputed_get_its_own_micro_batchs_documents():
    seen = []
    first, second = (Documents(torch.tensor([at]), 1) for at in (0, 1))

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(part(routing.Routed).documents)
            return gradient

    outputs = []
    for documents in (first, second):
        routing.begin(documents)
        outputs.append(Recomputed.apply(torch.ones(1, requires_grad=True)) * 2)
        routing.begin_backward(documents, outputs[-1])
    for output in outputs:
        output.sum().backward()
    routing.begin_backward(first, torch.ones(1))  # an evaluation's has none
    routing.begin(None)
    assert seen == [first, second]


def test_without_a_plan_megatrons_own_loss_is_taken(monkeypatch):
    apply = partial(wrap_apply_seq_aux_loss, lambda *args, **kwargs: (args, kwargs))
    router = SimpleNamespace(get_aux_loss_coeff=lambda kind: 0.1)
    arguments = router, "probs", "scores", "routes", 8, 1
    assert apply(*arguments, with_padding_mask=True) == (arguments, {"with_padding_mask": True})
