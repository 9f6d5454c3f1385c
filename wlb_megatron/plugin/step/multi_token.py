"""Multi-token prediction over planned micro-batches.

A layer that predicts one token further takes inputs, labels and loss mask from one place later in the same document.
Megatron rolls them by its own layout of packed sequences, with a message to the neighbor at each roll. Here each rank
has read them with its tokens, a row for each depth (HeldTokens): also where the next token is in the document's next
chunk, or on another rank. A roll gives the next row.
"""

from __future__ import annotations

import inspect
from copy import copy
from typing import Any

import torch

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.plugin.logs import logged_losses
from wlb_megatron.refusals import Refused

UNPLANNED = "multi-token prediction got a micro-batch that was not planned for it"


def wrap_roll_tensor(
    original: Original,
    rolled: Any,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """roll_tensor of multi_token_prediction: by the plan, where it is given one. Megatron's dev branch rolls a list of
    tensors, and sums the mask itself."""
    if rolled is None or not _planned(packed_seq_params, shifts):
        return original(rolled, shifts, dims, cp_group, packed_seq_params, *args, **kwargs)
    if isinstance(rolled, torch.Tensor):
        return _rolled(rolled, packed_seq_params)
    rows = [_rolled(tensor, packed_seq_params) for tensor in rolled]
    return [CountedMask.of(row, total) if row.is_floating_point() else row for row, total in rows]


class CountedMask(torch.Tensor):
    """A loss mask whose sum is the number that Megatron is to get; a plain tensor to all other operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    total: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor, total: torch.Tensor) -> CountedMask:
        view = mask.as_subclass(cls)
        view.total = total
        return view

    def sum(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.total


def _planned(params: Any, shifts: int) -> bool:
    """Whether a roll is of a planned micro-batch; an error where it was not planned for it."""
    from wlb_megatron.attention.core_attention import WlbPackedSeqParams

    if not isinstance(params, WlbPackedSeqParams):
        return False
    if params.further is None or shifts != -1:
        raise WlbError(UNPLANNED)
    return True


def _rolled(tensor: torch.Tensor, params: Any) -> tuple[torch.Tensor, Any]:
    """The row after the tensor's, and what Megatron gets as the sum of a mask.

    Each depth's losses count in the gradient as if they were as many as the first predictions: times (predictions of
    the iteration / those left at this depth). Megatron takes both counts of its own micro-batch, which would make a
    document's weight depend on which others share it. It multiplies the masked losses by (what the rank predicts
    without a roll / the sum it gets, at least 1), so it gets just that and the mask has the factor.
    """
    if tensor.dtype is torch.bool:
        return tensor, tensor.sum()  # routers' padding mask: padding stays where it is
    places = [(rows, row) for rows in params.further if (row := _row(tensor, rows)) is not None]
    if not places and not params.copied and not tensor.is_floating_point():
        params.copied = True  # releases copy the labels, before they roll them first
        places = [(params.further[1], 0)]
    if not places or places[0][1] + 1 == len(places[0][0]):
        raise WlbError(UNPLANNED)
    rows, row = places[0]
    next_row = rows[row + 1 : row + 2]
    if not next_row.is_floating_point():
        return next_row, None
    part(logged_losses.LoggedLosses).predicted = params.predicted
    return next_row, next_row.new_full((), params.predicted)


def _row(tensor: torch.Tensor, rows: torch.Tensor) -> int | None:
    """Which of the rows the tensor is, None if none."""
    if tensor.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
        return None
    return int(tensor.storage_offset() - rows.storage_offset()) // rows.shape[1]


def wrap_layer_forward(
    original: Original, self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any
) -> Any:
    """MultiTokenPredictionLayer.forward, whose attention is told the depth: with --mtp-use-repeated-layer one layer
    keeps a chunk's keys of each."""
    if _planned(packed_seq_params, -1):
        depth = _row(kwargs["input_ids"], packed_seq_params.further[0])
        packed_seq_params = copy(packed_seq_params)
        packed_seq_params.depth = depth
    return original(self, *args, packed_seq_params=packed_seq_params, **kwargs)


def wrap_is_inference_linear(original: Original, module: Any) -> bool:
    """is_inference_column_parallel_linear, which multi-token prediction asks of its layers since 0.20: False where
    Transformer Engine is missing. Megatron's classes derived from its own are then objects that isinstance does not
    take."""
    try:
        return bool(original(module))
    except TypeError:
        return False


def wrap_track_metrics(original: Original, *args: Any, **kwargs: Any) -> Any:
    """track_mtp_metrics as logged_losses has it, but for a Megatron that divides by predictions itself."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    save = getattr(MTPLossLoggingHelper, "save_loss_to_tracker", None)
    if save is not None and "num_tokens" in inspect.signature(save).parameters:
        return original(*args, **kwargs)
    return logged_losses.wrap_report(original, *args, **kwargs)


def refuse_other_form(depths: int) -> None:
    """Refuse --mtp-num-layers where Megatron's roll_tensor has another form, so that it was left as it is.

    depths: further tokens that are predicted.
    """
    if not depths:
        return
    from megatron.core.transformer import multi_token_prediction

    if not hasattr(multi_token_prediction.roll_tensor, "__wlb_original__"):
        raise Refused(
            "--mtp-num-layers: this Megatron rolls labels and masks in a form that the plugin "
            "does not know; use a release, or leave the flag out."
        )
