"""FLOPs of a step's documents on releases whose Megatron counts whole windows."""

import argparse
import re
from functools import partial

import pytest
import torch
from megatron.training import training
from megatron_runs import failure, flags, run_script

from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.logs import flops
from wlb_megatron.plugin.step import forward_step

WINDOW = 64


@pytest.fixture()
def count(monkeypatch):
    """A formula like Megatron's, in a module that is as if Megatron could not count segments, on one rank."""
    monkeypatch.setattr(flops, "training", object())
    monkeypatch.setattr(flops, "_over_all_ranks", lambda here: (float(here[0]), float(here[1])))
    return partial(
        flops.wrap_num_floating_point_operations,
        lambda args, batch: batch * (1000 * args.seq_length + 3 * args.seq_length**2),
    )


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_documents_count_by_their_own_squares_and_the_log_finds_the_step_that_the_loop_counted(count):
    """F13: eight documents of 8 tokens are an eighth of the attention of one of 64. Steps do not add up."""
    args = argparse.Namespace(seq_length=WINDOW)
    assert count(args, 2) == 2 * (1000 * 64 + 3 * 64**2)  # nothing trained yet: Megatron's own
    for lengths in ((5, 7), (40,), (8,) * 8, (64,)):
        flops.count_segments([bounds(*lengths), bounds(3)])
        tokens, squares = sum(lengths) + 3, sum(n * n for n in lengths) + 9
        assert count(args, 2) == count(args, 2) == pytest.approx(1000 * tokens + 3 * squares, rel=1e-12)
    assert args.seq_length == WINDOW


@pytest.mark.parametrize("release", ["0.17", "0.19"])
def test_throughput_is_of_all_iterations_since_the_last_line(release, monkeypatch):
    """The interval that Megatron's own timer has, which the line after the first iteration does not end."""
    totals: list[tuple[float, float]] = []
    monkeypatch.setattr(flops, "get_args", lambda: argparse.Namespace(log_interval=3))

    for iteration in range(1, 7):
        counted = (10.0 * iteration, 100.0 * iteration)
        part(flops.SegmentCounts).step = counted
        later = {} if release == "0.17" else dict(zip(flops._TOTALS, counted, strict=True))
        arguments = {"iteration": iteration, "is_first_iteration": iteration == 1, **later}
        flops.take_mean(arguments)
        mean = tuple(arguments[name] for name in flops._TOTALS) if later else part(flops.SegmentCounts).step
        totals.append(mean)
    assert [totals[at] for at in (0, 2, 5)] == [(10, 100), (20, 200), (50, 500)]


def test_the_operations_of_the_last_iteration_are_told_where_the_log_has_taken_the_mean(count, monkeypatch):
    """Before 0.18, where Megatron's count reads the step that is noted."""
    args = argparse.Namespace(seq_length=WINDOW, log_interval=2)
    monkeypatch.setattr(flops, "training", argparse.Namespace(num_floating_point_operations=count))
    monkeypatch.setattr(flops, "get_args", lambda: args)
    assert flops.logged_operations() is None
    logged: list[float] = []
    each = []
    for iteration, lengths in enumerate(((5, 7), (40,)), 1):
        flops.count_segments([bounds(*lengths)])
        each.append(count(args, 1))
        flops.take_mean({"iteration": iteration})
        logged.append(count(args, 1))
        assert flops.logged_operations() == each[-1]
    assert logged == pytest.approx([each[0], sum(each) / 2])


SCRIPT = """
from megatron.training import training
count = training.num_floating_point_operations

def printed_count(*args, **kwargs):
    print(f"FLOPS {count(*args, **kwargs)!r}", flush=True)
    return count(*args, **kwargs)

training.num_floating_point_operations = printed_count
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.logs import flops, metrics
report = metrics._report

def reported(figures):
    print(f"LOGGED {flops.logged_operations()!r}", flush=True)
    report(figures)

metrics._report = reported
from wlb_megatron.plugin import pretrain_gpt
pretrain_gpt.main()
"""


@pytest.mark.megatron
def test_a_run_logs_the_flops_of_the_mean_iteration(corpus, tmp_path):
    run = f"--data-path {corpus} --split 1,0,0 --global-batch-size 2 --train-iters 6 --log-interval 3"
    done = run_script(SCRIPT, flags(run), tmp_path)
    assert done.returncode == 0, failure(done)
    values = [float(value) for value in re.findall(r"FLOPS (\S+)\n(?!LOGGED)", done.stdout)]
    # The loop counts each iteration; the log counts after iterations 1, 3 and 6.
    first, logged, second, third, mean, *rest = values
    assert first == logged and mean == pytest.approx((first + second + third) / 3, rel=1e-9)
    assert "[wlb]" in done.stdout  # the other wrappers still find training_log's parameters by name
    # What the plugin's own figures count is each iteration's, not the mean.
    logged_each = [float(value) for value in re.findall(r"LOGGED (\S+)", done.stdout)]
    assert logged_each == pytest.approx([first, second, third, *rest[:3]], rel=1e-9)
    assert rest[3] == pytest.approx(sum(rest[:3]) / 3, rel=1e-9) and len(set(rest[:3])) > 1


def test_megatrons_straggler_detector_gets_the_times_of_our_forwards():
    """--log-straggler: one detector a process, which Megatron configures and reports."""

    assert forward_step.stimer is training.stimer
