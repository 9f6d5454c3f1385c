"""Losses of a step: divided by tokens before their backward, checked together, and in groups deferred until then.

Megatron sums a loss per token and divides the gradients by all tokens of the step at the end. Two kinds of steps divide
losses before their backward instead.
fp16: a sum brings the largest scale without overflow down by the number of tokens, and each step down throws an
iteration's update away. The plan knows the number beforehand, so losses are divided by it, and the scale multiplies a
mean, as without the plugin.
--wlb-token-weights equal: steps have more and fewer tokens, so a mean gives a token of a full step less weight. The
number is that of the global batch's windows in every step.

Megatron checks losses for NaN and infinity in each micro-batch. Each check waits for the device, and the host has then
launched nothing ahead. A sum of losses is NaN or infinite if one of them is, and no weight changes before the end of a
step. So the last micro-batch's check is of the sum.

In a step in groups the output layer and the loss of a micro-batch run right before its backward. A group's
micro-batches all run forward before the first of them runs backward. Logits kept that long are as many as the document
has tokens: 262,144 tokens and a vocabulary of 48,000 take 50 GB, and took two GPUs to 120 GB where the layers' keys and
activations needed 37 GiB. Nothing needs a loss before its backward, so it is made then. Nothing is computed twice.

Not with FSDP, whose parameters are gathered for a forward of the whole model. Nor where something between the model
(GPTModel or HybridModel) and the loss function may read the losses or change them: a script's own model or wrapper, or
a hook. What is not seen beforehand ends the job: an output that is not the one that was made, and a step with fewer
losses than micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from wlb_megatron.plugin.job_state import Original, part
from wlb_megatron.refusals import RefusedHere


@contextmanager
def divided_losses(config: Any, tokens: int) -> Iterator[None]:
    """A forward_backward call in which losses are divided by so many tokens; by none if that is 0.

    config: the model's, which holds Megatron's functions for the loss scale and for reducing gradients. The losses of
    routers and of multi-token prediction take their scale from it, too.
    """
    if not tokens:
        yield
        return
    scale, finalize = config.grad_scale_func, config.finalize_model_grads_func

    def scale_divided(loss: Any) -> Any:
        return (loss if scale is None else scale(loss)) / tokens

    def finalize_undivided(model: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        # One token over all ranks. Without a number Megatron would not scale at all, and FSDP2's gradients, which are
        # averages over ranks, would not become sums (wrap_scale_gradients).
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return finalize(model, torch.full_like(num_tokens, int(first)), *args, **kwargs)

    config.grad_scale_func, config.finalize_model_grads_func = scale_divided, finalize_undivided
    try:
        yield
    finally:
        config.grad_scale_func, config.finalize_model_grads_func = scale, finalize


def wrap_scale_gradients(original: Original, self: Any, scaling_factor: Any) -> None:
    """TorchFullyShardedDataParallel.scale_gradients that divides by tokens, where Megatron does nothing.

    FSDP2 averages gradients over the data- and context-parallel ranks, whatever their tokens. Losses are sums over
    tokens here: 4 ranks' average, times 4, over all tokens is the gradient of the mean over tokens.
    """
    factor = scaling_factor * self.process_group.size()
    for parameter in self.module.parameters():
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.mul_(factor)


@dataclass(slots=True)
class StepLosses:
    """remaining: how many losses of the step are not yet there. total: the sum of the others."""

    remaining: int = 0
    total: torch.Tensor | None = None


def check_together(micro_batches: int) -> None:
    """The losses of so many micro-batches are checked together."""
    part(StepLosses).remaining, part(StepLosses).total = micro_batches, None


def to_check(loss: torch.Tensor) -> torch.Tensor | None:
    """What to check now that `loss` is there: the step's sum with its last one, before that nothing."""
    step = part(StepLosses)
    step.total = loss.detach() if step.total is None else step.total + loss.detach()
    step.remaining -= 1
    if step.remaining > 0:
        return None
    total, step.total = step.total, None
    return total


@contextmanager
def unchecked() -> Iterator[None]:
    """In a `with` block Megatron's rerun state machine validates nothing, so it counts no call and learns no size.

    After a NaN it compares the n-th call of a step with the n-th of its rerun, which a second job makes on another GPU.
    If that job rehearsed in the step, rehearsed calls would come first: the machine would compare one of them with the
    NaN, and accuse the first job's GPU.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    # Its mode `disabled` still ends a job, at a NaN that nobody uses.
    machine.validate_result = lambda *_, **__: None
    try:
        yield
    finally:
        del machine.validate_result


LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""Loss, number of tokens, and what is logged, from the losses of tokens: Megatron's loss function."""


class DeferredLoss:
    """One micro-batch's. losses: runs the output layer, and gives the losses of its tokens."""

    _function: LossFunction

    def __init__(self, losses: Callable[[], torch.Tensor]) -> None:
        self._losses, self._logged = losses, dict[str, torch.Tensor]()

    def begin(
        self, function: LossFunction, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Stands for `function` in the forward: a loss and a number of tokens of 0. `run` fills in what is logged,
        which Megatron reads after the step, and counts the tokens."""
        self._function = function
        return output, torch.zeros((), dtype=torch.int, device=output.device), self._logged

    def run(self) -> torch.Tensor:
        """The loss, from which the backward begins. It is made once: schedules hold a model's output until after its
        backward, and with it what its losses are made of."""
        loss, count, logged = self._function(self._losses())
        del self._function, self._losses
        self._logged.update(logged)
        step = part(Deferring)
        step.losses_run += 1
        step.tokens = count if step.tokens is None else step.tokens + count
        return loss


@dataclass(slots=True)
class Deferring:
    """The deferred losses of the step that runs, if it is `active`.

    Args:
        forward_loss: that of the forward that runs.
        losses_run: how many have run.
        tokens: the sum that these have counted.
        reason_shown: the line on why losses stay in the forward has been printed.
    """

    active: bool = False
    forward_loss: DeferredLoss | None = None
    losses_run: int = 0
    tokens: torch.Tensor | None = None
    reason_shown: bool = False


@contextmanager
def deferring(defers: bool, config: Any, micro_batches: int) -> Iterator[None]:
    """Defer the losses of a step, if it is so planned.

    config: the model's, whose function for reducing gradients gets the tokens that losses have counted. micro_batches:
    of the step, whose losses this stage makes; 0 on all but the last. RefusedHere where it has made another number.
    """
    if not defers:
        yield
        return
    state, finalize = part(Deferring), config.finalize_model_grads_func
    state.active, state.forward_loss, state.tokens, state.losses_run = True, None, None, 0

    def finalize_counted(model: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        if state.tokens is not None:
            num_tokens = num_tokens + state.tokens.to(num_tokens.dtype)
        return finalize(model, num_tokens, *args, **kwargs)

    config.finalize_model_grads_func = finalize_counted
    try:
        yield
    finally:
        state.active, config.finalize_model_grads_func = False, finalize
    if state.losses_run != micro_batches:
        raise _lost(f"of {micro_batches} micro-batches {state.losses_run} have run their losses")


def _lost(what: str) -> RefusedHere:
    return RefusedHere(
        f"wlb_megatron: {what}. Losses of documents in chunks are made right before the backward, so nothing between "
        "the model and the loss function may change its output: add --wlb-chunks off, or leave out the wrapper that "
        "does"
    )


def returns_its_losses(model: Any) -> bool:
    """Whether a stage's last model chunk, as Megatron wraps it, returns what Megatron's GPTModel or HybridModel does.

    False where a script's class overrides their forward, or holds the model inside, or where a hook or a wrapper
    may read or change losses. Printed the first time.
    """
    from megatron.training import print_rank_0

    changes, state = _what_may_change(model), part(Deferring)
    if changes is not None and not state.reason_shown:
        state.reason_shown = True
        print_rank_0(
            f"> wlb_megatron: {changes}, so those of documents in chunks stay in the forward: logits of all chunks are "
            "kept at once, which estimates of memory leave out"
        )
    return changes is None


def _what_may_change(model: Any) -> str | None:
    """What may read or change losses on their way through the model and its wrappers, None where nothing does."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    names = ("forward", "_postprocess")
    while True:
        outer = type(model)
        if model._forward_hooks or model._backward_hooks or model._backward_pre_hooks:
            return f"a hook on {outer.__name__} may read or change its losses"
        if not hasattr(model, "module"):
            break
        package = str(getattr(outer.forward, "__module__", "")).split(".")[0]
        if "forward" in vars(model) or package not in ("megatron", "torch"):
            return f"{outer.__name__} may read or change losses"
        model = model.module  # DDP and mixed precision wrap it
    if any(
        all(getattr(outer, name, None) is getattr(kind, name, None) for name in names)
        for kind in (GPTModel, HybridModel)
    ):
        return None
    return f"{outer.__name__} does not return its losses as GPTModel or HybridModel does"


def claim(output: Any) -> DeferredLoss | None:
    """That of a model's output, when its forward has ended; None where losses are not deferred. RefusedHere where the
    output is not the one that was made, or was changed in place."""
    state = part(Deferring)
    deferred, state.forward_loss = state.forward_loss, None
    if deferred is not None and (getattr(output, "deferred_loss", None) is not deferred or output._version):
        raise _lost("the model's output was changed after its forward, and its loss would be lost")
    return deferred


def deferred_of(output: Any) -> DeferredLoss | None:
    """That of a model's output, which schedules hand on as a tensor or as a list of one."""
    return getattr(output[0] if isinstance(output, list) else output, "deferred_loss", None)


def wrap_postprocess(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """GPTModel._postprocess that ends before the output layer where losses are deferred.

    Layers of multi-token prediction run in the forward: later chunks read their keys.
    """
    if not _defers(self):
        return original(self, hidden_states, *args, **kwargs)
    if kwargs.get("mtp_in_postprocess"):
        hidden_states = _before_output(self, partial(original, self, hidden_states, *args, **kwargs))
        kwargs["mtp_in_postprocess"] = False
    return _deferred(hidden_states, partial(original, self, hidden_states, *args, **kwargs))


def wrap_hybrid_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """HybridModel.forward that ends before the output layer where losses are deferred.

    Its rest is no function of its own. So it is the same forward again, in which what has run gives the hidden states.
    """
    if not _defers(self):
        return original(self, *args, **kwargs)
    hidden_states = _before_output(self, partial(original, self, *args, **kwargs))

    def finish() -> torch.Tensor:
        def hand_back(*_: Any, **__: Any) -> torch.Tensor:
            return hidden_states

        attributes = vars(self)  # found before the modules of these names, which stay as they are
        kind = self.position_embedding_type
        attributes.update(decoder=hand_back, mtp=hand_back, position_embedding_type="none")
        try:
            losses: torch.Tensor = original(self, *args, **{**kwargs, "decoder_input": hidden_states})
        finally:
            del attributes["decoder"], attributes["mtp"]
            self.position_embedding_type = kind
        return losses

    return _deferred(hidden_states, finish)


def _defers(model: Any) -> bool:
    return part(Deferring).active and model.post_process and torch.is_grad_enabled()


def _before_output(model: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The hidden states of a model whose forward ends where that of an earlier pipeline stage does."""
    model.post_process = False
    try:
        return forward()
    finally:
        model.post_process = True


def _deferred(hidden_states: torch.Tensor, losses: Callable[[], torch.Tensor]) -> Any:
    """What stands for the model's output until its losses run."""
    output: Any = torch.zeros((), device=hidden_states.device)
    output.deferred_loss = part(Deferring).forward_loss = DeferredLoss(losses)
    return output


def wrap_backward_step(original: Original, input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
    """A schedule's backward of one micro-batch, which begins with its deferred loss. Megatron's timer of backwards
    counts it."""
    deferred = deferred_of(output_tensor)
    if deferred is None:
        return original(input_tensor, output_tensor, *args)
    timers = args[-1].timers  # of the config, which comes last in every release
    timer = None if timers is None else timers("backward-compute", log_level=2)
    if timer is not None:
        timer.start()
    loss = deferred.run()
    if timer is not None:
        timer.stop()
    return original(input_tensor, [loss], *args)
