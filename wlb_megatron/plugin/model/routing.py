"""Experts' routers that count documents' tokens alone, not the padding at a micro-batch's end.

Megatron's routers take a padding mask (True where nothing is to be counted) for their balancing losses and their
experts' biases; the plugin's forward_step gives it. What remains is here: the mask of a pipeline stage under sequence
parallelism, two places where Megatron's routers do not expect that ranks hold unequally much padding, and the strength
of routers' losses before 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch


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


def wrap_token_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """get_tokens_per_expert_and_token_count whose count of a rank is the mean over its ranks.

    A rank's part of the balancing loss is weighted by its count times the ranks, to undo the division by all tokens.
    Where ranks hold 30 and 28 tokens (and 2 of padding), weights 60 and 56 would count the first rank's part for more:
    both get 58.
    """

    def get_tokens_per_expert_and_token_count(
        routing_map: Any,
        reduce_group: Any,
        topk: Any = None,
        with_padding_mask: bool = False,
        reduce_groups: Any = None,  # instead of reduce_group, in Megatron's dev branch
    ) -> Any:
        several = {} if reduce_groups is None else {"reduce_groups": reduce_groups}
        experts, local, total = original(
            routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask, **several
        )
        ranks = prod(group.size() for group in reduce_groups or (reduce_group,))
        return experts, total / ranks if with_padding_mask else local, total

    return get_tokens_per_expert_and_token_count


def wrap_apply_expert_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """TopKRouter._apply_expert_bias given the routes that count; up to 0.19 it fails on a mask of tokens.

    It takes `map[tokens, experts] & mask[tokens]`, which does not broadcast.
    """

    def _apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> Any:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.view(-1, 1)
        return original(self, routing_map)

    return _apply_expert_bias


def wrap_set_loss_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """MoEAuxLossAutoScaler.set_loss_scale, for Megatron before 0.19: times the ranks that share a micro-batch.

    Gradients are divided by the tokens of all micro-batches. Up to 0.18 a router therefore multiplies its losses
    (balancing and z-loss) by the tokens of its own rank: with tensor parallelism of T (and sequence parallelism) and
    context parallelism of C, 1/(T * C) of the micro-batch. From 0.19 it multiplies by T * C as well.
    """

    def set_loss_scale(scale: torch.Tensor) -> None:
        from megatron.core import parallel_state

        original(scale * parallel_state.get_tensor_and_context_parallel_group().size())

    return set_loss_scale
