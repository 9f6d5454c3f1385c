"""The search tries what a user could change, and its figures are those of an analysis of the flags that it names."""

import os
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from wlb_megatron.analyze.comparison import analyze
from wlb_megatron.analyze.output import as_json
from wlb_megatron.analyze.search import side_by_side, with_layout
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Corpus
from wlb_megatron.packing.limits import Trainer
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import SHAPES
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.model import Experts, Layout

pytestmark = pytest.mark.usefixtures("quick_thresholds")

JOB = (
    "--window 8192 --micro-batches 4 --pp 2 --cp 2 --iterations 4 --warm-up 2 --model 550M --recompute full "
    "--host-launch 0"
)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "lengths.npy"
    drawn = np.random.default_rng(11).lognormal(6.0, 1.4, 2000)
    np.save(path, np.minimum(drawn, 8192).astype(np.int64))
    return str(path)


@pytest.fixture
def searched(lengths, reported):
    return lambda flags: reported(f"analyze --no-split --lengths {lengths} {JOB} {flags}")


def test_the_best_schedule_is_as_fast_by_its_flags(searched):
    shown = searched("--search schedule")
    found, as_set = shown["search"], shown["results"]["after"]["tokens_per_second"]
    assert found["given"]["tokens_per_second"] == pytest.approx(as_set)
    assert shown["flags"] == found["best"][0]["flags"], "what is recommended is the best that was found"
    speeds = [row["tokens_per_second"] for row in found["best"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > found["given"]["tokens_per_second"]
    assert len({row["flags"] for row in found["best"]}) == len(speeds) <= 5
    assert all(row["memory_gib"] <= 72 and row["why"] for row in found["best"])
    flags = found["best"][0]["flags"].replace("(without --recompute-*)", "--recompute none")
    again = searched(f"--gpu-memory 80 --search none {flags}")
    assert again["results"]["after"]["tokens_per_second"] == pytest.approx(speeds[0], rel=1e-6)


def test_recomputation_is_recommended_with_all_flags_that_megatron_asks_for(searched):
    shown = searched("--search schedule --recompute none --gpu-memory 10")
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert flags in shown["flags"]


def test_a_layout_search_keeps_the_gpus_and_divides_the_model(searched):
    found = searched("--search layout")["search"]
    assert found["tried"] > 20
    for row in found["best"]:
        sizes = {"tensor-model": 1, "context": 2, "pipeline-model": 2}
        sizes = {f"--{name}-parallel-size": size for name, size in sizes.items()}
        sizes |= {flag: int(value) for flag, value in pairwise(row["flags"].split()) if flag in sizes}
        assert 4 % int(np.prod(list(sizes.values()))) == 0


def test_a_job_that_is_best_as_it_is_says_so(printed, tmp_path):
    np.save(tmp_path / "even.npy", np.full(64, 8192))
    job = f"--lengths {tmp_path / 'even.npy'} --window 8192 --model 550M"
    assert "is faster than the job as given" in printed(f"analyze --no-split --search schedule {job}")


def _ended(*_: Any) -> None:
    os._exit(9)


@pytest.mark.parametrize("function, flags", [("search._found", "--no-split"), ("comparison._outcomes", "")])
def test_an_analysis_whose_process_is_killed_ends_with_one_line(
    function, flags, lengths, command, monkeypatch
):
    monkeypatch.setattr(f"wlb_megatron.analyze.{function}", _ended)
    code, _, err = command(f"analyze {flags} --lengths {lengths} {JOB} --search layout")
    assert code == 2 and "was ended from outside" in err.strip().splitlines()[-1]


def _sleep(_: Any) -> None:
    time.sleep(3600)


def test_ctrl_c_ends_the_processes_at_work():
    with pytest.raises(KeyboardInterrupt), side_by_side(None) as submit:
        work = [submit(_sleep) for _ in range(9)]
        while not work[0].running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert all(one.done() for one in work)


class Unsent(np.ndarray):
    def __reduce__(self) -> Any:
        raise AssertionError("documents are sent to a process")


def test_documents_are_not_sent_and_the_number_of_processes_changes_nothing(lengths, monkeypatch):
    unsent = np.load(lengths).view(Unsent)
    monkeypatch.setattr(Corpus, "__reduce__", Unsent.__reduce__)
    model = LayerModel(
        shape=SHAPES["550M"],
        layout=Layout(tensor=1, context=1, pipeline=2, data=1),
        assumptions=Assumptions(),
    )
    sizes = {"window": 8192, "micro_batches": 4, "iterations": 4, "warm_up": 2, "seed": 3}
    job = Job(model=model, **sizes, corpora=(Corpus("blend", unsent),))
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        analysis = analyze(unsent, WlbConfig(), job, kind="schedule")
        found.append(as_json(analysis))
    assert found[0] == found[1] and found[0]["search"]["best"] and len(found[0]["gains"]) >= 4


def test_virtual_stages_that_are_tried_keep_out_chunks_that_they_cannot_train():
    layout = Layout(pipeline=2)
    model = LayerModel(shape=SHAPES["550M"], layout=layout, assumptions=Assumptions())
    sizes = {"window": 8192, "micro_batches": 4, "iterations": 4, "warm_up": 2, "seed": 3}
    job = Job(model=model, **sizes, trainer=Trainer(stages=2, offloads=True))
    assert job.trainer.chunks_refused("on") == []
    moved = with_layout(job, replace(layout, virtual=2), 4)
    assert [flag for flag, _ in moved.trainer.chunks_refused("on")] == [
        "--fine-grained-activation-offloading over virtual stages"
    ]
    assert with_layout(moved, layout, 4).trainer == job.trainer


def test_an_expert_is_cut_over_the_tensor_ranks_that_are_tried_unless_a_flag_says_over_how_many():
    shape = replace(SHAPES["550M"], experts=Experts(count=8, ffn=512))
    model = LayerModel(shape=shape, layout=Layout(data=4), assumptions=Assumptions())
    sizes = {"window": 8192, "micro_batches": 4, "iterations": 4, "warm_up": 2, "seed": 3}
    tried = replace(model.layout, tensor=2, data=2)
    for given, cut_over in ((None, 2), (1, 1)):
        job = Job(model=model, **sizes, trainer=Trainer(stages=1, experts=8, expert_tensor=given))
        assert with_layout(job, tried, 4).model.shape.experts.tensor == cut_over
