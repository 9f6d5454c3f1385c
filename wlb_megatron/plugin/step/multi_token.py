"""Multi-token prediction over planned micro-batches.

A layer that predicts one token further takes inputs, labels and loss mask from one place later in the same document.
Megatron rolls them by its own layout of packed sequences; here they are taken by the plan's, wherever the next token is
held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wlb_megatron.errors import WlbError
from wlb_megatron.refusals import Refused


def wrap_roll_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """roll_tensor of multi_token_prediction: by the plan, where it is given one."""

    def roll_tensor(
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **rest: Any,
    ) -> Any:
        from wlb_megatron.attention.core_attention import WlbPackedSeqParams

        if tensor is None or not isinstance(packed_seq_params, WlbPackedSeqParams):
            return original(tensor, shifts, dims, cp_group, packed_seq_params, **rest)
        if packed_seq_params.following is None or shifts != -1:
            raise WlbError("multi-token prediction got a micro-batch that was not planned for it")
        if tensor.dtype is torch.bool:
            return tensor, tensor.sum()  # routers' padding mask: padding stays where it is
        group = packed_seq_params.group or cp_group
        if not tensor.is_floating_point():  # inputs and labels
            return next_in_document(tensor, packed_seq_params.following, group)
        return next_mask(tensor, packed_seq_params, group)

    return roll_tensor


def wrap_is_inference_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    """is_inference_column_parallel_linear, which multi-token prediction asks of its layers since 0.20: False where
    Transformer Engine is missing. Megatron's classes derived from its own are then objects that isinstance does not
    take."""

    def is_inference_linear(module: Any) -> bool:
        try:
            return bool(original(module))
        except TypeError:
            return False

    return is_inference_linear


def refuse_other_form(depths: int) -> None:
    """Refuse --mtp-num-layers where Megatron's roll_tensor has another form, so that it was left as it is.

    depths: further tokens that are predicted.
    """
    if not depths:
        return
    from megatron.core.transformer import multi_token_prediction

    if not hasattr(multi_token_prediction.roll_tensor, "__wlb_original__"):
        raise Refused(
            "wlb_megatron refuses --mtp-num-layers: this Megatron (its dev branch) counts the predictions of each "
            "depth by micro-batch, in a form that the plan cannot correct; use a release, or leave the flag out."
        )


def next_mask(mask: torch.Tensor, params: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss mask one place later times the depth's factor, and the sum that Megatron is told of it.

    Each depth's losses count in the gradient as if they were as many as the first predictions: times (predictions of
    the iteration / those left at this depth). Megatron takes both counts of its own micro-batch, which would make a
    document's weight depend on which others share it. It multiplies the masked losses by (what the rank predicts
    without a roll / the sum told, at least 1), so it is told just that and the mask has the factor.
    """
    later, _ = next_in_document((mask != 0).to(mask.dtype), params.following, group)
    return later * next(params.factors), mask.new_full((), params.predicted)


def next_in_document(
    tensor: torch.Tensor, following: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the next tokens of the same documents (0 where there is none), and their sum over all ranks.

    tensor: [1, t], a value for each of the rank's tokens. following: int32[T] of sharding.following. group: the ranks
    that share the micro-batch, unless this one holds all of it; they exchange 8 bytes a token.
    """
    size = len(following) // tensor.numel()  # ranks hold equally many tokens
    rank = 0 if size == 1 else torch.distributed.get_rank(group)
    values = tensor.new_zeros(len(following) + 1)  # the last one is what follows a document's end
    if size == 1:
        values[:-1] = tensor.flatten()
    else:
        torch.distributed.all_gather_into_tensor(values[:-1], tensor.flatten(), group=group)
    later = values.index_select(0, following)
    return later.chunk(size)[rank].view(tensor.shape), later.sum()
