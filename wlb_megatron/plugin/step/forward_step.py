"""Megatron's forward_step for planned micro-batches, and the loss per token, or the script's own loss function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector
from megatron.training import get_args, get_timers

from wlb_megatron.attention.core_attention import packed_seq_params
from wlb_megatron.plugin.logs import trace
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch, process_group
from wlb_megatron.plugin.model import routing
from wlb_megatron.plugin.model.routing import stage_padding_mask, stage_part
from wlb_megatron.plugin.script_functions import loss_to_call
from wlb_megatron.plugin.step.losses import claim, to_check
from wlb_megatron.plugin.step.multi_token import CountedMask
from wlb_megatron.plugin.step.recomputation import prepare_forward
from wlb_megatron.plugin.step.rehearsal import REHEARSAL

LossFunction = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
stimer = StragglerDetector()
SPIKY_LOSS_FACTOR = 10


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """One micro-batch forward. Returns the model's output and the function that makes the loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch: LoadedMicroBatch = next(data_iterator)
        plan, own_tokens = batch.planned, batch.held
        trace.begin_micro_batch(plan.index)
        tokens = labels = loss_mask = position_ids = None
        rows = None
        if own_tokens is not None:
            *tensors, _ = own_tokens  # the last is a number
            rows = tuple(tensor.cuda(non_blocking=True) for tensor in tensors)
            tokens, labels, loss_mask, position_ids = (of_depths[:1] for of_depths in rows)
        routed, sequence_parallel = {}, batch.layout.activation_divisor > 1  # under sequence parallelism
        if batch.padding_mask is not None:
            padding = batch.padding_mask.cuda(non_blocking=True)
            routed["padding_mask"] = stage_padding_mask(padding, model, sequence_parallel)
        documents = None
        if batch.document_of is not None:
            index = stage_part(batch.document_of.cuda(non_blocking=True), sequence_parallel)
            chunks = routing.chunks_of(plan.pieces, plan.shard.chunks)
            documents = routing.Documents(index, len(plan.pieces), chunks)
        routing.begin(documents)
        group = process_group(plan.group)
        params = packed_seq_params(batch.attention, group=group)
        params.documents = None if batch.documents is None else batch.documents.cuda()
        params.further, params.predicted = rows, 0.0 if own_tokens is None else own_tokens.predicted
        mask_for_model = loss_mask
        if rows is not None and len(rows[0]) > 1 and not params.predicted:
            # Tokens may predict only further ones (targets). Megatron multiplies those losses by the mask's sum.
            params.predicted = 1.0
            mask_for_model = CountedMask.of(rows[2][:1], rows[2].new_ones(()))
    timers("batch-generator").stop()
    prepare_forward(model, plan.index)
    with stimer:
        output = model(
            tokens,
            position_ids,
            None,
            labels=labels,
            loss_mask=mask_for_model,
            packed_seq_params=params,
            **routed,
        )
    deferred = claim(output)
    routing.begin_backward(documents, output)
    loss: LossFunction = sum_of_losses
    if plan.iteration != REHEARSAL:  # which leaves the script's own, and what it counts, alone
        distills = getattr(get_args(), "modelopt_enabled", False)
        loss = loss_to_call(model, distills=distills) or loss_per_token
    function = partial(loss, loss_mask)
    return output, function if deferred is None else partial(deferred.begin, function)


def sum_of_losses(
    loss_mask: Any, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of this rank's token losses, the number of tokens that predict something, and both for the log."""
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask)
    count = mask.sum().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.detach().view(1), count.view(1).to(loss.dtype)])}


def loss_per_token(
    loss_mask: Any, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """sum_of_losses, checked by Megatron's rerun state machine as its own loss function does.

    For NaN and infinity a step's losses are checked together (losses.py).
    """
    args = get_args()
    result = sum_of_losses(loss_mask, output)
    together = to_check(result[0])
    rerun = get_rerun_state_machine()
    validate = partial(rerun.validate_result, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad and together is not None:
        for rejection, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {what} in local forward loss calculation"
            validate(result=together, rejection_func=rejection, message=message, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        validate(result=result[0], rejection_func=spiky, message="Spiky loss", fatal=False)
    return result
