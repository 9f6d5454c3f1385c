"""`analyze`: figures recomputed from `inspect`'s JSON, flags that training accepts, pictures, numpy alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import NUMPY_ALONE, run

from wlb_megatron.analyze.comparison import Analysis, Gain
from wlb_megatron.analyze.comparison import analyze as analyze_job
from wlb_megatron.analyze.measure import Measured, spread
from wlb_megatron.analyze.output import figures, print_analysis
from wlb_megatron.analyze.search import Found, Searched, as_given
from wlb_megatron.arguments import add_arguments, config_from_args, flags_of
from wlb_megatron.config import WlbConfig
from wlb_megatron.inspect_plans import inspect_plans
from wlb_megatron.packing.packer import Packer
from wlb_megatron.simulator.iteration import Simulated
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import SHAPES
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.memory import memory_needed
from wlb_megatron.workload.model import Layout, Model

pytestmark = pytest.mark.usefixtures("quick_thresholds")

QUADRATIC_AT = 40.0
CONFIG = WlbConfig(quadratic_at=QUADRATIC_AT)


def some_lengths(count: int = 3000, largest: int = 64) -> np.ndarray:
    drawn = np.random.default_rng(5).lognormal(2.0, 1.2, count)
    return np.minimum(drawn, largest).astype(np.int64)  # a few of length 0, many of the largest


def test_spread_is_mean_and_largest() -> None:
    assert spread([0, 5], [96, 4]) == spread([0] * 96 + [5] * 4)
    shown = spread(list(range(1, 101)))
    assert (shown.mean, shown.max) == (50.5, 100.0)
    assert spread([], []).max == 0.0


def analyze(
    lengths: np.ndarray, config: WlbConfig, layout: Layout, *, window: int = 64, **job: int | None
) -> Analysis:
    """job: micro_batches, iterations and seed."""
    sizes = replace(layout, distributed_optimizer=True)
    model = LayerModel(shape=SHAPES["550M"], layout=sizes, assumptions=Assumptions(host_launch=0))
    return analyze_job(lengths, config, Job(model=model, window=window, **job, warm_up=0), split=False)


def from_json(
    lengths: np.ndarray, config: WlbConfig, layout: Layout, micro_batches: int, iterations: int
) -> dict[str, Any]:
    """The same figures, from nothing but what inspect prints and the formula of the cost model."""
    one_stage = replace(layout, pipeline=1, virtual=1, micro_batches=micro_batches)
    shown = inspect_plans(lengths, config, one_stage, window=64, iterations=iterations)["iterations"]
    imbalance, delays, sizes, weights, pad = [], [], [], [], 0
    entered: dict[tuple[int, int], int] = {}
    for number, iteration in enumerate(shown):
        entered |= {(i, t): number for i, start, end in iteration["arrived"] for t in range(start, end)}
        trained = [[piece for piece in m["documents"] if piece[0] >= 0] for m in iteration["micro_batches"]]
        delays += [number - entered[i, t] for row in trained for i, *ends in row for t in range(*ends)]
        tokens = [[end - start for _, start, end in row] for row in trained]
        sizes += map(sum, tokens)
        work = [sum(n + n * n / QUADRATIC_AT for n in row) for row in tokens]
        imbalance.append(max(work) * len(work) / sum(work))
        # Each token's share of its step's gradient, beside the length of its document.
        weights += [(n, 1 / sum(map(sum, tokens))) for row in tokens for n in row for _ in range(n)]
        for micro_batch in iteration["micro_batches"]:
            pad += sum(end - start for i, start, end in micro_batch["documents"] if i < 0)
    of_long = [weight for length, weight in weights if length > 64 / 2]
    return {
        "imbalance": np.mean(imbalance),
        "token_delay": np.mean(delays),
        "largest delay": max(delays),
        "tokens": sum(sizes),
        "largest": max(sizes),
        "largest iteration": max(map(sum, np.reshape(sizes, (len(shown), -1)).tolist())),
        "padding_share": pad / (sum(sizes) + pad),
        "long": np.mean(of_long) / np.mean([weight for _, weight in weights]),
    }


@pytest.mark.parametrize("packing", ["original", "varlen"])
@pytest.mark.parametrize("layout", [Layout(data=2, context=2, tensor=2), Layout(data=1, context=4)])
def test_every_figure_equals_what_the_printed_plans_give(packing, layout, monkeypatch):
    monkeypatch.delattr(Packer, "state")  # of checkpoints, which analysis does not ask
    lengths = some_lengths()
    config = replace(CONFIG, packing=packing, thresholds="24,40", max_delay=6, micro_batch_cost=0.0)
    # Adaptive's choice is by the model's kernel times, which inspect does not know.
    config = replace(config, document_cost=0.0, sharding="per-document")
    analysis = analyze(lengths, config, layout, micro_batches=3, iterations=20, seed=None)
    after = figures(analysis.after)
    expected = from_json(lengths, config, layout, micro_batches=3, iterations=20)
    flat = {key: after[key]["mean"] for key in ("imbalance", "token_delay")}
    flat |= {"tokens": after["tokens"], "padding_share": after["padding_share"]}
    flat |= {"largest": after["micro_batch_tokens"]["max"], "largest delay": after["token_delay"]["max"]}
    flat["largest iteration"] = after["iteration_tokens"]["max"]
    flat["long"] = after["long_documents_weight"]
    assert flat == pytest.approx({key: expected[key] for key in flat}, rel=1e-4)
    assert after["iterations"] == 20
    assert analysis.thresholds == ([24, 40] if packing == "varlen" else [])


def test_equal_token_weights_are_reported_and_reach_the_flags(tmp_path, printed, reported):
    np.save(tmp_path / "lengths.npy", 256 * some_lengths())
    job = f"analyze --lengths {tmp_path / 'lengths.npy'} --window 16384 --micro-batches 4 --tp 8 --chunks off --cp 2"
    job += " --iterations 8 --no-split --max-tokens 24576"

    def row(flags: str) -> str:
        lines = printed(f"{job} {flags}").splitlines()
        return next(line for line in lines if line.startswith("weight of a long document's tokens"))

    def weight(flags: str, recommended: bool | None = None) -> float:
        shown = reported(f"{job} {flags}")
        assert recommended is None or ("--wlb-token-weights" in shown["flags"]) == recommended
        return float(shown["results"]["after"]["long_documents_weight"])

    step = "--token-weights step"
    by_step = weight(step, True)
    assert by_step < 0.9 and row(step).endswith(f"{by_step:.2f}")
    for choice, recommended in ("--token-weights equal", True), ("", False):  # documents wait: auto is equal
        assert weight(choice, recommended) == 1.0 and row(choice).endswith(" 1.00")
    with_chunks = "--pp 2 --chunks on"
    assert weight(f"{with_chunks} --token-weights step") == weight(with_chunks) != 1.0


def test_before_is_arrival_order_by_sequence_whatever_the_settings() -> None:
    layout = Layout(context=2)
    lengths = some_lengths()
    first = analyze(lengths, CONFIG, layout, micro_batches=2, iterations=5, seed=1)
    plain = replace(CONFIG, packing="original", sharding="per-sequence")
    second = analyze(lengths, plain, layout, micro_batches=2, iterations=5, seed=1)
    assert figures(first.before) == figures(second.before) == figures(second.after)
    assert second.speedup == 1.0


def test_balancing_is_predicted_to_help_long_tails_and_not_to_hurt_equal_lengths() -> None:
    config = WlbConfig(quadratic_at=1024 * QUADRATIC_AT, sharding="per-document", chunks="off")
    config = replace(config, micro_batches_per_window="1", micro_batch_cost=0.0)

    def predicted(config: WlbConfig, lengths: np.ndarray) -> Analysis:
        layout = Layout(context=2, pipeline=4)
        return analyze(lengths, config, layout, window=65536, micro_batches=4, iterations=40, seed=1)

    uneven = predicted(config, 1024 * some_lengths())
    assert uneven.after.imbalance.mean < uneven.before.imbalance.mean - 0.05
    assert uneven.equal_work_speedup > 1.0, "the bubble stays: evenness alone gains little"
    free = replace(config, micro_batches_per_window="auto", micro_batch_cost=2048.0)
    assert predicted(free, 1024 * some_lengths()).speedup > 1.05
    equal = predicted(replace(config, sharding="adaptive"), np.full(500, 16384))
    assert equal.speedup == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("flags", "packing"),
    [("", "varlen"), ("", "original"),
     ("--max-tokens 100000 --thresholds 24000,40000 --max-delay 3 --cp 2 --sharding hybrid", "varlen"),
     ("--quadratic-at 99", "original")],
)  # fmt: skip
def test_the_flags_to_copy_set_the_same_packing_in_training(flags, packing, reported):
    report = reported(
        "analyze --lengths 9000,30000,4000,64000,0,7000,64000,2000,2000,40000,12000 --window 64000 "
        f"--micro-batches 4 --pp 4 --host-launch 0 --packing {packing} --iterations 9 --no-split {flags}"
    )
    config = config_from_args(add_arguments(argparse.ArgumentParser()).parse_args(report["flags"].split()))
    is_set = "--quadratic-at" in flags  # else a run's is its model's, which analyze did not get
    assert (config.packing, config.quadratic_at) == (packing, report["quadratic_at"] if is_set else None)
    if packing == "varlen":
        assert config.max_tokens == (100000 if "--max-tokens" in flags else None)
        assert config.thresholds == ("24000,40000" if "--thresholds" in flags else "auto")
    if "--max-delay" in flags:
        assert (config.max_tokens, config.thresholds, config.max_delay) == (100000, "24000,40000", 3)


def test_the_models_shape_sets_where_attention_costs_as_much_as_the_rest(reported, refused):
    line = "analyze --lengths 8,9 --window 16 --iterations 2"

    def quadratic_at(shape: str) -> float:
        return reported(f"{line} --hidden-size 4096 --num-attention-heads 32 {shape}")["quadratic_at"]

    seven = quadratic_at("--ffn-hidden-size 11008 --swiglu")
    assert seven == pytest.approx(29.7e3, rel=0.01)
    assert quadratic_at("") == pytest.approx(quadratic_at("--ffn-hidden-size 16384 --num-query-groups 32"))
    grouped = "--ffn-hidden-size 11008 --swiglu --num-query-groups 8"
    assert quadratic_at(grouped) < seven
    assert quadratic_at(f"{grouped} --quadratic-at 99") == 99
    refused(f"{line} --hidden-size 4096")


def test_what_each_part_gains_is_what_its_settings_gain(tmp_path, reported):
    np.save(tmp_path / "lengths.npy", 256 * some_lengths(600))
    job = f"--lengths {tmp_path / 'lengths.npy'} --window 16384 --micro-batches 4 --cp 2 --pp 2 --tp 2"
    job += " --host-launch 0 --iterations 6 --warm-up 4"

    def speedup(flags: str) -> float:
        return reported(f"analyze --no-split {job} {flags}")["predicted_speedup"]

    analysis = reported(f"analyze {job}")
    gains = {gain["name"]: gain for gain in analysis["gains"]}
    one_whole = "--micro-batches-per-window 1 --chunks off"
    settings = {
        "sharding of each document": "--packing original --chunks off",
        "packing of whole documents": f"{one_whole} --max-delay 0 --thresholds none",
        "delay of long documents": one_whole,
        "number of micro-batches": "--chunks off",
        "long documents in chunks": "--chunks on",
    }
    assert list(gains) == list(settings)
    for name, flags in settings.items():
        assert gains[name]["by_token"] == pytest.approx(speedup(flags), abs=1e-9), name
    alone = speedup(f"{one_whole} --max-delay 0 --thresholds none --sharding per-sequence")
    assert gains["packing of whole documents"]["alone"] == pytest.approx(alone)
    best = max(1.0, analysis["predicted_speedup"], *(gain["by_token"] for gain in gains.values()))
    assert analysis["predicted_speedup"] <= analysis["recommended"]["by_token"] <= best
    for result in analysis["results"].values():
        assert sum(result["waiting"].values()) == pytest.approx(result["step_over_ideal"] - 1)


def test_without_a_mask_every_window_is_one_document(reported):
    job = "analyze --window 4096 --micro-batches 2 --cp 2 --dp 2 --iterations 2"
    report = reported(f"{job} --lengths 900,4096,300,2000")
    rate = report["results"]["after"]["tokens_per_second"] / report["speedup_over_unmasked"]
    whole = reported(f"{job} --no-split --lengths 4096")
    assert rate == pytest.approx(whole["results"]["before"]["tokens_per_second"])


def test_the_longest_micro_batch_that_fits_is_trainings(reported):
    job = "--lengths 900,4096 --window 4096 --tp 4 --cp 2 --pp 2 --iterations 1 --gpu-memory 40"
    fits = reported(f"analyze --no-split {job}")["fits"]
    shape = Model(hidden=4096, ffn=11008, layers=16, heads=32, kv_heads=8, head_dim=128, vocab=128_256)
    layout = Layout(tensor=4, context=2, pipeline=2, group=2, sequence=True, distributed_optimizer=True)
    room, most = int((40 << 30) * 0.9), fits["micro_batch"]
    assert memory_needed(shape, layout, most) <= room < memory_needed(shape, layout, most + 8)
    assert fits["window"] <= most * 4 / 5 < fits["window"] + 1024


def test_weights_that_fit_are_not_blamed_for_a_window_that_does_not(command):
    job = "--lengths 9000,131072,40000,70000,2000 --window 131072 --micro-batches 4 --tp 4 --cp 2 --pp 4 --model 7B"
    code, out, err = command(f"analyze {job} --iterations 1 --warm-up 0 --search schedule")
    assert code == 0, err
    assert "weights, gradients" not in out and "does not fit 80 GiB a GPU, which holds windows up to " in out
    first = next(line for line in out.splitlines() if line.startswith("1: ")).removeprefix("1: ")
    assert out.splitlines()[-1] == f"flags: {first} (the search's first that fits; your other flags stay)"
    code, out, err = command(f"analyze {job} --iterations 1 --warm-up 0 --search none")
    assert (code, err) == (0, "") and "flags, once it fits: " in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "cure"),
    [
        ("--model 70B --tp 2 --pp 2", "raise --tp or --pp, "),
        ("--model 7B --tp 2 --pp 2 --num-experts 64", "raise --expert-model-parallel-size, --tp or --pp, "),
    ],
)
def test_nothing_is_recommended_where_weights_alone_do_not_fit(model, cure, printed, reported, refused):
    job = f"--lengths 900,4096,300,2000 --window 4096 --micro-batches 4 {model} --iterations 1 --warm-up 0"
    out = printed(f"analyze --no-split {job}")
    assert "will not run: weights, gradients and optimizer state alone need " in out
    assert cure in out.replace("\n", " ") and "80 GiB a GPU is" in out
    assert out.splitlines()[-1] == "flags: none recommended, because the weights do not fit (see above)"
    report = reported(f"analyze --no-split {job}")
    assert report["flags"] is report["recommended"] is None and cure in report["weights_problem"]
    assert "will not run: weights" in refused(f"analyze {job} --gpu-memory 80")
    assert reported(f"analyze --no-split {job} --gpu-memory 4000")["flags"] is not None


def test_parts_that_do_not_fit_the_memory_are_left_out(reported):
    job = "--lengths 9000,131072,40000,70000,2000 --window 131072 --micro-batches 4 --tp 4 --cp 4 --pp 4"
    job += " --gpu-memory 50"
    report = reported(f"analyze {job} --iterations 2 --warm-up 0")
    names = [gain["name"] for gain in report["gains"]]
    assert names == ["sharding of each document", "long documents in chunks"]
    assert report["fits"]["in_chunks"] and report["fits"]["micro_batch"] == report["max_tokens"] < 98304


@pytest.fixture
def analysis() -> Analysis:
    return analyze(some_lengths(), CONFIG, Layout(tensor=8), micro_batches=2, iterations=6, seed=1)


def test_what_is_predicted_slower_is_not_recommended():
    lengths = np.full(400, 64)
    config = WlbConfig(quadratic_at=QUADRATIC_AT, chunks="off", sharding="per-sequence")
    analysis = analyze(lengths, config, Layout(), micro_batches=2, iterations=3, seed=1)
    assert analysis.speedup == 1.0
    for speedup in (0.5, 1.0, 1.009, 1.011):
        packing = "" if speedup > 1.01 else "--wlb-packing original "
        simulated = _faster(analysis.before.simulated, speedup)
        flags = flags_of(replace(analysis, after=replace(analysis.after, simulated=simulated)).best.config)
        assert flags.replace(" --wlb-chunks off", "") == (
            f"{packing}--wlb-sharding per-sequence --wlb-quadratic-at 40.0"
        )


def test_flags_without_effect_on_the_recommended_packing_are_left_out() -> None:
    limits = {"max_delay": 3, "max_tokens": 100, "token_weights": "equal"}
    config = WlbConfig(**limits)
    arrival = flags_of(replace(config, packing="original"))
    assert arrival == "--wlb-packing original --wlb-token-weights equal"
    assert flags_of(config) == "--wlb-max-tokens 100 --wlb-max-delay 3 --wlb-token-weights equal"


def test_a_gain_of_nothing_is_said_not_to_be_worth_it(printed):
    job = "--lengths 64,64,64,64 --window 64 --micro-batches 2 --iterations 2 --warm-up 0 --tp 8"
    out = printed(f"analyze {job}")
    assert "same mask: 1.000 by token" in out
    assert "not worth it: nothing tried is predicted to gain 1 % over arrival order by token" in out
    assert out.splitlines()[-1] == "flags: --wlb-packing original --wlb-sharding per-sequence"


def test_others_are_recommended_for_more_than_noise_and_never_with_a_slower_slowest_step():
    analysis = analyze(some_lengths(), CONFIG, Layout(pipeline=2), micro_batches=2, iterations=6, seed=1)
    slowest = float(analysis.after.simulated.steps.max() / analysis.before.simulated.steps.max())
    scale = 1.1 / analysis.speedup  # as if this were faster than arrival order, whatever it is here
    simulated = _faster(analysis.after.simulated, scale)
    analysis = replace(analysis, after=replace(analysis.after, simulated=simulated))
    slowest /= scale

    def recommended(by_token: float, slowest: float) -> str:
        other = Gain("other", replace(CONFIG, chunks="off"), None, by_token, by_token, slowest)
        return replace(analysis, gains=(other,)).best.name

    assert analysis.speedup == pytest.approx(1.1)
    assert recommended(1.1 * 1.005, slowest) == "as set"
    assert recommended(1.1 * 1.02, slowest) == "other"
    assert recommended(1.1 * 1.02, slowest * 1.01) == "as set"


def test_the_steadiest_settings_that_are_nearly_as_fast_are_named_if_the_slowest_step_is_long(
    analysis, capsys
):
    """As set: 1.2 by token and a slowest step of 1.6 x arrival order's."""
    arrival = analysis.before.simulated
    slowest, speed = float(arrival.steps.max() / 1e6), 1e9 / arrival.ns_per_token
    long = np.full(len(arrival.steps), 1.6 * arrival.steps.max())
    long[1:] = (arrival.steps.sum() / 1.2 - long[0]) / (len(long) - 1)
    after = replace(analysis.after, simulated=replace(arrival, steps=long))
    chunks = Gain("chunks", replace(CONFIG, chunks="on"), 1.1, 1.1, 1.15, 1.04)
    given = Found(as_given(analysis.job, CONFIG), "", 1.2 * speed, 1.6 * slowest, 0, {}, 1.0)

    def last(*gains: Gain, found: tuple[tuple[float, float], ...] = (), of: Measured = after) -> str:
        """found: by token and slowest step of --a, --b, .."""
        finds = [
            replace(given, flags=f"--{letter}", tokens_per_second=by_token * speed, slowest=times * slowest)
            for letter, (by_token, times) in zip("abc", found, strict=False)
        ]
        searched = Searched(given, tuple(finds), 1, 2) if finds else None
        print_analysis(replace(analysis, after=of, gains=gains, searched=searched))
        return capsys.readouterr().out.splitlines()[-1]

    named = "steadier: --wlb-chunks on --wlb-quadratic-at 40.0 ({} x as fast, slowest step {} x arrival order's, not "
    named += "{} x)"
    none = "steadier: none found; the slowest step takes 1.60 x arrival order's"
    assert last(chunks) == named.format("0.92", "1.04", "1.60")
    assert last(chunks, replace(chunks, slowest=1.03)) == named.format("0.92", "1.03", "1.60")
    assert last() == last(replace(chunks, by_token=1.07)) == last(replace(chunks, slowest=1.59)) == none
    assert last(replace(chunks, config=replace(chunks.config, overlong="chunk"))) == none, (
        "which trains others"
    )
    assert last(chunks, of=analysis.before).startswith("flags: "), "its steps are alike"
    assert last(chunks, found=((1.5, 1.04), (1.4, 0.9))).startswith(
        "flags: --a (1.25 x as set, slowest step 0.65 x"
    )
    assert last(chunks, found=((1.3, 1.5), (1.2, 0.9))).startswith(
        "steadier: --b (0.92 x as fast, slowest step 0.90 x"
    )
    assert last(replace(chunks, by_token=1.2), found=((1.3, 1.3),)) == named.format("0.92", "1.04", "1.30")


def _faster(simulated: Simulated, scale: float) -> Simulated:
    return replace(simulated, steps=simulated.steps / scale)


def test_a_table_tells_both_packings_and_the_flags(printed):
    out = printed("analyze --lengths 9,30,0,64,99 --window 64 --iterations 9")
    for phrase in (
        "5 documents, 202 tokens; 1 empty (left out), 1 above the window (split)",
        "9 iterations, mean / most",
        "as set: varlen, adaptive",
        "imbalance of micro-batches' work, max/mean",
        "token delay, iterations",
        "will not run: weights, gradients and optimizer state alone need ",
        "delay of long documents",
        "predicted speed-up over arrival order with the same mask: ",
        "over Megatron without a document mask",
        "flags: ",
    ):
        assert phrase in out
    assert out.count("\n") <= 40 and max(map(len, out.splitlines())) <= 100


def test_the_picture_of_a_step_is_written_whole_and_nothing_beside_it(tmp_path, command):
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "lengths.npy", some_lengths(500))
    out = tmp_path / "pictures"
    line = f"analyze --no-split --lengths {tmp_path / 'lengths.npy'} --window 64 --packing original"
    code, _, err = command(f"{line} --micro-batches 140 --dp 2 --pp 2 --cp 2 --iterations 3 --pictures {out}")
    assert code == 0, err
    assert [path.name for path in out.iterdir()] == ["timeline.png"]
    picture = (out / "timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_numpy_alone_is_enough_without_pictures_and_pictures_ask_for_matplotlib() -> None:
    line = "analyze --lengths 9,30,64 --window 64 --iterations 5"
    done = run(f"{line} --json -", code=NUMPY_ALONE)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["results"]["after"]["iterations"] == 5
    done = run(f"{line} --pictures nowhere", code=NUMPY_ALONE)
    assert done.returncode == 2
    assert done.stderr.startswith("wlb_megatron: error: drawing needs matplotlib")
    assert not Path("nowhere").exists()
