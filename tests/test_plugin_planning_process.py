"""Planning in a process of its own: the thread's plans and states, and an end of its own with a line or a parent."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb_megatron import child
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend, predictions_in
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.factory import plan_job
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import IterationPlan
from wlb_megatron.plugin.logs.prediction import UntilItFails, in_arrival_order
from wlb_megatron.plugin.micro_batches import planning
from wlb_megatron.plugin.micro_batches.planning import (
    PlanAhead,
    PlannedIteration,
    ShardSettings,
    in_a_process,
    plan_in_a_process,
    plan_iterations,
)
from wlb_megatron.sharding.cut import digest_of_cuts
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 256


def write_index(prefix: Path, lengths: list[int]) -> str:
    """A pair without megatron.core, which takes a process seconds to import: lengths, and a .bin of zeros."""
    ends = np.cumsum(2 * np.array([0, *lengths])).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    columns = np.array(lengths, "<i4"), ends[:-1], np.arange(len(lengths) + 1, dtype="<i8")
    prefix.with_suffix(".idx").write_bytes(head + b"".join(column.tobytes() for column in columns))
    prefix.with_suffix(".bin").write_bytes(bytes(int(ends[-1])))
    return str(prefix)


def corpora(folder: Path) -> Blend:
    generator = np.random.default_rng(5)
    kinds = ("short", 40), ("long", WINDOW)
    lengths = [(name, generator.integers(1, most, 300).tolist()) for name, most in kinds]
    return Blend([write_index(folder / name, each) for name, each in lengths])


def planner_of(blend: Blend, *, endless: bool = True, **changed: Any) -> Planner:
    config = WlbConfig(quadratic_at=200.0, thresholds="100,150", chunks="off", **changed)
    stream = DocumentStream(blend.corpora(), Rules(window=WINDOW, seed=3, endless=endless))
    job = {"window": WINDOW, "micro_batches": 4, "dp": 2, "pp": 2}
    return plan_job(stream, PackingJob(config, CostModel(200.0, 0.0), **job))


def settings_of(blend: Blend) -> ShardSettings:
    return ShardSettings(1, 2, 2, "hybrid", h100(), predictions=partial(predictions_in, blend, 1))


def without_times(planned: PlannedIteration) -> tuple[Any, ...]:
    """All of an iteration but how long planning took."""
    untimed = tuple(replace(each, plan_seconds=0.0, shard=None) for each in planned.micro_batches)
    cuts = digest_of_cuts([micro_batch.shard for micro_batch in planned.micro_batches])
    return (replace(planned, micro_batches=untimed, state=dict, plan=None), cuts, planned.state())


@pytest.mark.parametrize("changed", [{}, {"packing": "original"}])
def test_a_process_gives_the_threads_plans_states_and_figures_to_the_end_of_the_corpus(changed, tmp_path):
    blend = corpora(tmp_path)
    planners = [planner_of(blend, endless=False, **changed) for _ in range(2)]
    expected = list(plan_iterations(planners[0], settings_of(blend)))
    planned = list(plan_in_a_process(planners[1], settings_of(blend), keeps_plans=True))
    assert len(planned) > 10
    assert [*map(without_times, planned)] == [*map(without_times, expected)]
    assert [iteration.plan for iteration in planned] == [iteration.plan for iteration in expected]


def test_a_process_that_cannot_be_started_is_told_with_the_cure(tmp_path, monkeypatch):
    blend = corpora(tmp_path)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(WlbError, match=r"no process can be started .* set --wlb-plan-process never"):
        next(plan_in_a_process(planner_of(blend), settings_of(blend)))


def test_a_process_goes_on_where_a_state_was_taken(tmp_path):
    blend = corpora(tmp_path)
    expected = list(islice(plan_iterations(planner_of(blend), settings_of(blend)), 6))
    (*_, passed) = islice(plan_in_a_process(planner_of(blend), settings_of(blend)), 3)
    resumed = planner_of(blend)
    resumed.load_state(passed.state())
    planned = list(islice(plan_in_a_process(resumed, settings_of(blend)), 3))
    rows, resumed_rows = (
        [(one.micro_batches[0].pieces, one.state()) for one in each] for each in (expected[3:], planned)
    )
    assert resumed_rows == rows and all(iteration.plan is None for iteration in planned)


def test_the_process_imports_neither_torch_nor_megatron_and_maps_the_index(tmp_path, monkeypatch, capfd):
    blend = corpora(tmp_path)
    lengths = blend.corpora()[1].lengths
    message = child._packed(lengths)
    assert len(message) < lengths.nbytes and str(tmp_path).encode() in message
    unpickled = child.pickle.loads(message)
    assert unpickled.dtype == lengths.dtype and (unpickled == lengths).all() and not unpickled.flags.owndata
    part = child.pickle.loads(child._packed(lengths[7:90]))
    assert (part == lengths[7:90]).all()
    (tmp_path / "asks.py").write_text(
        "import sys\n"
        "def ask(plan, shards):\n"
        "    print(sorted({'torch', 'megatron'} & set(sys.modules)), file=sys.stderr)\n"
        "    return 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import asks

    settings = replace(settings_of(blend), predict=UntilItFails(asks.ask))
    (planned,) = islice(plan_in_a_process(planner_of(blend), settings), 1)
    assert planned.predicted_ms == 0.5
    assert capfd.readouterr().err.startswith("[]\n")


class Broken:
    """A stream that fails. Found by the child, as this file's folder is on sys.path."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def next(self) -> None:
        raise self.error

    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (WlbError("the index is gone"), WlbError, "^the index is gone$"),
        (KeyError("x"), RuntimeError, "KeyError: 'x'"),
    ],
)
def test_an_error_in_the_process_is_raised_where_the_plan_is_asked_for(error, raised, line, tmp_path):
    blend = corpora(tmp_path)
    planner = planner_of(blend)
    planner.stream = Broken(error)
    with pytest.raises(raised, match=line):
        next(iter(PlanAhead(partial(plan_in_a_process, planner, settings_of(blend)), 1)))


def test_a_process_that_is_killed_or_stands_still_is_told_and_never_waited_for_forever(tmp_path, monkeypatch):
    started: list[child.Child] = []

    class Noted(child.Child):
        def __init__(self, work: Any) -> None:
            super().__init__(work)
            started.append(self)

    monkeypatch.setattr(planning, "Child", Noted)
    monkeypatch.setattr(child, "PATIENCE", 0.5)
    blend = corpora(tmp_path)
    ends = (signal.SIGKILL, "been killed by signal 9"), (signal.SIGSTOP, "no plan in 0.5 s")
    for number, message in ends:
        plans = plan_in_a_process(planner_of(blend), settings_of(blend))
        monkeypatch.setattr(child, "PATIENCE", 60)
        next(plans)
        monkeypatch.setattr(child, "PATIENCE", 0.5)
        started[-1].process.send_signal(number)
        with pytest.raises(WlbError, match=message):
            for _ in plans:
                pass
        assert started[-1].process.wait(10) == -signal.SIGKILL


def test_what_the_process_prints_at_its_start_comes_not_between_plans(tmp_path, monkeypatch):
    """As a site's own start-up file does, or a library that is loaded into every process."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('module gcc/13 is loaded', flush=True)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(child, "PATIENCE", 20)
    blend = corpora(tmp_path)
    expected = next(plan_iterations(planner_of(blend), settings_of(blend)))
    made = next(plan_in_a_process(planner_of(blend), settings_of(blend)))
    assert made.digest == expected.digest


def test_the_process_outlives_signals_to_all_of_the_job_but_not_its_parent(tmp_path):
    script = """
import os, signal, sys, time
from pathlib import Path
import test_plugin_planning_process as these
blend = these.corpora(Path(sys.argv[1]))
plans = these.plan_in_a_process(these.planner_of(blend), these.settings_of(blend))
next(plans)
held = os.fork()  # a loader's worker, which holds the pipe's ends
if not held:
    time.sleep(60)
child = next(int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split() if int(p) != held)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    os.kill(child, number)
for _ in range(5):
    next(plans)
print(child, held, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        planning, worker = (int(number) for number in parent.stdout.readline().split())
        parent.wait(10)
    try:
        until = time.monotonic() + 20
        while alive(planning) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(planning) and alive(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


def alive(number: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_process_plans_large_iterations_of_packers_that_plan_alone(tmp_path):
    planner = planner_of(corpora(tmp_path))  # of 2,048 tokens an iteration
    assert not in_a_process(planner, WlbConfig(), mean_length=2.1)
    assert in_a_process(planner, WlbConfig(), mean_length=2.0)
    assert not in_a_process(planner, WlbConfig(plan_process="never"), mean_length=2.0)
    assert in_a_process(planner, WlbConfig(plan_process="always"), mean_length=200.0)
    assert not in_a_process(planner, WlbConfig(cp_mode="dynamic"), mean_length=2.0)


def took(plan: IterationPlan, shards: Sequence[ShardPlan]) -> float:
    """A step of two data-parallel ranks that wait for each other: the slower one's work."""
    tokens = [row[1].tokens for row in plan.micro_batches]
    assert [shard.tokens for shard in shards] == [each + each % 2 for each in tokens]
    columns = zip(*plan.micro_batches, strict=True)
    return max(sum(micro_batch.work for micro_batch in column) for column in columns)


def predicting(blend: Blend) -> ShardSettings:
    settings = replace(settings_of(blend), predict=took)
    return replace(settings, arrival_order=partial(in_arrival_order, settings, CostModel(200.0, 0.0), 2))


def test_a_gain_that_cannot_be_told_does_not_end_planning(tmp_path, capsys):
    """It fails at its start, without a cost model, and at its first plan, with a padding that is no number."""
    settings = predicting(corpora(tmp_path))
    for wrong, cost in ((settings, None), (replace(settings, alignment="odd"), CostModel(200.0, 0.0))):
        begin = partial(in_arrival_order, wrong, cost, 2)
        planner = planner_of(corpora(tmp_path))
        planned = list(islice(plan_iterations(planner, replace(settings, arrival_order=begin)), 3))
        assert all(iteration.arrival_ms is None and iteration.predicted_ms for iteration in planned)
    said = capsys.readouterr().out
    assert "no gain over arrival order, the simulator failed" in said and "no more predicted times" in said


@pytest.mark.parametrize("in_process", [False, True])
def test_what_a_run_would_take_in_arrival_order_is_that_of_the_very_documents_trained(in_process, tmp_path):
    """Against a run of its own in arrival order: equal where all documents have trained, near it before."""
    blend = corpora(tmp_path)
    plan = plan_in_a_process if in_process else plan_iterations
    planned = list(plan(planner_of(blend, endless=False), predicting(blend)))
    plain = list(plan_iterations(planner_of(blend, endless=False, packing="original"), predicting(blend)))
    alone = [iteration.predicted_ms or 0.0 for iteration in plain]
    assert [iteration.arrival_ms for iteration in plain] == pytest.approx(alone, rel=1e-9)
    beside = [iteration.arrival_ms or 0.0 for iteration in planned]
    assert sum(beside) == pytest.approx(sum(alone), rel=1e-9)
    half = len(plain) // 2
    trained = sum(iteration.micro_batches[0].summary.tokens for iteration in planned[:half])
    arrived = sum(iteration.micro_batches[0].summary.tokens for iteration in plain[:half])
    assert sum(beside[:half]) / trained == pytest.approx(sum(alone[:half]) / arrived, rel=0.02)
