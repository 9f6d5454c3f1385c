"""Growing global batches: sizes as Megatron's own calculators give them, the same documents whatever the resume."""

import argparse
import json
import re
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import flags, output_of, read_ranks
from packing_oracle import ListStream, make_planner, run
from test_megatron_layouts import trained

from wlb_megatron.packing.packer import Ranks
from wlb_megatron.packing.planner import BatchSchedule, Planner, linear_ramp
from wlb_megatron.plugin.flags.training_job import BatchSizes, misfit
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.model import Layout

LENGTHS = [3, 9, 1, 14, 2, 2, 16, 5, 7, 1, 12, 4, 4, 8, 16, 3]


def flags_give(**sizes: Any) -> BatchSizes:
    """Sizes of Megatron's arguments `given`, of which it has set these itself."""
    return BatchSizes.of(argparse.Namespace(**{"global_batch_size": 4, "seq_length": 64} | sizes))


def old_ramp(consumed: int, start: int, increment: int, samples: int, size: int) -> int:
    """Megatron core 0.16's RampupBatchsizeNumMicroBatchesCalculator, of one micro-batch each."""
    if consumed > samples or size == start:
        return size
    share = samples / ((size - start) // increment)
    return start + int(consumed / share) * increment if share else size


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 8), st.integers(0, 500))
def test_a_linear_ramp_has_the_sizes_of_megatrons_rampup_calculator(start, increment, rises, samples):
    size = start + rises * increment
    ramp = linear_ramp(start, increment, samples, size)
    for consumed in range(samples + 3):
        assert ramp.size(consumed) == old_ramp(consumed, start, increment, samples, size)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True), st.data())
def test_a_step_schedule_has_the_sizes_of_megatrons_calculator(sizes, data):
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    gaps = data.draw(st.lists(st.integers(1, 50), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    window = 16
    text = " ".join(
        f"{at * window + data.draw(st.integers(0, 15)) * (at > 0)}:{size}"
        for at, size in zip(accumulate(gaps, initial=0), sorted(sizes), strict=True)
    )
    schedule = flags_give(step_batch_size_schedule=text, seq_length=window).schedule
    theirs = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, window)
    consumed = 0
    for _ in range(40):
        theirs.update(consumed, consistency_check=False)
        assert schedule.size(consumed) == theirs.get()
        consumed += schedule.size(consumed)


def test_an_interleaved_schedule_takes_what_megatrons_own_check_takes():
    """The rule of forward_backward_pipelining_with_interleaving, by its text: PP <= group <= micro-batches, and no
    last group of less than PP."""

    def refused(micro_batches: int, group: int | None, chunks: int = 2, planned: bool = False) -> str | None:
        layout = Layout(data=3, pipeline=2, virtual=chunks, group=group)
        return misfit(3 * micro_batches, layout, by_plan=planned)

    even = [2, 4, 6, 8, 10, 12]
    taken = {None: even, 1: [], 2: even, 3: [3, 5, 6, 8, 9, 11, 12], 4: [4, 6, 7, 8, 10, 11, 12]}
    for group, counts in (taken | {5: [5, 7, 8, 9, 10, 12]}).items():
        assert [count for count in range(1, 13) if refused(count, group) is None] == counts, group
    assert "3 micro-batches" in str(refused(3, None)) and "12 would do" in str(refused(3, None))
    assert refused(3, None, chunks=1) is None
    # Where the plan makes a multiple of the group of them, any number of windows is one.
    assert refused(3, None, planned=True) is None and "below the 2" in str(refused(3, 1, planned=True))
    law = Ranks(pp=2, vpp=2, group=3).law(CostModel(8.0))
    for windows in range(1, 9):
        for per_window in (None, 1, 1.5):
            assert all(refused(count, 3) is None for count in law.counts(windows, per_window))


def test_batches_are_decreased_as_megatrons_calculator_decreases_them():
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    for size, ranks in ((4, 3), (6, 3), (7, 4), (3, 3)):
        theirs = ConstantNumMicroBatchesCalculator(size, 1, ranks, True, 1)
        arguments = {"data_parallel_size": ranks, "decrease_batch_size_if_needed": True}
        sizes = flags_give(global_batch_size=size, **arguments)
        assert sizes.schedule.steps == ((0, theirs.get_current_running_global_batch_size()),)
        assert sizes.evaluated == ranks * theirs.get()
    with pytest.raises(ValueError, match="a global batch of 2 cannot be decreased to a multiple of 3"):
        flags_give(global_batch_size=2, **arguments)
    ramp = {"step_batch_size_schedule": None, "rampup_batch_size": ["3", "3", "9"]}
    for growing_sizes in ({"step_batch_size_schedule": "0:4"}, ramp):
        with pytest.raises(ValueError, match="give sizes that the data-parallel size divides"):
            flags_give(global_batch_size=3, **arguments, **growing_sizes)


def test_a_ramp_that_megatron_would_ignore_becomes_its_step_schedule():
    arguments = {"rampup_batch_size": ["2", "2", "100"], "global_batch_size": 6, "seq_length": 64}
    text = flags_give(step_batch_size_schedule=None, **arguments).ramp
    assert text == "0:2 3200:4 6400:6"
    sizes = flags_give(step_batch_size_schedule=text, **arguments)
    assert sizes.schedule.steps == ((0, 2), (50, 4), (100, 6)) and sizes.ramp is None


@pytest.mark.parametrize(
    ("text", "words"),
    [("0:4 640:2", "growing batches only"), ("64:4", "threshold 0"), ("0:x", "schedule '0:x'")],
)
def test_a_schedule_that_cannot_train_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        flags_give(step_batch_size_schedule=text, seq_length=64)
    with pytest.raises(ValueError, match="does not lead to --global-batch-size 5"):
        linear_ramp(2, 2, 100, 5)


def growing(steps: tuple[tuple[int, int], ...], **settings: int | str) -> Planner:
    made = make_planner(LENGTHS, window=16, micro_batches=steps[-1][1], **settings)
    stream = ListStream(LENGTHS, endless=True)
    return Planner(stream, made.packer, global_tokens=16 * steps[-1][1], schedule=BatchSchedule(steps))


def test_intake_follows_the_sum_of_the_batches():
    planner = growing(((0, 1), (2, 3)), packing="original")
    plans = run(planner, most=5)
    assert [len(plan.micro_batches) for plan in plans] == [1, 1, 3, 3, 3]
    totals = list(accumulate(sum(piece.tokens for piece in plan.arrived) for plan in plans))
    for goal, total, plan in zip([16, 32, 80, 128, 176], totals, plans, strict=True):
        assert goal <= total < goal + plan.arrived[-1].tokens


def test_sizes_not_reached_yet_may_change_at_resume_and_neither_others_nor_versions_may():
    first = growing(((0, 2), (6, 4)))
    run(first, most=2)
    state = json.loads(json.dumps(first.state()))
    growing(((0, 2), (8, 5))).load_state(state)
    with pytest.raises(ValueError, match="global batches of 2, from sample 6 on 4, this run has 3"):
        growing(((0, 3),)).load_state(state)
    for version in (2, 4):
        words = f"version {version}, this release reads 3: resume with the release"
        with pytest.raises(ValueError, match=words):
            first.load_state({**first.state(), "version": version})


@pytest.mark.megatron
def test_a_ramp_trains_through_megatrons_loop_and_resumes_at_another_layout(corpus, tmp_path):
    """2, 2, 4, 4 micro-batches; Megatron counts 2, 4, 8, 12 samples, at which the rate has fallen to 0. Resumed in the
    middle with DP=2."""
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps({"train": [str(corpus)], "valid": [], "test": []}))
    saved = tmp_path / "checkpoints"
    ramp = flags(
        "--rampup-batch-size 2 2 4 --global-batch-size 4 --train-samples 12 --ckpt-format torch",
        f"--per-split-data-args-path {parts} --save {saved} --save-interval 3",
    )
    said = output_of(ramp, 1, out=tmp_path / "whole")
    logged = re.findall(r"consumed samples: +(\d+) .*? learning rate: (\S+) ", said)
    # Samples are counted by global batches when they have trained; the rate falls by 1e-3 / 12 a sample.
    assert [int(samples) for samples, _ in logged] == [2, 4, 8, 12]
    rates = [1e-3 * (1 - samples / 12) for samples in (2, 4, 8, 12)]
    assert [float(rate) for _, rate in logged] == pytest.approx(rates, rel=1e-6)
    whole = read_ranks(tmp_path / "whole", 1)
    assert [entry[0] for entry in whole[0]["documents"]] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    said = output_of([*ramp, "--load", str(saved)], 2, out=tmp_path / "resumed")
    assert "sets --step-batch-size-schedule 0:2 256:4" in said
    resumed = trained(read_ranks(tmp_path / "resumed", 2))
    assert resumed == [entry for entry in trained(whole) if entry[0] == 3]


def test_a_schedule_counts_in_micro_batches_of_several_windows():
    """Its iterations begin after as many windows, and have as many."""
    schedule = BatchSchedule(((0, 4), (10, 8), (11, 16), (60, 24)))
    joined = schedule.joined(4)
    windows = micro_batches = 0
    for _ in range(30):
        assert schedule.size(windows) == 4 * joined.size(micro_batches)
        windows += schedule.size(windows)
        micro_batches += joined.size(micro_batches)
    assert schedule.joined(1) == schedule


def test_a_batch_is_a_multiple_of_ranks_and_of_a_micro_batchs_windows():
    layout = Layout(data=2, pipeline=2, virtual=2)
    assert "data-parallel size 2 x 3 windows of a micro-batch" in str(misfit(8, layout, 3))
    assert misfit(12, layout, 3) is None
    assert "18 would do" not in str(misfit(18, layout, 3)) and "24 would do" in str(misfit(18, layout, 3))
    assert misfit(8, layout, 1) is None
    sizes = flags_give(micro_batch_size=3, eval_micro_batch_size=1, seq_length=64)
    assert (sizes.joined_window, sizes.evaluated_window) == (192, 64)
    assert flags_give(micro_batch_size=3).evaluated_micro_batch_size == 3
