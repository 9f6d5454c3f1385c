"""The simulator fed by a profile: its times are the profile's own, for its own model alone."""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_profile_fit import GPU, LAYER, MODEL, OVERHEADS, made_samples, truth

from scripts.reproduce.__main__ import calibrated
from wlb_megatron.cli import main
from wlb_megatron.sharding.cut import predict_all, shard
from wlb_megatron.simulator.iteration import simulate
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import profiled_shape
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.fit import fit
from wlb_megatron.workload.model import Layout
from wlb_megatron.workload.profile import FORMAT, Profile, read_profile, write_profile

NOTHING_ELSE = Assumptions(tp_exposed=0.0, nvlink_latency=0.0, network_latency=0.0, nvlink_rate=1e30)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    samples = made_samples()
    settings = {"model": asdict(MODEL), "gpu": "a GPU", "processors": 1, "versions": {"torch": "2"}}
    profiled = {"format": FORMAT, "settings": settings, "samples": samples}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(path, {**profiled, "fit": asdict(fit(MODEL, samples, GPU))})
    return path


@pytest.fixture(scope="module")
def profile(path):
    return read_profile(path)


def modelled(profile: Profile, **layout: Any) -> LayerModel:
    return LayerModel(
        shape=profiled_shape(profile, 4),
        layout=Layout(tensor=4, distributed_optimizer=True, **layout),
        assumptions=NOTHING_ELSE,
        costs=profile.costs,
    )


def test_a_layer_takes_what_the_profile_measured(profile):
    forward, backward = modelled(profile).linear([64, 8192, 65536])
    for times, ns in ((forward, LAYER[0]), (backward, LAYER[1])):
        assert times == pytest.approx(50_000 + ns * np.array([64, 8192, 65536]), rel=0.01)


def test_attention_goes_each_way_by_its_own_table(profile):
    plans = [shard([40000, 300, 25236], 2, kind) for kind in ("per-sequence", "per-document")]
    attention = modelled(profile, context=2).attention(plans)
    for times, way in zip(attention, ("forward", "backward"), strict=True):
        expected = predict_all(plans, replace(truth(way), exchange=0.0, exchange_row=0.0))
        assert times == pytest.approx(expected, rel=0.06)


def test_what_is_recomputed_runs_its_forward_again_in_backward(profile):
    plans = [shard([8192], 1, "adaptive")]
    none, full, selective = (modelled(profile, recompute=how) for how in ("none", "full", "selective"))
    attention, linear = none.attention(plans), none.linear(8192)
    again = float(attention.forward[0, 0] + linear.forward)

    def busy(model: LayerModel) -> float:
        return float(simulate([[plans]], model).busy[0, 0, 0, 0])

    assert busy(full) == pytest.approx(busy(none) + 4 * again)
    # --recompute-method block --recompute-num-layers 1, and more than the chunk has.
    one, nine = ({"recompute_block": True, "recompute_layers": layers} for layers in (1, 9))
    assert busy(modelled(profile, recompute="full", **one)) == pytest.approx(busy(none) + again)
    assert busy(modelled(profile, recompute="full", **nine)) == pytest.approx(busy(full))
    assert selective.linear(8192) == linear
    assert selective.attention(plans).backward == pytest.approx(attention.backward + attention.forward)


def test_keys_that_travel_again_add_half_of_their_exchange_to_the_backward(profile):
    plans = [shard([8192], 2, "per-document")]
    kept, again = (modelled(profile, context=2, keep_keys=keep) for keep in (True, False))
    slow = replace(kept.assumptions, node=1, network_rate=1e8)
    kept, again = (replace(model, assumptions=slow) for model in (kept, again))
    assert (again.attention(plans).forward == kept.attention(plans).forward).all()
    longer = {name: 1.5 * getattr(kept.table, name) for name in ("exchange", "exchange_row")}
    slower = replace(kept.table, **longer)
    more = predict_all(plans, slower) - predict_all(plans, kept.table)
    assert again.attention(plans).backward - kept.attention(plans).backward == pytest.approx(more)
    assert (more > 0).all()
    one = modelled(profile, keep_keys=False)
    alone = [shard([8192], 1, "adaptive")]
    assert (one.attention(alone).backward == modelled(profile).attention(alone).backward).all()


def test_one_iteration_on_one_gpu_is_the_sum_of_its_parts(profile):
    model = modelled(profile)
    plan = shard([8192], 1, "adaptive")
    step = simulate([[[plan]]], model).steps[0]
    attention, layer = model.attention([plan]), model.linear(8192)
    ends = [model.embedding(8192), model.loss(8192)]
    parts = 4 * (sum(float(a[0, 0]) for a in attention) + sum(float(t) for t in layer))
    parts += sum(float(t) for end in ends for t in end)
    assert step == pytest.approx(parts + model.optimizer_ns(0), rel=1e-6)


def test_a_short_layer_takes_as_long_as_the_host_to_launch_it(profile):
    slow = replace(profile.costs, host=(5e6, 7e6))
    model = replace(modelled(profile), costs=slow)
    step = simulate([[[shard([64], 1, "adaptive")]]], model).steps[0]
    assert step >= 4 * 12e6
    long = simulate([[[shard([65536], 1, "adaptive")]]], model).steps[0]
    assert long == pytest.approx(simulate([[[shard([65536], 1, "adaptive")]]], modelled(profile)).steps[0])


def test_pipeline_transfers_take_the_measured_link(profile):
    model = modelled(profile, pipeline=2)
    assert model.transfer_ns(1024) == pytest.approx(20_000 + 1024 * 4096 * 2 / 4 / 200, rel=0.01)
    across = modelled(profile, pipeline=2, data=2)  # stages lie a node apart: the assumed network
    assert across.transfer_ns(1024) != pytest.approx(model.transfer_ns(1024))


def test_assumptions_calibrated_by_a_profile_give_its_layers_time(profile):
    assumptions = calibrated(Assumptions(tp_exposed=0.0), profile)
    assumed = replace(modelled(profile), assumptions=assumptions, costs=None)
    both = sum(float(t) for t in assumed.linear(10000))
    assert both == pytest.approx(sum(LAYER) * 10000, rel=0.01)
    half_rate = pytest.approx(100e9, rel=0.01)  # half of a buffer passes each of two GPUs
    assert assumptions.with_links(profile.costs).nvlink_rate == half_rate
    assert calibrated(Assumptions(matmul_rate=1e14), profile).matmul_rate == 1e14  # as the user gave it


def test_analyze_takes_a_profile(path, capsys):
    flags = ["--lengths", "3000,9000,100,16384,700", "--window", "16384", "--iterations", "2", "--json", "-"]
    flags += ["--tp", "4", "--cp", "2", "--profile", str(path), "--num-layers", "4", "--tp-exposed", "0"]
    assert main(["analyze", "--no-split", "--search", "none", *flags]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["quadratic_at"] == pytest.approx(read_profile(path).costs.quadratic_at, rel=0.15)
    assert report["profile"].startswith("a GPU, torch 2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "2"], "tp 4 there, 2 here"),
        (["--tp", "4", "--hidden-size", "5120"], "hidden 4096 there, 5120 here"),
        (["--tp", "4", "--kernel-table", "t.json"], "drop --kernel-table"),
    ],
)
def test_a_profile_of_another_layout_or_shape_is_refused_in_one_line(path, capsys, flags, message):
    arguments = ["--lengths", "300", "--window", "512", "--profile", str(path), *flags]
    assert main(["analyze", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_extras_of_a_share_are_in_the_table_that_plans_by_it(profile):
    """Rows that the executor moves cost sharding what they cost the kernels and it together."""
    costs: Costs = profile.costs
    assert costs.table.query_row == pytest.approx(2 * OVERHEADS.query_row, rel=0.2)
    assert costs.table.moved_query == pytest.approx(2 * OVERHEADS.moved_query, rel=0.2)


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "2x_h200"


def test_no_measured_run_is_predicted_more_than_a_twelfth_off():
    from scripts.bench.simulator.validate_compare import predicted

    with (RESULTS / "validation_iterations.csv").open(encoding="utf-8") as lines:
        measured = list(csv.DictReader(lines))
    profile = read_profile(RESULTS / "profile_2048.json")
    rows = [row for row in predicted(RESULTS, profile) if not row["hitch"]]
    assert len(rows) == 161
    errors = []
    for run in dict.fromkeys(row["run"] for row in rows):
        measured_ms, predicted_ms = (
            np.mean([row[key] for row in rows if row["run"] == run])
            for key in ("measured_ms", "predicted_ms")
        )
        errors.append(abs(predicted_ms / measured_ms - 1))
    assert len(errors) == 18 and max(errors) < 0.08 and np.mean(errors) < 0.04
    stored = {(row["run"], int(row["iteration"])): float(row["predicted_ms"]) for row in measured}
    for row in rows:  # the stored figures are today's
        assert abs(stored[row["run"], row["iteration"]] - row["predicted_ms"]) < 0.5
