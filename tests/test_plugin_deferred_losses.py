"""Losses of a step in groups: made right before the backward, with the values and gradients of the forward's."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from wlb_megatron.plugin.step.losses import (
    claim,
    deferred_of,
    deferring,
    returns_its_losses,
    wrap_backward_step,
    wrap_postprocess,
)
from wlb_megatron.refusals import RefusedHere

CONFIG = SimpleNamespace(finalize_model_grads_func=None)
LABELS = torch.tensor([[3, 1, 4, 1]])
MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0]])


class Model(torch.nn.Module):
    """A layer and an output layer; notes each logits tensor that it makes."""

    def __init__(self, post_process: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.post_process = post_process
        self.layer, self.output = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)
        self.made: list[Any] = []

    def forward(self, tokens: Tensor) -> Any:
        return self._postprocess(self.layer(tokens), labels=LABELS)

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor) -> Any:
        logits = self.output(hidden_states)
        self.made.append(weakref.ref(logits))
        return torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")[None]


@pytest.fixture
def model(monkeypatch):
    original = Model._postprocess
    monkeypatch.setattr(
        Model, "_postprocess", lambda *args, **more: wrap_postprocess(original, *args, **more)
    )
    return Model()


def sum_of_losses(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, count = (losses * MASK).sum(), MASK.sum().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


class Timers(list[Any]):
    """Megatron's, as far as they are used: what is started and stopped, in order."""

    def __call__(self, name: str, log_level: int) -> Any:
        begun = "start", name, log_level
        return SimpleNamespace(start=lambda: self.append(begun), stop=lambda: self.append("stop"))


def backward(_: Any, output: Any, gradient: Any, config: Any) -> Any:
    """As Megatron's: a list of one output, or the output."""
    loss = output[0] if isinstance(output, list) else output
    (loss * config.scale).backward()


def test_value_and_gradients_are_those_of_the_forward_and_no_logits_wait(model):
    batches = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
    expected = [sum_of_losses(model(batch)) for batch in batches]
    for loss, _, _ in expected:
        (loss * 0.5).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.made.clear()
    waiting, timers = [], Timers()
    reduced: list[Any] = []
    config = SimpleNamespace(finalize_model_grads_func=lambda chunks, count: reduced.append((chunks, count)))
    before = config.finalize_model_grads_func
    with deferring(True, config, 3):
        for batch in batches:
            output = model(batch)
            deferred = claim(output)
            assert deferred is not None
            waiting.append(deferred.begin(sum_of_losses, output))
        assert model.made == []
        step = partial(wrap_backward_step, backward)
        for output, count, _ in reversed(waiting):
            assert count == 0  # tokens are counted when the loss has run
            step(None, [output], None, SimpleNamespace(scale=0.5, timers=timers))
            gc.collect()
            assert model.made[-1]() is None  # its logits are gone before the next micro-batch's come
        config.finalize_model_grads_func([model], sum(count for _, count, _ in waiting))
    assert reduced == [([model], 9)] and config.finalize_model_grads_func is before
    assert timers == [("start", "backward-compute", 2), "stop"] * 3
    for (loss, _, logged), (_, _, filled) in zip(expected, waiting, strict=True):
        assert torch.equal(filled["lm loss"], logged["lm loss"]) and filled["lm loss"][0] == loss
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_forward_outside_of_such_a_step_or_without_gradients_or_on_an_earlier_stage_is_megatrons_own(model):
    tokens = torch.randn(4, 8)
    with torch.no_grad(), deferring(True, CONFIG, 0):
        assert deferred_of(model(tokens)) is None
    with deferring(True, CONFIG, 0):
        model.post_process = False
        assert deferred_of(model(tokens)) is None
    model.post_process = True
    with deferring(False, CONFIG, 1):
        assert deferred_of([model(tokens)]) is None
    with pytest.raises(ValueError, match="a fault"), deferring(True, CONFIG, 1):
        raise ValueError("a fault")
    assert deferred_of(model(tokens)) is None and len(model.made) == 4


def test_losses_of_a_model_that_may_change_them_are_not_deferred(capsys):
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    class Own(GPTModel):
        pass

    class Forward(GPTModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 2

    class Postprocess(GPTModel):
        def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super()._postprocess(*args, **kwargs) * 2

    def wrapped(kind: type) -> Any:
        model: Any = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        outer = torch.nn.Module()
        outer.module = torch.nn.Module()
        outer.module.module = model
        return outer

    kinds = (GPTModel, HybridModel, Own, Forward, Postprocess, torch.nn.Module)
    assert [returns_its_losses(wrapped(kind)) for kind in kinds] == [True, True, True, False, False, False]
    (told,) = capsys.readouterr().out.splitlines()  # once
    assert told.startswith("> wlb_megatron: Forward does not return its losses as GPTModel or HybridModel")


class Doubling(torch.nn.Module):
    """A wrapper of a script's own."""

    def forward(self, *args: Any) -> Any:
        return self.module(*args) * 2


def hooked(model: Any, how: str) -> None:
    getattr(model, how)(lambda *_: None)


SEEN = {
    "a hook on DDP": lambda outer: hooked(outer, "register_forward_hook"),
    "a hook on the model": lambda outer: hooked(outer.module, "register_forward_hook"),
    "a hook of its backward": lambda outer: hooked(outer, "register_full_backward_hook"),
    "a wrapper of the script's own": lambda outer: setattr(outer, "__class__", Doubling),
    "another forward of a wrapper": lambda outer: setattr(outer, "forward", lambda *_: None),
}


@pytest.mark.parametrize("what", SEEN)
def test_losses_on_whose_way_something_may_read_or_change_them_are_not_deferred(what):
    model, outer = GPTModel.__new__(GPTModel), torch.nn.Module()
    torch.nn.Module.__init__(model)
    outer.module = model
    assert returns_its_losses(outer)
    SEEN[what](outer)
    assert not returns_its_losses(outer)


@pytest.mark.parametrize(
    "change",
    [lambda x: x * 1.0, lambda x: x.mul_(1), lambda x: [x], lambda x: None],
    ids=["another tensor", "in place", "in a list", "nothing"],
)
def test_an_output_that_was_changed_after_the_forward_ends_the_job_with_a_cure(change, model):
    says = r"was changed after its forward.*--wlb-chunks off"
    with pytest.raises(RefusedHere, match=says), deferring(True, CONFIG, 2):
        claim(change(model(torch.randn(4, 8))))
    with deferring(False, CONFIG, 1):
        assert claim(change(model(torch.randn(4, 8)))) is None


@pytest.mark.parametrize(("begun", "run"), [(0, 0), (1, 1), (2, 1)])
def test_a_step_with_fewer_losses_than_micro_batches_is_an_error(begun, run, model):
    says = f"of 2 micro-batches {run} have run their losses"
    with pytest.raises(RefusedHere, match=says), deferring(True, CONFIG, 2):
        outputs = [model(torch.randn(4, 8)) for _ in range(begun)]
        for output in outputs:
            deferred_of(output).begin(sum_of_losses, output)
        for output in outputs[:run]:
            wrap_backward_step(backward, None, output, None, SimpleNamespace(scale=1.0, timers=None))
