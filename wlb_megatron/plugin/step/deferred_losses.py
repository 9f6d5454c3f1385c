"""The output layer and the loss of a micro-batch in a step in groups: right before its backward.

A group's micro-batches all run forward before the first of them runs backward. Logits kept that long are as many as
the document has tokens: 262,144 tokens and a vocabulary of 48,000 take 50 GB, and took two GPUs to 120 GB where the
layers' keys and activations needed 37 GiB. Nothing needs a loss before its backward, so it is made then. Nothing is
computed twice.

Not with FSDP, whose parameters are gathered for a forward of the whole model. Nor with a script's own model that may
change the losses of GPTModel before it returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wlb_megatron.plugin.job_state import part

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
"""Loss, number of tokens, and what is logged, from the losses of tokens: Megatron's loss function."""


class DeferredLoss:
    """One micro-batch's. losses: runs the output layer, and gives the losses of its tokens."""

    def __init__(self, losses: Callable[[], torch.Tensor]) -> None:
        self._losses: Callable[[], torch.Tensor] | None = losses
        self._function: LossFunction | None = None
        self._logged: dict[str, torch.Tensor] = {}

    def begin(
        self, function: LossFunction, loss_mask: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Stands for `function` in the forward: a loss of 0 and the number of tokens. What is logged is filled in by
        `run`; Megatron reads it after the step."""
        count = loss_mask.sum().to(torch.int)
        self._function = function
        self._logged = {"lm loss": torch.stack([torch.zeros_like(output), count.to(output.dtype)])}
        return output, count, self._logged

    def run(self) -> torch.Tensor:
        """The loss, from which the backward begins. It is made once: schedules hold a model's output until after its
        backward, and with it what its losses are made of."""
        if self._function is None or self._losses is None:
            raise RuntimeError("a micro-batch's backward has come before the end of its forward, or twice")
        loss, _, logged = self._function(self._losses())
        self._function = self._losses = None
        for name, values in logged.items():
            self._logged[name].copy_(values)
        return loss


@dataclass(slots=True)
class Deferring:
    """active: the step that runs defers losses. told: what keeps losses in the forward has been printed."""

    active: bool = False
    told: bool = False


@contextmanager
def deferring(wanted: bool) -> Iterator[None]:
    """Defer the losses of a step, if wanted."""
    state = part(Deferring)
    state.active = wanted
    try:
        yield
    finally:
        state.active = False


def returns_its_losses(model: Any) -> bool:
    """Whether this model (a list of a stage's chunks, or the model as Megatron wraps it) returns what
    GPTModel._postprocess does.

    False where a script's class overrides that or forward, or holds the GPTModel inside. Printed the first time.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import print_rank_0

    model = model[-1] if isinstance(model, list) else model  # the last chunk makes the losses
    while hasattr(model, "module"):  # DDP and mixed precision wrap it
        model = model.module
    own = type(model)
    if all(getattr(own, name, None) is getattr(GPTModel, name) for name in ("forward", "_postprocess")):
        return True
    state = part(Deferring)
    if not state.told:
        state.told = True
        print_rank_0(
            f"> wlb_megatron: {own.__name__} does not return its losses as GPTModel does, so those of documents in "
            "chunks stay in the forward: logits of all chunks are kept at once, which estimates of memory leave out"
        )
    return False


def deferred_of(output: Any) -> DeferredLoss | None:
    """That of a model's output, which schedules hand on as a tensor or as a list of one."""
    return getattr(output[0] if isinstance(output, list) else output, "deferred_loss", None)


def wrap_postprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """GPTModel._postprocess that ends before the output layer where losses are deferred."""

    def _postprocess(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not (part(Deferring).active and self.post_process and torch.is_grad_enabled()):
            return original(self, hidden_states, *args, **kwargs)
        output: Any = torch.zeros((), device=hidden_states.device)
        output.deferred_loss = DeferredLoss(partial(original, self, hidden_states, *args, **kwargs))
        return output

    return _postprocess


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's backward of one micro-batch, which begins with its deferred loss. Megatron's timer of backwards
    counts it."""

    def backward_step(input_tensor: Any, output_tensor: Any, *rest: Any) -> Any:
        deferred = deferred_of(output_tensor)
        if deferred is None:
            return original(input_tensor, output_tensor, *rest)
        timers = rest[-1].timers  # of the config, which comes last in every release
        timer = None if timers is None else timers("backward-compute", log_level=2)
        if timer is not None:
            timer.start()
        loss = deferred.run()
        if timer is not None:
            timer.stop()
        return original(input_tensor, [loss], *rest)

    return backward_step
