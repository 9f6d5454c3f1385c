"""What a run shows of itself while it trains: predicted beside measured time, a real iteration's trace."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_runs import LENGTHS, ROOT, flags, output_of, write_corpus
from test_documents_indexed import write_index
from test_profile_fit import GPU, made_samples
from training_jobs import training_job

from wlb_megatron.dynamic.plan import Group, StepPlan, block_sizes, group_cost, token_ns
from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece
from wlb_megatron.plugin.flags.limits import complete, fit_to_memory, recompute_memory
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.logs import metrics, timers, trace
from wlb_megatron.plugin.logs.metrics import WINDOW, Progress
from wlb_megatron.plugin.logs.prediction import group_predictor, layer_model, predictor
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, ShardSettings, plan_iterations
from wlb_megatron.plugin.plans.source import open_part
from wlb_megatron.report.terminal import duration
from wlb_megatron.sharding.cut import orders_of, shard, shard_all
from wlb_megatron.simulator.iteration import simulate
from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.fit import fit
from wlb_megatron.workload.profile import FORMAT, ProfiledModel, host_name, write_profile


@pytest.fixture(scope="module")
def shown(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a run over two ranks printed of itself, and the last line of its log."""
    folder = tmp_path_factory.mktemp("shown")
    more = f"--data-path {corpus} --global-batch-size 2 --train-iters 4 --split 1,0,0 --timing-log-level 2"
    output = output_of([*flags(context=2), *more.split(), "--wlb-log", str(folder / "log.jsonl")], 2)
    return output, json.loads((folder / "log.jsonl").read_text().splitlines()[-1])


@pytest.mark.megatron
def test_a_run_says_how_far_it_is(shown):
    output, last = shown
    tokens, steps = sum(LENGTHS), sum(LENGTHS) / 128
    epoch = f"an epoch is {tokens} tokens, {steps:.0f} steps"
    assert f"{epoch}; the run's 4 steps are {4 / steps:.2f} of them." in output
    assert re.search(r"\[wlb\] iteration 1 of 4 \(25\.0%\) \| imb", output)
    assert re.search(r"\[wlb\] iteration 3 of 4 \(75\.0%, \d+ s left\) \|", output)
    assert "/s/GPU" not in output, "of no use on CPUs"
    assert last["seconds_left"] == 0 and last["train_iterations"] == 4 and last["time"] > 1.7e9


def test_the_time_left_is_that_of_the_latest_iterations() -> None:
    now = [0.0]
    run = Progress(clock=lambda: now[0])
    assert "seconds_left" not in run.add(11, 1000)
    for iteration in range(12, 12 + 2 * WINDOW):
        now[0] += 9.0 if iteration < 20 else 2.0
        figures = run.add(iteration, 1000)
    assert figures["seconds_left"] == pytest.approx(2.0 * (1000 - iteration))
    assert "seconds_left" not in run.add(500, None)
    spelled = [duration(seconds) for seconds in (45, 720, 12_000, 457_200)]
    assert spelled == ["45 s", "12 min", "3 h 20 min", "5 d 7 h"]


def figures_of(**changes: Any) -> dict[str, Any]:
    figures = {"iteration": 7, "imbalance": 1.01, "cp_imbalance": 1.0, "tokens": 100, "delayed": 2}
    figures |= {"token_delay": 0.5, "plan_ms": 1.0, "plan_wait_ms": 0.0, "measured_ms": 812.3}
    figures |= {"consumed_tokens": 700, "tokens_per_second_per_gpu": 61.55, "step_over_ideal": 1.1}
    figures |= {"epochs": {"data/web": 0.25}, "overlong_documents": 0, "lost_tokens": 0, "micro_batches": 4}
    return figures | {"predicted_ms": 790.14} | changes


def test_the_log_line_puts_the_predicted_beside_the_measured_time() -> None:
    assert metrics.log_line(figures_of()).endswith("| ms: 812.3, predicted 790.1")
    gained = metrics.log_line(figures_of(), gain=1.1832)
    assert gained.endswith("predicted 790.1 | predicted gain over arrival order: 1.183 so far")
    assert "predicted" not in metrics.log_line(figures_of(predicted_ms=None))
    shardings = figures_of(shardings={"hybrid": 3, "per-document": 1})
    assert "| sharding: 3 hybrid, 1 per-document | ms" in metrics.log_line(shardings)


def test_the_log_line_tells_epochs_what_was_left_out_and_rates_and_memory_where_there_are_any():
    assert "| epochs: 0.250 |" in metrics.log_line(figures_of())
    assert "spread" not in metrics.log_line(figures_of())
    assert ", 3 steps above --wlb-batch-spread |" in metrics.log_line(figures_of(above_spread=3))
    blend = {f"data/{name}": n / 10 for n, name in enumerate(["web", "code", "books", "wiki", "law", "math"])}
    chunks = metrics.log_line(figures_of(documents_in_chunks=3, chunks=11))
    assert "micro-batches, 3 documents in 11 chunks |" in chunks
    line = metrics.log_line(figures_of(epochs=blend, overlong_documents=3, lost_tokens=70))
    assert "in 0 chunks" not in line
    assert "| epochs: 0.500 math, 0.400 law, 0.300 wiki, 0.200 books, less of 2 others |" in line
    assert "| documents above the window: 3, 70 of their tokens left out |" in line
    kept = {"recomputed_share": 0.125, "planned_peak_gib": 58.9, "peak_gib": 60.1, "available_gib": 66.2}
    line = metrics.log_line(figures_of(tflops_per_gpu=412.34, **kept))
    assert "700 so far, 62/s/GPU, 412 TFLOP/s/GPU |" in line
    assert "| layers recomputed: 12.5%, peak GiB: 60.10 of 66.20, planned 58.90 |" in line
    on_cpu = figures_of(**kept | {"peak_gib": 0.0})
    del on_cpu["tokens_per_second_per_gpu"]
    line = metrics.log_line(on_cpu)
    assert "GPU" not in line and "GiB" not in line and "700 so far | delayed" in line


@pytest.mark.megatron
def test_a_run_counts_the_passes_over_each_corpus_and_the_documents_that_it_drops(tmp_path: Path) -> None:
    web, small = tmp_path / "web", tmp_path / "small"
    write_corpus(web, [40, 100, 24] * 10)
    write_corpus(small, [20, 40])
    log = tmp_path / "log.jsonl"
    more = f"--data-path 1 {web} 1 {small} 1 {small} --split 9,1,0 --global-batch-size 2 --train-iters 10"
    more += f" --log-interval 5 --wlb-overlong drop --wlb-log {log}"
    said = output_of([*flags(), *more.split()], 1)
    assert "> wlb_megatron: 31 documents of 34, packing" in said  # 27 of 30, 2 of 2, and these again
    waits = "tokens or more may wait up to 16 iterations"
    assert f"{waits}. They train in fuller steps, so a token weighs the same" in said
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["epochs"] is not None for row in rows] == ([False] * 4 + [True]) * 2
    last = rows[-1]
    # 1,280 tokens and at most one document more arrive, a third of them from each corpus; of 64 in web a 100 is passed.
    epochs = last["epochs"]
    assert list(epochs) == [str(web), str(small), f"{small} #2"]
    assert epochs[str(small)] == pytest.approx(1280 / 3 / 60, abs=1) and epochs[str(web)] < 1
    dropped = last["overlong_documents"]
    assert abs(dropped - epochs[str(web)] * 9) <= 3 and last["lost_tokens"] == 100 * dropped > 0
    assert last["most_epochs"] == pytest.approx(max(epochs.values()), abs=1e-4)
    assert f"documents above the window: {dropped}, {100 * dropped} of their tokens left out" in said


def test_a_chosen_sharding_is_named_in_its_plan() -> None:
    plans = [shard(lengths, 2, "adaptive") for lengths in ([4096] * 4, [65536])]
    assert {plan.kind for plan in plans} <= {"hybrid", "per-document", "per-sequence"}
    for plan in plans:
        same = shard(plan.lengths, 2, plan.kind)
        assert all((a == b).all() for a, b in zip(plan.ranks, same.ranks, strict=True))
    assert shard([64], 2, "per-document").kind == ""


def plan_of(grid: list[list[list[int]]]) -> IterationPlan:
    def micro_batch(tokens: list[int]) -> MicroBatch:
        return MicroBatch(tuple(Piece(0, at, 0, n) for at, n in enumerate(tokens)), sum(tokens))

    return IterationPlan(0, (), tuple(tuple(map(micro_batch, row)) for row in grid), ())


def job_of(costs: Costs | None = None, **changes: Any) -> TrainingJob:
    """costs: of a profile."""
    settings = {
        **{"num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32},
        **{"num_query_groups": 8, "padded_vocab_size": 128256, "tensor_model_parallel_size": 4},
        **{"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 2},
    }
    job = training_job(**settings | changes)
    return job if costs is None else replace(job, profile=SimpleNamespace(costs=costs))


@pytest.fixture(scope="module")
def costs() -> Costs:
    return fit(ProfiledModel(**MODEL), made_samples(), GPU)


def test_the_live_prediction_is_the_simulators_where_all_ranks_have_like_documents(costs) -> None:
    """It shards its own rank's micro-batches alone, and takes the others' attention from their documents."""
    job = job_of(costs)
    lengths = [[4096, 8192], [10000, 2000, 288]]
    plan = plan_of([[document, document] for document in lengths])
    shards = [shard(document, 2, "adaptive", costs.table) for document in lengths]
    # As the process that plans has it.
    live = pickle.loads(pickle.dumps(predictor(job, 0)))(plan, shards)
    whole = simulate([[[s, s] for s in shards]], layer_model(job)).steps[0] / 1e6
    assert live == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_runs_log_predicts_the_speed_up_that_analyze_does(recompute, tmp_path, reported):
    """Two runs with one profile, as set and in arrival order: milliseconds of their logs, over their tokens. A dry run
    prints what analyze does (test_job_flags.py)."""
    lengths = np.minimum(np.random.default_rng(5).lognormal(8.5, 1.3, 400), 32768).astype(np.int64) + 1
    write_index(tmp_path / "corpus.idx", lengths)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * int(lengths.sum())))
    profile = str(ROOT / "docs/results/2x_h200/profile_2048.json")
    flags = {
        **{"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16},
        **{"num_query_groups": 4, "kv_channels": 128, "seq_length": 32768, "global_batch_size": 8},
        **{"context_parallel_size": 2, "pipeline_model_parallel_size": 4, "split": "100,0,0"},
        **({"recompute_granularity": recompute, "recompute_method": "uniform"} if recompute else {}),
        **{"wlb_profile": profile, "wlb_gpu_memory": 80, "recompute_num_layers": 1},
    }
    job = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    job += " --swiglu --group-query-attention --use-distributed-optimizer --vocab-size 384"
    job += " --untie-embeddings-and-output-weights --overlap-grad-reduce --hidden-dropout 0"
    own = "analyze --no-split --search none --iterations 5 --warm-up 0 --world-size 8"
    shown = reported(f"{own} -- {job} --data-path {tmp_path / 'corpus'}")

    def logged(**settings: str) -> list[PlannedIteration]:
        others = {"padded_vocab_size": 384, "overlap_grad_reduce": True}
        job = training_job(**flags, **settings, **others, data_path=[str(tmp_path / "corpus")])
        job = job.with_config(complete(job))
        job = job.with_config(fit_to_memory(job))
        source = open_part(job, "train", job.batches.schedule)
        assert source is not None and job.costs is not None
        predict = predictor(job, 0, memory=recompute_memory(job))
        shards = ShardSettings(0, 2, job.alignment, job.config.sharding, job.costs.table, predict)
        return list(islice(plan_iterations(source.planner, shards), 5))

    times = []
    arrival = {"wlb_packing": "original", "wlb_sharding": "per-sequence"}
    for planned, side in ((logged(**arrival), "before"), (logged(), "after")):
        milliseconds = [iteration.predicted_ms for iteration in planned]
        assert np.mean(milliseconds) == pytest.approx(shown["results"][side]["step_ms"]["mean"], rel=1e-6)
        tokens = sum(one.shard.tokens for each in planned for one in each.micro_batches)
        times.append(sum(milliseconds) / tokens)
    assert times[0] / times[1] == pytest.approx(shown["predicted_speedup"], rel=1e-6)


def test_a_document_in_chunks_is_predicted_live_as_by_the_simulator(costs) -> None:
    """A chunk that sees earlier keys needs a second kernel call, which a host of short micro-batches has to launch."""
    costs = replace(costs, host_second=(5e6, 5e6))
    grid = [(Piece(0, 1, 0, 512),), (Piece(0, 0, 0, 700),), (Piece(0, 0, 700, 1200, 700),)]
    plan = IterationPlan(0, (), tuple((MicroBatch(pieces, 0),) for pieces in grid), ())
    job = job_of(costs, data_parallel_size=1, context_parallel_size=1)
    lengths = [[piece.tokens for piece in pieces] for pieces in grid]
    shards = shard_all(lengths, 1, "per-document", links=links_of(grid))
    orders = orders_of([plan])
    assert orders == [[(1, 2)]]
    whole = simulate([[[shard_plan] for shard_plan in shards]], layer_model(job), orders=orders)
    assert predictor(job, 0)(plan, shards) == pytest.approx(float(whole.steps[0] / 1e6))


def test_another_ranks_heavier_micro_batch_is_what_an_iteration_waits_for(costs) -> None:
    shards = [shard([8192], 2, "adaptive", costs.table)]
    job = job_of(costs, pipeline_model_parallel_size=1)
    even = predictor(job, 0)(plan_of([[[8192], [8192]]]), shards)
    heavy = predictor(job, 0)(plan_of([[[8192], [65536]]]), shards)
    assert even is not None and heavy is not None and heavy > 5 * even


def test_every_rank_predicts_the_same_step_though_one_has_short_documents_and_another_a_long_one(costs):
    job = job_of(costs, pipeline_model_parallel_size=1, context_parallel_size=1)
    short, long = [1024] * 64, [65536]
    for grid, tolerance in (([[short, long], [long, short]], 1e-6), ([[short, long]], 0.03)):
        plan = plan_of(grid)
        first, second = (
            predictor(job, rank)(plan, [shard(row[rank], 1, "adaptive", costs.table) for row in grid])
            for rank in range(2)
        )
        assert first == pytest.approx(second, rel=tolerance)


def test_a_job_that_the_simulator_does_not_take_has_no_prediction_and_one_that_fails_is_told_once(capsys):
    odd = job_of(virtual_pipeline_model_parallel_size=2)
    plan = plan_of([[[64], [64]]] * 3)  # three micro-batches are no multiple of two stages
    assert predictor(odd, 0)(plan, [shard([64], 2, "hybrid")] * 3) is None
    assert predictor(job_of(num_layers=1), 0) is None
    predict = group_prediction(job_of())
    assert predict(StepPlan(4, ((Group(0, 3, (0,)),),)), [5]) is None  # no such size
    assert predict(StepPlan(4, ((Group(0, 2, (0,)),),)), [5]) is None
    assert capsys.readouterr().out.count("WARNING") == 1


MODEL = {"hidden": 4096, "ffn": 11008, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256, "tp": 4}


def group_prediction(job: TrainingJob) -> Any:
    """What predicts a plan of two by two ranks with TP=4."""
    table = layer_model(job_of()).table
    cost = group_cost(table, token_ns(table, 40_000.0), block_sizes(2, 2), tensor=4)
    return group_predictor(job, cost)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_groups_of_megatrons_size_are_predicted_as_fixed_ones_are(pipeline):
    job = job_of(pipeline_model_parallel_size=pipeline)
    lengths = [[60_000], [40_000, 20_000], [32_000, 32_000]]
    tokens = [n for row in lengths for _ in range(2) for n in row]
    numbers = count()
    steps = tuple(
        tuple(Group(start, 2, tuple(islice(numbers, len(row)))) for start in (0, 2)) for row in lengths
    )
    predicted = group_prediction(job)(StepPlan(4, steps), tokens)
    shards = [[[shard(row, 2, "per-document")] * 2 for row in lengths]]
    assert predicted == pytest.approx(simulate(shards, layer_model(job)).steps[0] / 1e6, rel=0.05)


def test_an_iteration_takes_as_long_as_its_busiest_rank_and_padding_costs_little() -> None:
    predict = group_prediction(job_of())
    tokens = [30_000, 30_000]
    apart = predict(StepPlan(4, ((Group(0, 1, (0,)), Group(3, 1, (1,))),)), tokens)
    together = predict(StepPlan(4, ((Group(0, 1, (0, 1)),),)), tokens)
    shared = predict(StepPlan(4, ((Group(0, 4, (0, 1)),),)), tokens)
    padded = predict(StepPlan(4, ((Group(0, 1, (0,)), Group(3, 1, (1,))), ())), tokens)
    assert apart is not None and together is not None and shared is not None and padded is not None
    assert shared < apart < padded < together


def test_a_recorder_tells_micro_batch_and_chunk_in_whatever_order_they_run():
    recorder = trace.Recorder(on_gpu=False)
    outputs = {}
    for micro_batch, chunk in ((0, 0), (1, 0), (0, 1), (1, 1)):
        recorder.micro_batch = micro_batch
        outputs[micro_batch, chunk] = [object()] if chunk else object()  # as schedules hand them on
        made = outputs[micro_batch, chunk]
        assert recorder.forward(lambda made=made: (made, 5)) == (made, 5)
    for which in ((1, 1), (0, 1), (1, 0), (0, 0)):
        assert recorder.backward(outputs[which], lambda: "gradient") == "gradient"
    recorder.backward(object(), lambda: None)
    calls = recorder.calls()
    assert [(call.backward, call.micro_batch, call.chunk) for call in calls] == [
        *((False, *which) for which in ((0, 0), (1, 0), (0, 1), (1, 1))),
        *((True, *which) for which in ((1, 1), (0, 1), (1, 0), (0, 0))),
        (True, trace.UNKNOWN, 0),
    ]
    times = [at for call in calls for at in (call.begin, call.end)]
    assert times == sorted(times)
    assert trace.Recorder(on_gpu=False).calls() == []
    # Outside the traced iteration.
    step = partial(trace.wrap_forward_step, lambda *args, **kwargs: (args, kwargs))
    assert step(1, two=2) == ((1,), {"two": 2})


def write_small_profile(path: Path) -> None:
    """A profile of the tests' model, of made-up samples."""
    model = ProfiledModel(hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, vocab=100)
    samples = made_samples()
    settings = {"model": asdict(model), "gpu": "a GPU", "processors": 1, "versions": {"torch": "2"}}
    settings["host"] = "a processor"
    found = {"samples": samples, "fit": asdict(fit(model, samples, GPU))}
    write_profile(path, {"format": FORMAT, "settings": settings, **found})


@pytest.mark.megatron
def test_a_run_reports_predicted_and_measured_times_and_traces_an_iteration(corpus, tmp_path):
    profile, log, traced = (tmp_path / name for name in ("profile.json", "log.jsonl", "trace.json"))
    write_small_profile(profile)
    more = f"--data-path {corpus} --global-batch-size 4 --train-iters 4 --split 1,0,0 --wlb-log {log}"
    more += f" --wlb-log-plans --wlb-profile {profile} --wlb-trace {traced} --wlb-trace-iteration 3"
    said = output_of([*flags(pipeline=2), *more.split()], 2)
    assert "planning and predicting with a GPU, torch 2" in said
    assert "its vocabulary is 100, not 128" in said
    assert f"its host is another (a processor, here {host_name()})" in said
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "log.md").read_text(encoding="utf-8")))
    assert set(rows[0]) <= documented
    for row in rows:
        assert row["predicted_ms"] > 0 and row["measured_ms"] > 0
        assert f"ms: {row['measured_ms']:.1f}, predicted {row['predicted_ms']:.1f}" in said
        assert "tokens_per_second_per_gpu" not in row and "tflops_per_gpu" not in row, "figures of a GPU"
        assert [len(ranks) for ranks in row["lengths"]] == [1] * 4
        assert sum(n for micro_batch in row["lengths"] for n in micro_batch[0]) == row["tokens"]
    gain = sum(row["arrival_ms"] for row in rows) / sum(row["predicted_ms"] for row in rows)
    assert f"predicted gain over arrival order: {gain:.3f} so far\n" in said
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    # Two stages, four micro-batches, forward and backward of each; stage 1 cannot begin before stage 0 has ended.
    assert sorted((e["tid"], e["name"]) for e in events) == sorted(
        (stage, f"{way}{m}") for stage in (0, 1) for way in "FB" for m in range(4)
    )
    at = {(e["tid"], e["name"]): e for e in events}
    for m in range(4):
        assert at[1, f"F{m}"]["ts"] + at[1, f"F{m}"]["dur"] >= at[0, f"F{m}"]["ts"] + at[0, f"F{m}"]["dur"]
        assert at[0, f"B{m}"]["ts"] + at[0, f"B{m}"]["dur"] >= at[1, f"B{m}"]["ts"]


class Clock:
    """Events on a device whose time passes by the wait that is marked."""

    now = 0.0

    def __init__(self, **_: Any) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = Clock.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


def test_waits_for_exchanged_keys_are_summed_by_marks_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(milliseconds: float) -> Callable[[], None]:
        return lambda: setattr(Clock, "now", Clock.now + milliseconds)

    monkeypatch.setattr(timers.torch.cuda, "Event", Clock)
    for milliseconds in (3.0, 4.5):
        timers._on_gpu(wait(milliseconds))
    assert timers._read_waits() == pytest.approx(0.0075)
    assert timers._read_waits() == 0.0


def test_exchanges_are_timed_in_the_jobs_that_log_them_and_in_no_later_one(monkeypatch):
    import megatron.training

    log = SimpleNamespace(log=lambda names: None, write=lambda names: None)
    monkeypatch.setattr(megatron.training, "get_timers", lambda: log)
    monkeypatch.setattr(timers, "add", lambda name, seconds: None)
    for level, timed in ((2, True), (1, False)):
        args = SimpleNamespace(timing_log_level=level, distributed_backend="gloo")
        monkeypatch.setattr(megatron.training, "get_args", lambda args=args: args)
        timers.continue_lists()
        assert (timers.kv_exchange.on_wait is not None) == timed


def test_megatrons_lists_of_timers_are_continued_and_other_lists_stay() -> None:
    seen: list[list[str]] = []
    log = timers._continued(lambda names, **_: seen.append(names), ["wlb-draw"])
    log(["forward-backward", "optimizer"], normalizer=1)
    log(["model-and-optimizer-setup"])
    assert seen == [["forward-backward", "optimizer", "wlb-draw"], ["model-and-optimizer-setup"]]


@pytest.mark.megatron
def test_the_plugins_timers_stand_among_megatrons(shown):
    lines = re.findall(r"^ +([a-z-]+) \.+: \(([0-9.]+), ([0-9.]+)\)", shown[0], re.MULTILINE)
    at_most = {name: max(float(most) for n, _, most in lines if n == name) for name, *_ in lines}
    assert {"forward-backward", "wlb-draw", "wlb-planning", "wlb-key-exchange"} <= at_most.keys()
    assert at_most["wlb-key-exchange"] < at_most["forward-backward"]
