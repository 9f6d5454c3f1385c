"""Checks of losses: one a step, which still finds a single wrong loss."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine as rerun

from wlb_megatron.plugin.step import forward_step
from wlb_megatron.plugin.step.losses import check_together, to_check, unchecked

MASK = torch.ones(1, 2)


class Machine:
    """Megatron's rerun state machine: notes what it is asked to check, and rejects as it does."""

    def __init__(self) -> None:
        self.checked: list[tuple[str, float]] = []

    def is_unexpectedly_large(self, result: Any, **_: Any) -> bool:
        return False

    def validate_result(self, *, result: Any, rejection_func: Any, message: str, **_: Any) -> None:
        self.checked.append((message, float(result)))
        if rejection_func(result):
            raise RuntimeError(message)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    monkeypatch.setattr(forward_step, "get_args", lambda: args)
    monkeypatch.setattr(forward_step, "get_rerun_state_machine", lambda: machine)
    return machine


def losses(*values: float) -> None:
    for value in values:
        forward_step.loss_per_token(MASK, torch.tensor([[value, 1.0]], requires_grad=True))


def test_a_steps_losses_are_checked_once_with_the_last_one(machine):
    for _ in range(2):
        check_together(3)
        losses(1.0, 2.0)
        assert machine.checked == []
        losses(3.0)
        assert [value for _, value in machine.checked] == [9.0, 9.0]  # NaN, infinity
        machine.checked.clear()


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize(("wrong", "message"), [("nan", "NaN"), ("inf", "Inf"), ("-inf", "Inf")])
def test_one_wrong_loss_of_a_step_ends_it_before_any_weight_changes(machine, at, wrong, message):
    values = [1.0, 2.0, 3.0]
    values[at] = float(wrong)
    check_together(3)
    with pytest.raises(RuntimeError, match=f"found {message} in local forward loss"):
        losses(*values)


def test_infinities_of_both_signs_are_no_number_and_a_step_begins_anew_after_one_that_failed(machine):
    check_together(2)
    with pytest.raises(RuntimeError, match="found NaN"):
        losses(float("inf"), float("-inf"))
    check_together(3)
    assert to_check(torch.tensor(float("nan"))) is None
    check_together(1)
    for value in (2.0, 5.0):  # the second is of no step
        checked = to_check(torch.tensor(value))
        assert checked is not None and float(checked) == value


@pytest.mark.parametrize("mode", ["DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS"])
def test_while_checks_are_off_megatrons_machine_counts_and_learns_nothing(mode, monkeypatch):
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode[mode])
    monkeypatch.setattr(rerun, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    machine.state = rerun.RerunState.INITIAL_RUN
    machine.first_iteration_complete = True

    def large(result: torch.Tensor) -> bool:
        return machine.is_unexpectedly_large(result, threshold=10, context="grads")

    def check(value: float) -> None:
        for rejection in (torch.isnan, large):
            machine.validate_result(torch.tensor(value), rejection, "a gradient", fatal=True)

    def state() -> dict[str, Any]:
        unlike = "stats", "error_injector"  # objects that equal themselves alone
        return copy.deepcopy({name: value for name, value in vars(machine).items() if name not in unlike})

    check(1.0)
    before = state()
    with unchecked():
        check(float("nan"))
        check(1e9)
    assert state() == before
    check(2.0)
    assert [*machine.validation_counts.values()] == ([] if mode == "DISABLED" else [4])
