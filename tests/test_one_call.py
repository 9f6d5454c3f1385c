"""Micro-batches in one kernel call on each rank: exact, chosen alike by all ranks, never where it is slower."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_oracle import (
    any_plans,
    largest_error,
    mixes,
    on_all_ranks,
    one_document_at_a_time,
    random_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import make_planner
from sharding_oracle import predict

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.plugin.micro_batches.planning import ShardSettings, plan_iterations
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding import cut as cuts
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import in_fewest_calls, in_one_call, in_two_calls, predict_all, shard
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import padding
from wlb_megatron.workload.kernel_table import h100

EXACT = 1e-10


def assert_exact(plan, keep_keys=True, sink=None, **shape):
    x = random_tensors(plan.tokens, seed=plan.tokens, **shape)
    *got, traffic = on_all_ranks(replace(plan, one_call=True), x, keep_keys, sink=sink)
    assert largest_error(got, one_document_at_a_time(plan.lengths, x, sink=sink)) < EXACT
    return traffic


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_sharding_is_exact_in_one_call(kind, data):
    cp = data.draw(st.sampled_from([1, 2, 4]))
    sink = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    how = st.booleans(), st.sampled_from([None, sink])
    plan, v_dim = shard(data.draw(mixes(cp)), cp, kind), data.draw(st.sampled_from([4, 3]))
    assert_exact(plan, *map(data.draw, how), v_dim=v_dim)


@settings(max_examples=30, deadline=None)
@given(plan=any_plans(), keep_keys=st.booleans())
def test_any_plan_at_all_is_exact_in_one_call(plan, keep_keys):
    """Segments of one document on one rank have keys in common: each has its own copy, the gradients add up."""
    assert_exact(plan, keep_keys)


def test_windowed_layers_of_such_a_plan_keep_their_window():
    plan = replace(shard([40, 8], 2, "per-document"), one_call=True)
    x = random_tensors(plan.tokens)
    *got, _ = on_all_ranks(plan, x, window=5)
    assert largest_error(got, one_document_at_a_time(plan.lengths, x, window=5)) < EXACT


def test_whole_documents_send_nothing_and_are_given_their_own_keys():
    plan = ShardPlan(np.array([8, 8]), (np.array([[0, 0, 8]]), np.array([[1, 0, 8]])))
    assert assert_exact(plan) == 0
    single = device_layout(attention_layout(replace(plan, one_call=True), 0), "cpu").single
    assert single.exchange is None and single.call.cu_seqlens_q is single.call.cu_seqlens_kv


@settings(max_examples=60, deadline=None)
@given(plan=any_plans(cp_sizes=(2, 3, 4)), one_call=st.booleans())
def test_all_ranks_communicate_or_none_does(plan, one_call):
    layouts = [attention_layout(replace(plan, one_call=one_call), rank) for rank in range(plan.cp_size)]
    exchanges = [(layout.single or layout).exchange for layout in layouts]
    assert len({exchange.remote for exchange in exchanges}) == 1
    for sender, sent in enumerate(exchanges):
        for receiver, received in enumerate(exchanges):
            assert sent.send_counts[receiver] == received.recv_counts[sender]
            assert (sent.remote and sender != receiver) or not sent.send_counts[receiver]


@settings(max_examples=40, deadline=None)
@given(plan=any_plans(cp_sizes=(2, 3, 4)))
def test_what_is_predicted_is_the_call_that_is_made(plan):
    table = h100()
    for rank, ns in enumerate(predict(replace(plan, one_call=True), table).tolist()):
        single = attention_layout(replace(plan, one_call=True), rank).single
        queries, keys = (np.diff(bounds) for bounds in (single.call.cu_seqlens_q, single.call.cu_seqlens_kv))
        received = sum(single.exchange.recv_counts)
        expected = table.call + cuts.ONE_CALL * table.second_call
        expected += table.bottom_right_ns(queries, keys).sum() + table.moved_key * keys.sum()
        expected += table.exchange + table.exchange_row * received if received else 0
        assert abs(ns - expected) <= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), cp=st.sampled_from([2, 4, 8]), kind=st.sampled_from(list(SHARDINGS)))
def test_one_call_is_taken_exactly_where_it_is_predicted_faster_and_small(data, cp, kind):
    lengths = data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
    lengths += [padding(sum(lengths), cp)] * (padding(sum(lengths), cp) > 0)
    plan, table = shard(lengths, cp, kind), h100()
    (chosen,) = in_fewest_calls([plan], table)
    assert chosen.lengths is plan.lengths and chosen.ranks is plan.ranks and chosen.kind == plan.kind
    cut = any((rows[:, 1] > 0).any() for rows in plan.ranks)
    small = (
        max(plan.tokens_per_rank) <= cuts.MOST_ROWS
        and max(r[:, 2].sum() for r in plan.ranks) <= cuts.MOST_KEYS
    )
    faster = in_one_call([plan], table).max() < in_two_calls([plan], table).max()
    assert chosen.one_call == bool(cut and small and faster)
    assert predict_all([plan, chosen], table).max(axis=1).argmin() == int(chosen.one_call)


def test_kernels_that_are_not_built_by_size_take_one_call_however_long_where_it_is_faster():
    """A table in which what is masked costs nothing, as FlashAttention-4's: one call of a long document, too."""
    table = h100()
    shares = [1 - min(0.5 / max(ratio, 1), 0.5) for ratio in table.ratios]
    masked = tuple(
        tuple(ns * share for ns, share in zip(row, shares, strict=True)) for row in table.rectangle
    )
    lighter = replace(table, bottom_right=masked)
    plan = shard([131072], 4, "per-document")
    assert not in_fewest_calls([plan], lighter)[0].one_call
    assert in_fewest_calls([plan], replace(lighter, backend="fa4"))[0].one_call
    assert not in_fewest_calls([plan], replace(table, backend="fa4"))[0].one_call, "it is not faster there"


def test_a_short_cut_document_takes_one_call_and_a_long_one_two():
    short, long, whole = (shard(lengths, 2, "per-document") for lengths in ([2048], [131072], [64]))
    assert [p.one_call for p in in_fewest_calls([short, long], h100())] == [True, False]
    alone = ShardPlan(np.array([8, 8]), (np.array([[0, 0, 8]]), np.array([[1, 0, 8]])))
    assert not in_fewest_calls([alone], h100())[0].one_call
    assert not whole.one_call


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_training_takes_one_call_where_the_sharding_is_chosen_by_the_table(sharding):
    """The fixed ways to cut stay what the paper has them be."""
    stream = DocumentStream.of_lengths([900, 124, 700, 324], Rules(1024, "split", 1, endless=True))
    planner = make_planner(stream, window=1024, micro_batches=1, packing="original")
    settings = ShardSettings(dp_rank=0, cp_size=2, alignment=2, sharding=sharding, table=h100())
    planned = [iteration for iteration, _ in zip(plan_iterations(planner, settings), range(4), strict=False)]
    plans = [micro_batch.shard for iteration in planned for micro_batch in iteration.micro_batches]
    cut = [plan for plan in plans if any((rows[:, 1] > 0).any() for rows in plan.ranks)]
    assert cut and {plan.one_call for plan in cut} == {bool(SHARDINGS[sharding].chooses)}
