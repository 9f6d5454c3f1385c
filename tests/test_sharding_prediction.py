"""The kernel table against measured times, and predictions against the calls that the executor will make."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_oracle import by_the_calls, cp_and_lengths, predict

from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.cut import predict_all, shard
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.kernel_table import KernelTable, h100

# Milliseconds, forward + backward, one call of one segment on one H100 (8 query heads, 2 KV heads, d=128, bf16).
MEASURED = {
    "bottom_right": [(32, 128, 118.3), (32, 64, 55.7), (32, 32, 25.4), (16, 64, 29.6), (4, 64, 7.7)],
    "rectangle": [(32, 96, 87.8), (32, 32, 28.7), (16, 48, 21.7), (4, 60, 6.8)],
    "diagonal": [(32, 32, 15.1), (16, 16, 3.7)],
}


def segment_ns(table, shape, queries, keys):
    q, k = np.array([queries]), np.array([keys])
    sizes = (q,) if shape == "diagonal" else (q, k)
    return int(getattr(table, f"{shape}_ns")(*sizes)[0])


@pytest.mark.parametrize(
    ("shape", "queries", "keys", "ms"), [(shape, *row) for shape, rows in MEASURED.items() for row in rows]
)
def test_the_built_in_table_is_near_what_was_measured(shape, queries, keys, ms):
    table = h100()
    predicted = (segment_ns(table, shape, queries * 1024, keys * 1024) + table.call) / 1e6
    assert predicted == pytest.approx(ms, rel=0.12)


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(deadline=None, max_examples=40)
@given(
    mix_of=cp_and_lengths()
    | st.lists(st.integers(1, 5000), min_size=1, max_size=12).map(lambda d: (4, 4 * np.array(d)))
)
def test_a_prediction_is_the_sum_over_the_calls_that_will_be_made(kind, mix_of):
    cp, lengths = mix_of
    plan = shard(lengths, cp, kind)
    # Without the wait for a call's longest tile.
    table = replace(h100(), tile_key=0.0)
    predicted = predict(plan, table)
    for rank in range(cp):
        assert abs(int(predicted[rank]) - by_the_calls(plan, rank, table)) <= 1
    assert (predict(plan, h100()) >= predicted).all()


def test_few_queries_on_many_keys_wait_for_their_longest_tile():
    # Rank 1's 1024 queries fill only half of the device in forward: 64 tiles of 132 units.
    plan = ShardPlan(np.array([65536]), (np.array([[0, 0, 64512]]), np.array([[0, 64512, 65536]])))
    table = h100()
    predicted = int(predict(plan, table)[1])
    alone = table.diagonal_ns(np.array([1024]))[0] + 2 * table.call + table.second_call
    diagonal = table.diagonal_ns(np.array([1024]))[0]
    exchange = table.exchange + table.exchange_row * 64512 - table.call - diagonal
    assert (predicted - alone - exchange) / 1e6 == pytest.approx(2.5 - 0.2, rel=0.12)  # measured, in the call


def test_many_plans_in_one_pass_are_predicted_as_alone():
    plans = [shard(d, 4, kind) for kind in SHARDINGS for d in ([64, 400, 8], [4] * 300, [16384])]
    together = predict_all(plans, h100())
    assert together.dtype == np.int64
    assert together.tolist() == [predict(plan, h100()).tolist() for plan in plans]


def test_thousands_of_short_documents_cost_more_than_their_attention():
    short, long = shard([27] * 2400, 4, "hybrid"), shard([64800], 4, "hybrid")
    pairs = 2400 * 27 * 28 / 2 / (64800 * 64801 / 2)
    assert predict(short, h100()).max() > 10 * pairs * predict(long, h100()).max()


def test_between_grid_points_time_grows_with_queries_and_keys_and_a_row_costs_a_tile():
    table = h100()
    q = np.arange(128, 40000, 777)
    for keys in (1000, 30000):
        assert (np.diff(table.rectangle_ns(q, np.full_like(q, keys))) > 0).all()
    assert (np.diff(table.rectangle_ns(np.full_like(q, 1500), q)) > 0).all()
    assert (np.diff(table.diagonal_ns(q)) > 0).all()
    table = h100()
    beside = replace(table, segment=0.0, query_row=0.0, key_row=0.0, moved_query=0.0, moved_key=0.0)
    rows = [segment_ns(beside, "rectangle", q, 4096) for q in (1, 128, 129)]
    assert abs(rows[0] - rows[1]) <= 1
    assert rows[2] > 1.4 * rows[1]


def test_twice_the_heads_cost_twice_the_kernel_and_keys_travel_by_kv_heads():
    table = h100()
    twice = table.scaled(heads=16, kv_heads=2, head_dim=128)
    one, two = (segment_ns(t, "rectangle", 8192, 65536) for t in (table, twice))
    assert two == pytest.approx(2 * one, rel=1e-6)
    assert twice.exchange_row == table.exchange_row and twice.call == table.call
    assert table.scaled(heads=8, kv_heads=1, head_dim=128).exchange_row == table.exchange_row / 2


def test_a_table_is_written_and_read_back_whole_and_a_missing_one_named(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(h100().to_json())
    assert KernelTable.from_json(path) == h100()
    with pytest.raises(ValueError, match=r"cannot read kernel table nowhere\.json: No such file"):
        KernelTable.from_json("nowhere.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda contents: "{", "is not JSON; measure the device again"),
        (lambda contents: contents | {"version": 2}, "is not of version 1; measure"),
        (
            lambda contents: {k: v for k, v in contents.items() if k != "call"},
            "lacks, or should not have: call; measure",
        ),
        (lambda contents: contents | {"colour": 1}, "lacks, or should not have: colour; measure"),
        (lambda contents: contents | {"diagonal": [1.0]}, r"diagonal must have \d+ times"),
        (lambda contents: contents | {"queries": [100.0, 200.0]}, "positive multiples of 128"),
        (
            lambda contents: contents | {"rectangle": [[-1.0] * len(r) for r in contents["rectangle"]]},
            "must be positive nanoseconds",
        ),
        (lambda contents: contents | {"rectangle": 3}, "measure the device again"),
    ],
)
def test_a_damaged_table_is_refused_with_its_cure(tmp_path, change, says):
    path = tmp_path / "table.json"
    contents = change(json.loads(h100().to_json()))
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    with pytest.raises(ValueError, match=says):
        KernelTable.from_json(path)
