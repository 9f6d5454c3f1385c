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
        return next_mask(tensor, packed_seq_params.following, packed_seq_params.share, group)

    return roll_tensor


def next_mask(
    mask: torch.Tensor, following: torch.Tensor, share: float, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss mask one place later, and the sum that Megatron is told of it. share: of what the micro-batch predicts
    without the roll, this rank's.

    Megatron multiplies a rank's masked losses by (what it predicts without the roll / the sum told, at least 1). Told
    the rank's share of the micro-batch's sum, that is one factor for all ranks, as in a single process. Where that is
    below 1 the mask has it instead: of 7 predictions a rank has 1, after the roll 5 are left, 5/7 are its share, so
    its mask is 7/5 and it tells 1.
    """
    own, total = next_in_document((mask != 0).to(mask.dtype), following, group)
    told = total * share
    return own / torch.where(told > 0, told.clamp(max=1), 1), torch.where(told > 0, told.clamp(min=1), 0)


def next_in_document(
    tensor: torch.Tensor, following: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the next tokens of the same documents (0 where there is none), and their sum over all ranks.

    tensor: [1, t], a value for each of the rank's tokens. following: int32[T] of sharding.following. group: the ranks
    that share the micro-batch, None for this one alone; they exchange 8 bytes a token.
    """
    size = 1 if group is None else torch.distributed.get_world_size(group)
    rank = 0 if size == 1 else torch.distributed.get_rank(group)
    values = tensor.new_zeros(len(following) + 1)  # the last one is what follows a document's end
    if size == 1:
        values[:-1] = tensor.flatten()
    else:
        torch.distributed.all_gather_into_tensor(values[:-1], tensor.flatten(), group=group)
    later = values.index_select(0, following)
    return later.chunk(size)[rank].view(tensor.shape), later.sum()
