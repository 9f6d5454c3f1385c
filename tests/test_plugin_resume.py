"""A checkpoint's packing state: of which iteration it is, and what is refused with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import pytest
from packing_oracle import make_planner

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.blend import Blend
from wlb_megatron.plugin import checkpoint, resume
from wlb_megatron.plugin.source import Source
from wlb_megatron.refusals import Refused


def source(**settings: Any) -> Source:
    planner = make_planner([5, 9, 3, 16, 7, 12] * 9, window=16, micro_batches=4, endless=True)
    return Source(
        Blend([]), planner, WlbConfig(quadratic_at=99.0, document_cost=0.0, **settings), 4, 8.0, (), 0
    )


def megatron(iteration: int) -> argparse.Namespace:
    return argparse.Namespace(
        iteration=iteration,
        wlb_off=False,
        consumed_train_samples=4 * iteration,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
    )


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint, "_loaded", None)
    monkeypatch.setattr(checkpoint, "_computed", None)
    monkeypatch.setattr(checkpoint, "_kept", None)
    yield


def save(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments that Megatron saves now."""
    return checkpoint.wrap_generate_state_dict(lambda args, model: {"args": args})(args, None)["args"]


def saved(args: argparse.Namespace) -> dict[str, Any]:
    return json.loads(save(args).wlb_state)


def test_the_state_is_saved_when_megatron_has_applied_the_gradients() -> None:
    args, ours, planned = megatron(0), source(), []
    log = checkpoint.wrap_training_log(lambda *_: planned.append(saved(args)["planner"]["iteration"]))
    resume.remember(ours, ours.planner.snapshot())
    for _ in range(2):
        ours.planner.next_iteration()
        before = saved(args)
        resume.remember(ours, ours.planner.snapshot(), applied=False)
        assert saved(args) == before  # what Megatron saves of an iteration that it throws away
        log()
    assert planned == [1, 2]


def test_the_state_is_made_when_megatron_saves_and_not_before() -> None:
    args, made = megatron(0), []
    log = checkpoint.wrap_training_log(lambda: None)
    for iteration in range(3):
        checkpoint.remember_if_applied(
            lambda iteration=iteration: made.append(iteration) or {"at": iteration}
        )
        log()
    assert made == []
    assert saved(args) == {"at": 2} and made == [2]
    assert not hasattr(save(argparse.Namespace(wlb_off=True)), "wlb_state")


def load(args: argparse.Namespace, *, off: bool = False) -> argparse.Namespace:
    """Megatron's arguments after it has loaded a checkpoint that was saved with `args`."""
    now = argparse.Namespace(wlb_off=off)
    checkpoint.wrap_load_base_checkpoint(lambda load_dir, now: ({"args": args}, ""))("folder", now)
    return now


def test_a_checkpoint_that_is_saved_again_before_training_keeps_its_state() -> None:
    """--ckpt-convert-format; a run with --wlb-off trains on without a state."""
    args, ours = megatron(0), source()
    resume.remember(ours, ours.planner.snapshot())
    save(args)
    assert load(args).wlb_state == args.wlb_state
    assert not hasattr(load(args, off=True), "wlb_state")
    assert not hasattr(load(argparse.Namespace()), "wlb_state")


def test_a_state_continues_where_it_was_saved_and_counts_its_tokens() -> None:
    args, first = megatron(0), source()
    for _ in range(3):
        first.planner.next_iteration()
    resume.remember(first, first.planner.snapshot())
    load(save(args))
    again = source()
    resume.restore(again, megatron(3))
    assert again.planner.trained == first.planner.trained
    assert again.planner.next_iteration() == first.planner.next_iteration()


def test_a_state_of_another_iteration_than_the_checkpoint_is_refused() -> None:
    args, first = megatron(0), source()
    first.planner.next_iteration()
    resume.remember(first, first.planner.snapshot())
    load(save(args))
    with pytest.raises(Refused, match="has trained 4 samples, the checkpoint of iteration 2 8"):
        resume.restore(source(), megatron(2))


def test_a_checkpoint_without_a_state_needs_to_be_told_to_begin_anew() -> None:
    load(argparse.Namespace())
    with pytest.raises(Refused, match=r"iteration 3 holds no packing state.*--wlb-fresh-order"):
        resume.restore(source(), megatron(3))
    anew = source(fresh_order=True)
    resume.restore(anew, megatron(3))
    assert anew.planner.samples == 12
    assert anew.planner.trained == 12 * 16  # windows of 16 tokens
    unread = source()
    resume.restore(unread, megatron(0))  # --finetune: a new run
    assert unread.planner.samples == 0
