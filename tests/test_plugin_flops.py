"""FLOPs of a step's documents on releases whose Megatron counts whole windows."""

from __future__ import annotations

import argparse

import pytest
import torch

WINDOW = 64


@pytest.fixture()
def counted(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The module as if Megatron could not count segments, on one rank; and a formula like Megatron's."""
    from wlb_megatron.plugin import flops

    monkeypatch.setattr(flops, "training", object())
    monkeypatch.setattr(flops, "_over_all_ranks", lambda here: (float(here[0]), float(here[1])))
    monkeypatch.setattr(flops, "_here", None)
    monkeypatch.setattr(flops, "_counted", None)
    return flops, flops.wrap_num_floating_point_operations(
        lambda args, batch: batch * (1000 * args.seq_length + 3 * args.seq_length**2)
    )


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_documents_count_by_their_own_squares(counted) -> None:  # type: ignore[no-untyped-def]
    """F13: eight documents of 8 tokens are an eighth of the attention of one of 64, and all of the rest."""
    flops, count = counted
    args = argparse.Namespace(seq_length=WINDOW)
    flops.count_segments([bounds(*[8] * 8)])
    short = count(args, 1)
    flops.count_segments([bounds(64)])
    long = count(args, 1)
    assert short == pytest.approx(1000 * 64 + 3 * 8 * 64, rel=1e-12)
    assert long == pytest.approx(1000 * 64 + 3 * 64 * 64, rel=1e-12)


def test_the_log_finds_the_step_that_the_loop_counted_and_steps_do_not_add_up(counted) -> None:  # type: ignore[no-untyped-def]
    flops, count = counted
    args = argparse.Namespace(seq_length=WINDOW)
    assert count(args, 2) == 2 * (1000 * 64 + 3 * 64**2)  # nothing trained yet: Megatron's own
    for lengths in ((5, 7), (40,)):
        flops.count_segments([bounds(*lengths), bounds(3)])
        tokens, squares = sum(lengths) + 3, sum(n * n for n in lengths) + 9
        assert count(args, 2) == count(args, 2) == pytest.approx(1000 * tokens + 3 * squares, rel=1e-12)
    assert args.seq_length == WINDOW


def test_megatrons_straggler_detector_gets_the_times_of_our_forwards() -> None:
    """--log-straggler: one detector a process, which Megatron configures and reports."""
    from megatron.training import training

    from wlb_megatron.plugin import forward_step

    assert forward_step.stimer is training.stimer
