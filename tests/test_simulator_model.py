"""Layer times, networks and iterations against figures computed by hand."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharding_oracle import predict

from scripts.reproduce.compare import micro_batch_count, rescale
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.pipeline.schedule import Event, Launches, pipeline_events
from wlb_megatron.sharding.cut import shard
from wlb_megatron.simulator import iteration
from wlb_megatron.simulator import model as layer_model
from wlb_megatron.simulator.iteration import Orders, Shards, run_steps, simulate
from wlb_megatron.simulator.model import LayerModel, Times
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import EXPERTS_NS
from wlb_megatron.workload.kernel_table import h100, of_gpu
from wlb_megatron.workload.model import Experts, Layout, Model

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "1x_h200"

SMALL = Model(layers=8, hidden=1024, heads=8, kv_heads=2, ffn=2048, vocab=1000)
FREE = Assumptions(
    **dict.fromkeys(("nvlink_rate", "network_rate", "memory_rate"), 1e30),
    **dict.fromkeys(
        ("host_launch", "nvlink_latency", "network_latency", "optimizer_bytes", "expert_rows"), 0
    ),
)
"""Nothing but matrix products and attention takes time."""


def _model(assumptions: Assumptions = FREE, **layout: Any) -> LayerModel:
    made = Layout(distributed_optimizer=True, **layout)
    return LayerModel(shape=SMALL, layout=made, assumptions=assumptions)


def group_events(shards: Shards, model: LayerModel, orders: Orders | None = None) -> list[list[Event]]:
    """Events (nanoseconds) of the first iteration's pipelines, one list for each data-parallel rank."""
    tokens, attention, cuts = iteration._measure(shards[:1], model)
    grouped = iteration._grouped(tokens, None if orders is None else orders[0])
    repeats = iteration.recomputed_by_flags(tokens, model)
    layers = iteration._device(tokens, attention, model)
    rank_tokens = tokens / model.layout.context
    ends = iteration._ends(model.embedding(rank_tokens), model.loss(rank_tokens), grouped)
    forward, backward = iteration._stages(layers, ends, repeats, model)
    launches = iteration._launches(cuts, grouped, repeats, model)
    return [
        pipeline_events(
            forward[rank],
            backward[rank],
            transfer=float(iteration._transfer(tokens, model)[0]),
            blocking=model.layout.virtual == 1,
            groups=None if orders is None else orders[0][rank],
            launches=Launches(launches.forward[rank], launches.backward[rank]),
        )
        for rank in range(model.layout.data)
    ]


def test_parameters_are_those_of_a_known_model_and_spread_over_stages_as_evenly_as_they_go():
    llama = Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128_256)
    assert LayerModel(shape=llama, layout=Layout()).parameters / 1e9 == pytest.approx(70.55, abs=0.01)
    shape = replace(SMALL, layers=126)
    stages = LayerModel(shape=shape, layout=Layout(pipeline=16))
    assert stages.stage_layers.tolist() == [[8]] * 14 + [[7]] * 2
    chunked = LayerModel(shape=shape, layout=Layout(pipeline=4, virtual=3))
    assert chunked.stage_layers.tolist() == [[11, 11, 10], [11, 11, 10], [11, 10, 10], [11, 10, 10]]


def test_matrix_products_take_two_flops_a_parameter_and_token_and_twice_that_backward():
    times = _model(tensor=2).linear(1000)
    parameters = 1024 * 128 * (8 + 2 + 2 + 8) + 3 * 1024 * 2048
    expected = 2 * parameters * 1000 / 2 / 650e12 * 1e9
    assert times.forward == pytest.approx(expected)
    assert times.backward == pytest.approx(2 * expected)


@pytest.mark.parametrize(("sequence", "counts"), [(True, (4, 6)), (False, (4, 4))])
def test_tensor_parallelism_adds_its_collectives_each_way_as_far_as_they_show(sequence, counts):
    """Gathers and scatters of rows; without sequence parallelism all-reduces, of two passes each."""
    slow = replace(FREE, nvlink_rate=100e9, nvlink_latency=1e-6, tp_exposed=0.5)
    layout = {"tensor": 4, "sequence": sequence}
    plain, exposed = _model(replace(slow, tp_exposed=0.0), **layout), _model(slow, **layout)
    # 1,000 rows of 1,024 channels of 2 bytes, three quarters of which pass each GPU: 15.36 us, and 1 us latency.
    collective = 0.5 * (1000 * 2048 * 0.75 / 100e9 * 1e9 + 1000)
    for count, one, other in zip(counts, plain.linear(1000), exposed.linear(1000), strict=True):
        assert other - one == pytest.approx(count * collective)
    assert _model(slow, tensor=1).linear(1000) == _model(FREE, tensor=1).linear(1000)


def test_ranks_of_a_node_share_its_way_out():
    assumptions = Assumptions(nvlink_rate=400e9, network_rate=40e9, node=8)
    assert assumptions.ring_rate(8, 1) == 400e9  # one node
    assert assumptions.ring_rate(16, 1) == 320e9  # two nodes, 8 cards each
    assert assumptions.ring_rate(4, 8) == 40e9  # one rank a node
    assert assumptions.ring_rate(4, 4) == 80e9  # two ranks a node
    assert assumptions.pair_rate(4, 4) == 40e9 * 3 / 2  # two of three peers are elsewhere
    assert assumptions.ring_ns(8e9, 1, 1) == 0


def test_heads_are_divided_over_tensor_ranks_and_key_heads_at_least_one():
    assert _model(tensor=2).table.heads == 4 and _model(tensor=2).table.kv_heads == 1
    assert _model(tensor=4).table.heads == 2 and _model(tensor=4).table.kv_heads == 1
    assert LayerModel(shape=SMALL, layout=Layout(tensor=1)).table.head_dim == 128
    with pytest.raises(ValueError, match="8 layers are fewer"):
        _model(pipeline=3, virtual=3)


def test_keys_travel_slower_between_nodes():
    near, far = (LayerModel(shape=SMALL, layout=Layout(tensor=tp, context=2)).table for tp in (2, 8))
    # Per key head, as tp=8 holds no fewer than one.
    assert near.kv_heads == far.kv_heads == 1
    assert far.exchange_row - near.exchange_row == pytest.approx(4 * 2 * 128 * (1 / 45 - 1 / 370))
    assert far.exchange > near.exchange


def test_one_gpu_one_micro_batch_is_the_sum_of_its_parts():
    model = _model()
    plan = shard([3000, 1000], 1, "per-document")
    simulated = simulate([[[plan]]], model)
    linear, loss = model.linear(4000), model.loss(4000)
    expected = 8 * (predict(plan, model.table)[0] + sum(linear)) + sum(loss) + sum(model.embedding(4000))
    assert simulated.steps[0] == pytest.approx(expected)
    assert simulated.busy.shape == (1, 1, 1, 1) and simulated.busy.sum() == pytest.approx(expected)
    assert simulated.tokens.tolist() == [4000]


def test_the_slowest_context_rank_sets_the_pace_and_the_slowest_pipeline_the_step():
    model = _model(context=2, data=2)
    light, heavy = shard([2048] * 4, 2, "per-sequence"), shard([6144, 2048], 2, "per-sequence")
    both, alone = simulate([[[light, heavy]]], model), simulate([[[heavy, heavy]]], model)
    assert both.steps[0] == pytest.approx(alone.steps[0])
    attention = model.attention([heavy])
    slowest = attention.forward.max() + attention.backward.max()
    ends = sum(sum(part(4096)) for part in (model.embedding, model.loss))
    assert both.steps[0] == pytest.approx(8 * (slowest + sum(model.linear(4096))) + ends)
    # What each GPU computes is its own: the two context ranks of the heavy one differ.
    assert both.busy[0, 1, 0, 0] != both.busy[0, 1, 0, 1]


def test_a_stages_time_is_its_layers_and_the_first_and_last_have_more():
    model = _model(pipeline=2)
    plan = shard([4096], 1, "per-document")
    simulated = simulate([[[plan], [plan]]], model)
    layer = float(predict(plan, model.table)[0] + sum(model.linear(4096)))
    first, last = simulated.busy[0, 0, :, 0]
    assert first == pytest.approx(2 * (4 * layer + sum(model.embedding(4096))))
    assert last == pytest.approx(2 * (4 * layer + sum(model.loss(4096))))
    events = group_events([[[plan], [plan]]], model)[0]
    assert sum(e.end - e.start for e in events) == pytest.approx(float(simulated.busy.sum()))
    assert max(e.end for e in events) == pytest.approx(float(simulated.steps[0]))


def test_gradient_reduction_shows_where_it_is_not_hidden():
    slow = replace(FREE, nvlink_rate=1e9, optimizer_bytes=0)
    plan = shard([4096], 1, "per-document")
    steps = {
        share: simulate([[[plan, plan]]], _model(replace(slow, dp_exposed=share), data=2)).steps[0]
        for share in (0.0, 1.0)
    }
    model = _model(slow, data=2)
    parameters = 8 * SMALL.layer_parameters + 2 * 1000 * 1024
    reduce, gather = model.gradient_sync_ns(0)
    assert reduce == pytest.approx(4 * parameters * 0.5)
    assert gather == pytest.approx(reduce / 2)
    alone = simulate([[[plan]]], _model()).steps[0]
    assert steps[1.0] == pytest.approx(alone + reduce + gather)
    # Hidden behind the only micro-batch's forward and backward, which together take `alone`.
    assert steps[0.0] == pytest.approx(reduce + gather)


def test_each_flag_of_sharing_changes_what_a_step_waits_for():
    """Two data-parallel ranks, whose link is so slow that little is hidden; times by hand from the parameters."""
    slow = replace(FREE, nvlink_rate=1e9, optimizer_bytes=0)
    plan = shard([4096], 1, "per-document")
    alone = simulate([[[plan]]], _model()).steps[0]

    def step(**flags: Any) -> float:
        model = _model(slow, data=2)
        shape = replace(model.shape, experts=flags.pop("experts", None))
        return simulate(
            [[[plan, plan]]], replace(model, shape=shape, layout=replace(model.layout, **flags))
        ).steps[0]

    parameters = 8 * SMALL.layer_parameters + 2 * 1000 * 1024
    reduce, gather = 4 * parameters * 0.5, 2 * parameters * 0.5
    assert step(reduce_overlaps=False, gather_overlaps=False) == pytest.approx(alone + reduce + gather)
    assert step() < step(gather_overlaps=False) < step(reduce_overlaps=False, gather_overlaps=False)
    assert step(distributed_optimizer=False, reduce_overlaps=False) == pytest.approx(alone + 2 * reduce)
    # 8 experts, 2 of which a token passes, on each of the two ranks or half of them: 8 layers of three matrices.
    one = 3 * 1024 * 1024
    for parallel, copies in ((1, 2), (2, 1)):
        experts = Experts(count=8, ffn=1024, parallel=parallel, tensor=1, chosen=2)
        dense, held = parameters - 8 * 2 * one, 8 * 8 * one / parallel
        expected = 6 * (dense + held * (copies > 1)) * 0.5
        # Half of two rows a token go to the other rank: 8 layers, there and back, forward and backward.
        expected += 8 * 4 * (4096 * 2 * 0.5 * 2 * 1024) * (parallel > 1)
        shown = step(experts=experts, reduce_overlaps=False, gather_overlaps=False)
        assert shown == pytest.approx(alone + expected)


def test_cost_for_packing_weighs_attention_against_all_else():
    model = _model()
    token = 2 * 3 * SMALL.layer_parameters / 650e12 * 1e9
    rows = model.table.query_row + model.table.key_row
    longest = replace(model.table, segment=0, query_row=0, key_row=0).diagonal_ns(np.array([65536]))
    pair = float(longest[0]) / 65536**2
    assert model.cost().quadratic_at == pytest.approx((token + rows) / pair, rel=0.01)
    assert _model(tensor=4).cost().quadratic_at == pytest.approx(model.cost().quadratic_at, rel=0.05)


def test_plans_of_another_layout_are_refused():
    plan = shard([4096], 2, "per-document")
    with pytest.raises(ValueError, match="reshape"):
        simulate([[[plan]]], _model(context=1))
    with pytest.raises(ValueError, match="reshape"):
        simulate([[[plan]]], _model(context=2, data=2))
    with pytest.raises(ValueError, match="matmul_rate must be positive"):
        Assumptions(matmul_rate=0)
    with pytest.raises(ValueError, match="share from 0 to 1"):
        Assumptions(tp_exposed=2)


def test_seeded_lengths_are_alike_for_every_window_and_long_tailed():
    lengths = long_tailed(131072, 50_000)
    assert (lengths == long_tailed(131072, 50_000)).all()
    outliers = lengths[lengths >= 32768]
    assert lengths.min() >= 1 and lengths.max() <= 131072
    assert 0.1 < outliers.sum() / lengths.sum() < 0.25 and len(outliers) < 0.012 * len(lengths)
    assert np.median(long_tailed(65536, 50_000)) == pytest.approx(np.median(lengths) / 2, rel=0.01)
    assert rescale(np.array([8, 3, 1]), 4, of=8).tolist() == [4, 2, 1]


def test_built_in_tables_are_chosen_by_the_gpus_name():
    assert of_gpu("NVIDIA H200").device == "NVIDIA H200"
    assert of_gpu("NVIDIA H200", "cudnn").backend == "cudnn"
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100", ""):
        assert of_gpu(name) is h100()


def test_iterations_of_different_numbers_of_micro_batches_are_as_each_alone_and_in_order():
    model = _model(pipeline=2, data=2)
    counts = [3, 1, 4, 3, 2, 4]
    lengths = np.random.default_rng(3).integers(100, 5000, (len(counts), 4, 2))
    shards = [
        [[shard([int(one)], 1, "per-document") for one in row] for row in lengths[at, :count]]
        for at, count in enumerate(counts)
    ]
    together = simulate(shards, model)
    alone = [simulate([iteration], model) for iteration in shards]
    assert together.steps.tolist() == [float(one.steps[0]) for one in alone]
    assert together.tokens.tolist() == [int(one.tokens[0]) for one in alone]
    assert together.busy.tolist() == [one.busy[0].tolist() for one in alone]
    assert [times.shape for times in together.micro_batches] == [(count, 2) for count in counts]
    assert micro_batch_count(together) == pytest.approx(np.mean(counts))
    over_ideal = np.mean([one.steps[0] / one.busy.mean() for one in alone])
    assert together.step_over_ideal == pytest.approx(over_ideal)


def test_documents_in_chunks_are_simulated_in_their_groups_order_on_each_rank():
    model = _model(pipeline=2, data=2)
    plans = [[shard([size], 1, "per-document")] * 2 for size in (4000, 3000, 2000, 1000)]
    orders = [[(2, 2), (1, 1, 1, 1)], [None, (4,)]]
    simulated = simulate([plans, plans], model, orders=orders)
    ends = [
        [max(e.end for e in events) for events in group_events([plans], model, orders=[rank_orders])]
        for rank_orders in orders
    ]
    assert simulated.steps.tolist() == pytest.approx([max(ranks) for ranks in ends])
    assert ends[0][0] != ends[0][1] and ends[1][0] != ends[1][1]


def test_a_step_in_groups_makes_its_losses_in_the_backward():
    model = _model(pipeline=2)
    plans = [[shard([4096], 1, "per-document")]] * 2
    loss = model.loss(4096)

    def last_stage(orders: list[list[tuple[int, ...] | None]] | None, backward: bool) -> float:
        (events,) = group_events([plans], model, orders=orders)
        (time,) = {
            e.end - e.start for e in events if e.stage == 1 and e.backward == backward and not e.micro_batch
        }
        return time

    own, grouped = ([last_stage(orders, way) for way in (False, True)] for orders in (None, [[(2,)]]))
    assert grouped == pytest.approx([own[0] - float(loss.forward), own[1] + float(loss.forward)])
    simulated = [simulate([plans], model, orders=orders) for orders in (None, [[(2,)]])]
    assert simulated[0].busy.tolist() == simulated[1].busy.tolist()


def test_a_micro_batch_costs_the_same_in_planning_as_training_says():
    for recompute in ("none", "full"):
        model = _model(context=2, tensor=2, recompute=recompute)
        cost, parameters = model.cost(), SMALL.layer_parameters / 2
        token = (8 if recompute == "full" else 6) * parameters / 650e12 * 1e9
        assert cost.per_micro_batch == pytest.approx(2 * 600e3 / token)
        width = SMALL.heads * SMALL.head_dim / 2
        assert cost.per_chunk == pytest.approx(650e3 * width / 2048 / token)
        again = 2.7e6 if recompute == "full" else 0
        assert cost.least_micro_batch == (0, 0)  # FREE: the host is ahead
        for pp, stage in ((1, 0), (2, 18e6 / 4)):
            hosts = replace(
                model, assumptions=replace(FREE, host_launch=0.5), layout=replace(model.layout, pipeline=pp)
            )
            least = hosts.cost().least_micro_batch
            launches = (2.7e6 + stage / 2, 3.3e6 + again + stage / 2)
            assert least == pytest.approx([0.5 * 2 * way / token for way in launches])
            there, back = map(float, hosts.host(False))
            back += float(hosts.host_again(False)) * (recompute == "full")
            assert [way / 2 * token for way in least] == pytest.approx([there, back])


def test_rows_of_tokens_go_to_experts_of_other_ranks_and_back_in_both_directions():
    slow = replace(FREE, nvlink_rate=100e9, nvlink_latency=1e-6, tp_exposed=0)
    model = LayerModel(shape=SMALL, layout=Layout(tensor=2), assumptions=slow)
    shapes = (replace(SMALL, experts=Experts(8, 256, parallel, chosen=4)) for parallel in (1, 4))
    one, spread = (replace(model, shape=shape) for shape in shapes)
    # 500 of 1,000 tokens a rank, 4 experts each, three quarters of the rows elsewhere, 2,048 bytes: 30.72 us, and 1 us.
    extra = 2 * (500 * 4 * 0.75 * 2048 / 100e9 * 1e9 + 1000)
    for local, sent in zip(one.linear(1000), spread.linear(1000), strict=True):
        assert sent - local == pytest.approx(extra)


QWEN = Model(layers=3, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=384)


def test_layers_with_experts_take_about_what_was_measured_of_one() -> None:
    """Constants are from 8K and 32K tokens at TP1; other sizes and TP2 were left out. The profiler repeats one size and
    sums no gradients, so that the host takes less for an expert than in training."""
    dense, each = (1.7e6, 1.8e6), (0.056e6, 0.094e6)  # no attention, whose launches LAUNCH_NS has
    with open(RESULTS / "expert_layers.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "layer" and row["profile"] != "dense"]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        known = {"ep1": (1, 1, True), "ep8": (8, 1, True), "tp2_etp1_ep8": (8, 2, False)}
        parallel, tensor, fitted = known[row["profile"]]
        tokens = int(row["size"])
        shape = replace(QWEN, experts=Experts(128, 768, parallel, chosen=8))
        rates = replace(
            Assumptions.of_gpu("NVIDIA H200"), tp_exposed=0, nvlink_rate=1e30, nvlink_latency=0, host_launch=0
        )
        model = LayerModel(shape=shape, layout=Layout(tensor=tensor), assumptions=rates)
        launches = [
            usual + layer + 128 / parallel * one
            for usual, layer, one in zip(dense, EXPERTS_NS, each, strict=True)
        ]
        took = sum(max(float(way), host) for way, host in zip(model.linear(tokens), launches, strict=True))
        measured = 1e3 * (int(row["forward_us"]) + int(row["backward_us"]))
        errors[fitted and tokens in (8192, 32768)].append(took / measured - 1)
    assert max(map(abs, errors[True])) < 0.07, errors
    held_back = np.abs(errors[False])
    assert held_back.mean() < 0.11 and held_back.max() < 0.25, errors
    assert len(rows) == 15


def _step_ms(row: dict[str, str]) -> float:
    """A step of the row's micro-batches, whose attention takes what is left of the row's prediction by the device alone
    (predicted_before_ms)."""
    tensor, context, _, data = map(int, row["layout"].split(","))
    one_kernel, fused = (row[name] == "1" for name in ("one_kernel", "permute_fusion"))
    parallel = int(row["expert_parallel"])
    experts = Experts(128, 768, parallel, chosen=8, one_kernel=one_kernel, fused_permutation=fused)
    model = LayerModel(
        shape=replace(QWEN, experts=experts),
        layout=Layout(tensor=tensor, context=context, data=data, distributed_optimizer=True),
        assumptions=Assumptions.of_gpu("NVIDIA H200"),
    )
    ahead = replace(model, assumptions=replace(model.assumptions, host_launch=0))
    count = int(row["micro_batches"])
    tokens = np.full((1, count, data), int(row["tokens"]) // (count * data), dtype=np.int64)

    def step(of: LayerModel, attention: float) -> float:
        times = np.full((*tokens.shape, context), attention)
        return float(run_steps(tokens, Times(times / 3, 2 * times / 3), of).steps[0]) / 1e6

    none, some = step(ahead, 0.0), step(ahead, 1e6)
    return step(model, (float(row["predicted_before_ms"]) - none) / (some - none) * 1e6)


def test_steps_with_experts_take_about_what_was_measured(monkeypatch) -> None:
    """Constants are from the steps of one GPU, and of two at EP2 in runs 2 and 3; runs 0 and 1 were left out. In all of
    them cuBLAS chose kernels again, which took 0.1 ms an expert."""
    monkeypatch.setattr(layer_model, "EXPERT_NS", (0.1e6, 0.28e6))
    rows = []
    for folder in ("1x_h200", "2x_h200"):
        with open(RESULTS.parent / folder / "expert_steps.csv", newline="") as file:
            rows += list(csv.DictReader(file))
    errors: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        before, after = (
            abs(ms / float(row["ms"]) - 1) for ms in (float(row["predicted_before_ms"]), _step_ms(row))
        )
        names = ("layout", "window", "one_kernel", "permute_fusion", "scheme", "run")
        errors.setdefault(tuple(row.get(name, "") for name in names), []).append((before, after))
    means = {run: np.mean(pairs, axis=0) for run, pairs in errors.items()}
    assert len(rows) == 273 and len(means) == 26
    for run, (before, after) in means.items():
        one_gpu, plain = run[0] == "1,1,1,1", run[4] == "plain-none"
        noisy = run[1:4] == ("32768", "0", "1") or run[::5] == ("1,2,1,1", "1")  # on slower hosts
        bound = 0.22 if noisy else 0.065 if plain else 0.125 if one_gpu else 0.10
        assert after < min(bound, before + 0.015), (run, before, after)


def test_launching_experts_takes_about_what_was_measured_where_cublas_keeps_its_choices() -> None:
    """Steps so small that launches decide, from the 21st on, of 64 experts on one H200, whose host is 7 % faster."""
    with open(RESULTS / "expert_kernel_choices.csv", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if int(row["iteration"]) > 20 and int(row["tokens"]) < 150_000
        ]
    for settings in ("0", "1"):
        taken = [
            float(row["ms"])
            for row in rows
            if row["kept_sizes"] == "1000000" and row["one_kernel"] == row["permute_fusion"] == settings
        ]
        one_kernel = settings == "1"
        experts = Experts(64, 768, chosen=8, one_kernel=one_kernel, fused_permutation=one_kernel)
        model = LayerModel(
            shape=replace(QWEN, experts=experts),
            layout=Layout(distributed_optimizer=True),
            assumptions=Assumptions.of_gpu("NVIDIA H200"),
        )
        tokens = np.full((1, 8, 1), 12_000, dtype=np.int64)
        nothing = np.zeros((*tokens.shape, 1))
        predicted = float(run_steps(tokens, Times(nothing, nothing), model).steps[0]) / 1e6
        assert len(taken) > 20 and predicted == pytest.approx(np.median(taken), rel=0.12)


@pytest.mark.parametrize(
    "experts, there, back",
    [
        (None, 4, 6),
        (Experts(8, 256, 2, tensor=2), 4, 6),
        (Experts(8, 256, 2, tensor=1), 2, 3),
        (Experts(8, 256, 2, tensor=1, shared=256), 4, 6),
        (Experts(8, 256, 2, tensor=1, dense_layers=2), 3, 4.5),
    ],
)
def test_whole_experts_run_no_collective_over_tensor_ranks(experts, there, back):
    """Megatron's dispatcher sends a rank's tokens to whole experts; attention alone gathers and scatters them."""
    layout = Layout(tensor=2, context=1, pipeline=1, data=4, sequence=True)
    ways = [
        LayerModel(
            shape=replace(SMALL, layers=4, experts=experts),
            layout=layout,
            assumptions=Assumptions(tp_exposed=share),
        ).linear(8192)
        for share in (1.0, 0.0)
    ]
    rates = Assumptions()
    one = 1e9 * (8192 * 2 * SMALL.hidden / 2 / rates.nvlink_rate + rates.nvlink_latency)
    for full, hidden, count in zip(*ways, (there, back), strict=True):
        assert full - hidden == pytest.approx(count * one, rel=1e-6)
