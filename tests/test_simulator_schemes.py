"""Schemes that are compared, the bound, and the commands from end to end on small jobs."""

import json

import numpy as np
import pytest
from plan_checks import validate

from scripts.reproduce import paper
from scripts.reproduce.__main__ import REPRODUCED
from scripts.reproduce.compare import SCHEMES, Inputs, SettingRuns, lockstep, micro_batch_count
from scripts.reproduce.paper import CONFIGURATIONS, Setting
from scripts.reproduce.schemes import plan_run, shard_run
from scripts.reproduce.sensitivity import slowness_of_the_paper
from wlb_megatron.cli import main
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.simulator.iteration import perfectly_balanced, simulate
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import SHAPES
from wlb_megatron.workload.cost_model import CostModel

SETTING: Setting = CONFIGURATIONS[1]  # 550M-128K, CP=4


@pytest.fixture(scope="module")
def run():
    return SettingRuns(Inputs(iterations=24, assumptions=REPRODUCED), SETTING)


def test_the_papers_configurations_have_its_gpus_and_batches():
    models = "550M", "7B", "30B", "70B"
    assert [s.name for s in CONFIGURATIONS] == [f"{m}-{w}K" for m in models for w in (64, 128)]
    assert [s.layout.gpus for s in CONFIGURATIONS] == [32, 32, 32, 64, 64, 128, 256, 256]
    assert all(s.micro_batches == s.layout.pipeline for s in CONFIGURATIONS)
    assert paper.LARGE_JOB.layout.gpus == 8192
    names = ("550M", "7B", "30B", "70B", "405B")
    sizes = [LayerModel(shape=SHAPES[name], layout=paper.Layout()).parameters / 1e9 for name in names]
    assert sizes == pytest.approx([0.55, 7, 30, 70, 405], rel=0.11)


def test_every_scheme_packs_and_shards_every_token_once(run):
    for name, (packing, shardings) in SCHEMES.items():
        plans = run.planned(packing)
        assert len(plans) == 24, name
        for sharding in shardings:
            for iteration, plan in zip(run.shards(packing, sharding)[:3], plans, strict=False):
                for row, micro_batches in zip(iteration, plan.micro_batches, strict=True):
                    for shard, micro_batch in zip(row, micro_batches, strict=True):
                        validate(shard)
                        assert 0 <= shard.tokens - micro_batch.tokens < 8


def test_plain_windows_are_full_and_the_papers_scheme_cuts_no_document(run):
    plain = [m.tokens for p in run.planned("original") for row in p.micro_batches for m in row]
    assert set(plain) == {SETTING.window}
    pieces = [x for p in run.planned("paper-2") for row in p.micro_batches for m in row for x in m.pieces]
    lengths = long_tailed(SETTING.window)
    assert all(x.start == 0 and x.end == min(lengths[x.document], SETTING.window) for x in pieces)


def test_the_papers_adaptive_choice_is_the_faster_of_its_two(run):
    plans = run.planned("original")[:6]
    times = {}
    for sharding in ("per-sequence", "per-document", "paper-adaptive"):
        shards = [p for n in shard_run(plans, sharding, run.model) for row in n for p in row]
        times[sharding] = sum(run.model.attention(shards)).max(axis=1)
    best = np.minimum(times["per-sequence"], times["per-document"])
    assert times["paper-adaptive"] == pytest.approx(best)
    assert (times["per-sequence"] != times["per-document"]).any()


def test_nothing_is_faster_than_the_perfectly_balanced_plan_of_the_same_documents(run):
    bound = perfectly_balanced(run.planned("varlen"), run.model).ns_per_token
    for sharding in ("per-sequence", "per-document", "hybrid", "adaptive"):
        assert run.simulated("varlen", sharding).ns_per_token > bound
    # One document for each micro-batch, all alike, one rank: balanced as it is, so the bound is met.
    layout = paper.Layout(pipeline=2, distributed_optimizer=True)
    model = LayerModel(shape=SHAPES["550M"], layout=layout, assumptions=REPRODUCED)
    setting = Setting("550M", 4096, model.layout)
    lengths = np.full(64, 4096)
    plans = plan_run("original", lengths, setting, model.cost(), iterations=2, warm_up=0, seed=1)
    done = simulate(shard_run(plans, "per-document", model), model)
    assert perfectly_balanced(plans, model).ns_per_token == pytest.approx(done.ns_per_token, rel=1e-6)


def test_balanced_plans_are_predicted_even_and_faster(run):
    plain, ours = run.simulated("original", "per-sequence"), run.simulated("varlen-1", "adaptive")
    assert plain.imbalance > 1.2 > 1.06 > ours.imbalance
    assert plain.ns_per_token > ours.ns_per_token
    assert run.speedup("varlen", "adaptive") / run.bound() > 0.9


def test_a_lockstep_pipeline_goes_at_the_pace_of_its_largest_micro_batch(run):
    simulated = run.simulated("original", "per-sequence")
    largest = np.mean([times.max() for times in simulated.micro_batches])
    predicted = lockstep(simulated, SETTING.layout.pipeline)
    assert predicted == pytest.approx(7 * largest / (4 * SETTING.window))


def test_large_jobs_are_planned_and_simulated_whole():
    setting = paper.LARGE_JOB
    model = LayerModel(shape=SHAPES[setting.model], layout=setting.layout)
    lengths = long_tailed(setting.window, 20_000)
    plans = plan_run("original", lengths, setting, model.cost(), iterations=2, warm_up=0, seed=1)
    done = simulate(shard_run(plans, "per-sequence", model), model)
    assert done.busy.shape == (2, 4, 16, 16)
    assert done.busy.size * setting.layout.tensor == 2 * 8192
    assert done.tokens.tolist() == [64 * setting.window] * 2


def _simulate(*more: str) -> list[str]:
    job = """analyze --no-split --search none --lengths 500,3000,700,900,8000,1200,400 --window 8192 --model 550M
    --micro-batches 4 --pp 2 --cp 2 --dp 2 --iterations 3 --warm-up 2"""
    return [*job.split(), *more]


def test_analyze_tells_both_ways_and_says_what_has_moved(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main(_simulate("--vpp", "2", "--trace", "step.json", "--json", str(figures))) == 0
    assert "--pictures draws a step" in capsys.readouterr().err
    report = json.loads(figures.read_text())
    assert report["gpus"] == 8
    assert 0 < report["predicted_speedup"] <= report["bound"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert main(_simulate()) == 0
    assert "3 iterations, mean / most" in capsys.readouterr().out
    assert main(["watch", "steps.jsonl", "--follow"]) == 2
    printed = capsys.readouterr().err
    assert "TensorBoard and Weights & Biases" in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "3"], "--num-attention-heads 16 is not a multiple of the tensor-parallel size 3"),
        (["--vpp", "20"], "--num-layers 24 cannot be divided over --pp 2 x --vpp 20"),
        (["--micro-batches", "3", "--vpp", "2"], "not a multiple of 2 pipeline stages"),
        (["--tp-exposed", "2"], "tp-exposed is a share from 0 to 1"),
        (["--iterations", "0"], "is not a whole number from 1"),
    ],
)
def test_analyze_refuses_in_one_line(flags, message, capsys):
    assert main(_simulate(*flags)) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_attention_is_slowed_until_arrival_order_is_as_uneven_as_the_papers():
    inputs = Inputs(iterations=48, assumptions=REPRODUCED)
    factor = slowness_of_the_paper(inputs)
    run = SettingRuns(inputs, paper.BREAKDOWN_OF)
    cost = CostModel(run.cost.quadratic_at / factor, run.cost.per_document)
    uneven = []
    for plan in run.planned("original"):
        works = [sum(int(cost.work(x.tokens)) for x in m.pieces) for row in plan.micro_batches for m in row]
        uneven.append(max(works) * len(works) / sum(works))
    assert 0.25 < factor < 4 and np.mean(uneven) == pytest.approx(1.44, abs=1e-3)


def test_with_many_stages_more_micro_batches_than_windows_are_planned_and_pay():
    # 30B-128K: a host's launches are no limit.
    few = SettingRuns(Inputs(iterations=12, assumptions=REPRODUCED), CONFIGURATIONS[5])
    one, auto = few.simulated("varlen-1", "adaptive"), few.simulated("varlen", "adaptive")
    assert micro_batch_count(one) == 4 < micro_batch_count(auto)
    assert auto.step_over_ideal < one.step_over_ideal - 0.2
    assert auto.ns_per_token < one.ns_per_token / 1.15
    assert few.speedup("varlen", "adaptive") < few.bound()
