"""FLOPs of a step's documents, as Megatron logs them and as the plugin does."""

import argparse
import re

import pytest
from megatron.training import training
from megatron_runs import failure, flags, run_script

from wlb_megatron.plugin.logs import flops
from wlb_megatron.plugin.step import forward_step


def test_throughput_is_of_all_iterations_since_the_last_line(monkeypatch):
    """The interval that Megatron's own timer has, which the line after the first iteration does not end."""
    totals: list[tuple[float, float]] = []
    monkeypatch.setattr(flops, "get_args", lambda: argparse.Namespace(log_interval=3))

    for iteration in range(1, 7):
        counted = (10.0 * iteration, 100.0 * iteration)
        arguments = {"iteration": iteration, "is_first_iteration": iteration == 1}
        arguments |= dict(zip(flops._TOTALS, counted, strict=True))
        flops.take_mean(arguments)
        totals.append(tuple(arguments[name] for name in flops._TOTALS))
    assert [totals[at] for at in (0, 2, 5)] == [(10, 100), (20, 200), (50, 500)]


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
