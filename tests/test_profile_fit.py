"""Costs fitted to samples whose truth is known, and profiles as files."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from wlb_megatron.errors import WlbError
from wlb_megatron.profiler.points import GRIDS, attention_points
from wlb_megatron.workload.cost_model import Curve
from wlb_megatron.workload.fit import Device, Overheads, fit, leave_out, predicted
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.model import Experts
from wlb_megatron.workload.profile import (
    FORMAT,
    Profile,
    ProfiledModel,
    read_profile,
    write_profile,
)

MODEL = ProfiledModel(hidden=4096, ffn=11008, heads=32, kv_heads=8, head_dim=128, vocab=128256, tp=4, cp=2)
GPU = Device("a GPU")
LAYER = (20.0, 45.0)
"""Nanoseconds of a token, forward and backward."""
SHARES = {"forward": 1 / 3.5, "backward": 2.5 / 3.5}
OVERHEADS = Overheads(7_000.0, 400.0, 1.0, 2.0, 5_000.0, 3.0, 1.5)
"""A call, a segment, a row of queries and of keys; a second call, a row moved for it of queries and of keys."""


def truth(way: str, *, executor: bool = True) -> Any:
    """A table of the pairs, with OVERHEADS as the executor's shares have them, if wanted."""
    share = SHARES[way]
    table = h100()

    def part(rows: Any) -> Any:
        return tuple(tuple(ns * share for ns in row) for row in rows)

    return replace(
        table,
        rectangle=part(table.rectangle),
        bottom_right=part(table.bottom_right),
        diagonal=tuple(ns * share for ns in table.diagonal),
        tile_key=0.0,
        **{name: ns * executor for name, ns in OVERHEADS._asdict().items()},
    )


def made_samples(noise: float = 0.0) -> list[dict[str, Any]]:
    """Samples as the profiler would write them, of times by `truth`."""
    rng = np.random.default_rng(5)

    def spread(ns: float) -> list[int]:
        return [round(ns * (1 + noise * rng.standard_normal()))] * 3

    samples = []
    for point in attention_points(GRIDS["full"], MODEL):
        sample: dict[str, Any] = {"part": point.part, "sizes": point.sizes}
        for way in SHARES:
            sample[way] = spread(predicted(sample, truth(way, executor=False), OVERHEADS))
        samples.append(sample)
    for tokens in (64, 1024, 8192, 32768):
        samples.append({"part": "layer", "sizes": {"tokens": tokens}})
        samples[-1] |= {way: spread(50_000 + ns * tokens) for way, ns in zip(SHARES, LAYER, strict=True)}
        for part in ("embedding", "loss"):
            samples.append({"part": part, "sizes": {"tokens": tokens}})
            samples[-1] |= {way: spread(1_000 + tokens) for way in SHARES}
    samples.append({"part": "optimizer", "sizes": {"parameters": 1_000_000}, "forward": [8_000] * 3})
    samples[-1]["backward"] = [2_000] * 3
    for size in (1 << 16, 1 << 24, 1 << 28):
        samples += [
            {"part": name, "sizes": {"bytes": size, "ranks": 2}, "forward": [20_000 + size // 200] * 3}
            for name in ("all_gather", "reduce_scatter", "all_to_all", "p2p")
        ]
    return samples


@pytest.fixture(scope="module")
def samples():
    return made_samples()


@pytest.fixture(scope="module")
def costs(samples):
    return fit(MODEL, samples, GPU)


@pytest.fixture
def profiled(samples, costs):
    settings = {"model": asdict(MODEL), "gpu": "a GPU", "versions": {"torch": "2"}}
    return {"format": FORMAT, "settings": settings, "samples": samples, "fit": asdict(costs)}


def test_a_fit_finds_the_costs_that_the_times_were_made_of(costs):
    for way, table in (("forward", costs.forward), ("backward", costs.backward)):
        real = truth(way)
        assert table.call == pytest.approx(real.call, rel=0.1)
        # Told apart from a tile's pairs by documents of a few rows alone; what they cost together is what counts.
        assert table.segment == pytest.approx(real.segment, rel=0.4)
        small = np.array([1, 16, 64, 128, 200])
        assert table.diagonal_ns(small) == pytest.approx(real.diagonal_ns(small), rel=0.05)
        for name in ("query_row", "key_row", "second_call", "moved_query", "moved_key"):
            assert getattr(table, name) == pytest.approx(getattr(real, name), rel=0.1, abs=0.25), name
        sizes = np.array([128, 1000, 5000, 20000, 65536])
        assert table.diagonal_ns(sizes) == pytest.approx(real.diagonal_ns(sizes), rel=0.05)
        keys = np.array([128, 4096, 30000, 100000, 65536])
        assert table.rectangle_ns(sizes, keys) == pytest.approx(real.rectangle_ns(sizes, keys), rel=0.05)
    assert costs.optimizer == pytest.approx(0.01)
    assert costs.links is not None
    for name, link in costs.links.items():
        # 200 bytes of a buffer pass in 1 ns; of a collective's, half are there already.
        rate = 200 if name == "p2p" else 100
        assert (link.latency, link.per_byte) == pytest.approx((20_000, 1 / rate), rel=0.01)


def test_a_host_that_waits_for_routes_launches_as_fast_as_with_few_tokens(samples):
    launches = {64: 300_000, 1024: 400_000, 8192: 3_000_000, 32768: 12_000_000}
    timed = [dict(sample) for sample in samples]
    for sample in timed:
        if sample["part"] == "layer":
            sample |= {f"host_{way}": launches[sample["sizes"]["tokens"]] for way in SHARES}
    assert fit(MODEL, timed, GPU).host == (1_700_000, 1_700_000)
    routed = replace(MODEL, experts=Experts(8, 1376, tensor=4, chosen=8))
    assert fit(routed, timed, GPU).host == (300_000, 300_000)


@pytest.mark.parametrize("backend", ["cudnn", "fa4"])
def test_bottom_right_calls_have_the_times_that_were_measured_of_them(samples, backend):
    """Half as much at as many keys as queries, where nothing masked is computed."""
    shares = {1: 0.5, 1.5: 2 / 3, 2: 0.75, 4: 0.875, 8: 0.9375}

    def lighter(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["part"] != "bottom_right":
            return sample
        ((queries, keys, copies),) = sample["sizes"]["bottom_right"]
        share = shares.get(keys / queries, 1.0)
        pairs = {
            way: truth(way, executor=False).rectangle_ns(*map(np.array, (queries, keys))) for way in SHARES
        }
        rows = OVERHEADS.segment + OVERHEADS.query_row * queries + OVERHEADS.key_row * keys
        beside = OVERHEADS.call + copies * rows
        return sample | {way: [round(float(ns) * copies * share + beside)] * 3 for way, ns in pairs.items()}

    table = fit(MODEL, [lighter(one) for one in samples], Device("a GPU", backend=backend)).table
    assert table.backend == backend
    for queries in (512, 2048, 8192):
        for ratio, share in shares.items():
            rows, keys = np.array([queries]), np.array([round(queries * ratio)])
            still = replace(table, moved_query=0.0, moved_key=0.0)
            rectangle, masked = (
                float(ns[0]) - table.segment - table.query_row * queries - table.key_row * keys[0]
                for ns in (still.rectangle_ns(rows, keys), table.bottom_right_ns(rows, keys))
            )
            assert masked == pytest.approx(rectangle * share, rel=0.06), (queries, ratio)


def test_forward_and_backward_sum_to_the_table_that_shardings_are_chosen_by(costs):
    sizes = np.array([700, 9000])
    parts = costs.forward.diagonal_ns(sizes) + costs.backward.diagonal_ns(sizes)
    assert np.abs(costs.table.diagonal_ns(sizes) - parts).max() <= 2  # each rounded


def test_the_cost_model_of_a_profile_is_that_of_its_times(costs):
    """A 64K document's attention over the rest of its layer is 64K / quadratic_at; rows moved are linear: the rest."""
    size = np.array([65536])
    rows = 2 * (4 + 3.5) * 65536
    attention = sum(int(truth(way).diagonal_ns(size)[0]) for way in SHARES) - rows
    rest = sum(LAYER) * 65536 + rows
    assert 65536 / costs.quadratic_at == pytest.approx(attention / rest, rel=0.1)
    assert costs.per_document >= 0


def test_samples_left_out_are_predicted_within_the_noise(samples):
    for part, errors in leave_out(MODEL, samples, GPU).items():
        assert abs(errors).mean() < 0.02 and np.percentile(abs(errors), 95) < 0.06, part
    unseen = leave_out(MODEL, made_samples(noise=0.02), GPU)
    noisy = {part: abs(errors).mean() for part, errors in unseen.items()}
    assert 0.003 < noisy["share"] < 0.05 and 0.003 < noisy["held_out"] < 0.05


def test_an_error_left_out_of_the_fit_is_seen(samples):
    """Shares three times as slow as their kernels' truth say so, where they are predicted unseen and unlike others."""
    wrong = [dict(s) for s in samples]
    at = next(i for i, s in enumerate(wrong) if s["part"] == "share")
    wrong[at] |= {way: [3 * ns for ns in wrong[at][way]] for way in SHARES}
    assert min(leave_out(MODEL, wrong, GPU)["share"]) < -0.5


def test_a_curve_goes_on_as_its_last_line_does():
    curve = Curve(tokens=(10, 20, 40), forward=(100, 100, 300), backward=(1, 2, 4))
    forward, backward = curve.at([0, 10, 15, 30, 60])
    assert forward.tolist() == [100, 100, 100, 200, 500]
    assert backward.tolist() == pytest.approx([1, 1, 1.5, 3, 6])
    for tokens, forward, backward in ((1,), (1,), (1,)), ((2, 1), (1, 2), (1, 2)), ((1, 2), (1,), (1, 2)):
        with pytest.raises(ValueError, match="token count"):  # no curve
            Curve(tokens=tokens, forward=forward, backward=backward)


@pytest.mark.parametrize("part", ["call", "layer", "optimizer", "rectangle", "diagonal", "loss"])
def test_a_fit_names_what_it_lacks(samples, part):
    with pytest.raises(WlbError, match="the profile lacks"):
        fit(MODEL, [s for s in samples if s["part"] != part], GPU)


def test_a_profile_is_read_as_it_was_written(tmp_path, profiled, costs):
    path = tmp_path / "profile.json"
    write_profile(path, profiled | {"fit": profiled["fit"] | {"of_a_later_release": 1}})
    read = read_profile(path)
    assert read.costs == costs and read.model == MODEL
    assert "a GPU" in read.describe() and read.fingerprint in read.describe()
    assert json.loads(path.read_text())["samples"] == profiled["samples"]
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "format": 99}, "not of format"),
        (lambda t: {**t, "samples": t["samples"][1:]}, "fingerprint"),
        (lambda t: {k: v for k, v in t.items() if k != "fit"}, "damaged"),
        (lambda t: {**t, "fit": {**t["fit"], "layer": {}}}, "damaged"),
        (lambda t: {**t, "fit": {**t["fit"], "host": None}}, "damaged"),
        (lambda t: {**t, "fit": {**t["fit"], "quadratic_at": "x"}}, "damaged"),
        (lambda t: {**t, "fit": {**t["fit"], "per_document": float("nan")}}, "NaN is no number"),
        (lambda t: [1], "not of format"),
    ],
)
def test_a_damaged_profile_is_told_in_one_line(tmp_path, profiled, change, message):
    path = tmp_path / "profile.json"
    write_profile(path, profiled)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(WlbError, match=message) as error:
        read_profile(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_text("{")
    with pytest.raises(WlbError, match="not JSON"):
        read_profile(path)
    with pytest.raises(WlbError, match="cannot be read"):
        read_profile(tmp_path / "none.json")


def test_a_profile_of_another_model_is_refused_with_what_differs(tmp_path, profiled):
    write_profile(tmp_path / "p.json", profiled)
    profile: Profile = read_profile(tmp_path / "p.json")
    profile.refuse_other(MODEL, 4)
    profile.refuse_other(replace(MODEL, vocab=9), 4, any_vocabulary=True)
    with pytest.raises(WlbError, match="hidden 4096 there, 5120 here; tp 4 there, 8 here"):
        profile.refuse_other(replace(MODEL, hidden=5120), 8)
