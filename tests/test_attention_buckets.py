"""Kernel graphs: which sizes share one, that all which a run can meet are foreseen, and that a warm-up builds each."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.graph_buckets import Bucket, bucket, foreseen, levels, padded_keys, padded_queries
from wlb_megatron.attention.torch_backend import TorchKernels
from wlb_megatron.attention.warm_up import warm_up
from wlb_megatron.config import SHARDINGS
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard


def engines_rows(tokens):
    """get_max_tokens of Transformer Engine 2.20, in its own words."""
    power = math.ceil(math.log2(tokens))
    if power <= 10:
        return 1024
    return 2**power if power <= 15 else (tokens + 32767) // 32768 * 32768


def engines_sequences(count):
    """get_max_batch_size of Transformer Engine 2.20, in its own words."""
    power = math.ceil(math.log2(count))
    if power <= 5:
        return 32
    return 2**power if power <= 9 else (count + 511) // 512 * 512


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300_000), st.integers(1, 300_000))
def test_a_bucket_is_what_transformer_engine_rounds_to(sequences, queries, keys):
    expected = engines_sequences(sequences), engines_rows(queries), engines_rows(keys)
    assert bucket(sequences, queries, keys) == expected


@settings(max_examples=200, deadline=None)
@given(most=st.integers(1, 400_000), at=st.integers(1, 400_000))
def test_levels_stand_for_every_count_up_to_the_most(most, at):
    found = levels(most)
    assert found == sorted(set(found)) and found[-1] == most
    if at <= most:
        assert engines_rows(at) in {engines_rows(level) for level in found}


def graph(call):
    return call.causal, call.window, bucket(len(call.cu_seqlens_q) - 1, call.q_rows, call.kv_rows)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3_000_000))
def test_buffers_have_room_and_keys_little_to_spare(count):
    assert padded_queries(count) >= count <= padded_keys(count)
    assert padded_keys(count) <= max(16384, 2 * count)
    if count > 32768:
        assert padded_keys(count) < count + max(32768, count / 4)
        assert padded_keys(count) % 32768 == 0


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_graph_that_a_micro_batch_needs_is_foreseen(kind, data):
    cp = data.draw(st.sampled_from([1, 2, 4, 8]))
    most = data.draw(st.sampled_from([8_192, 70_000, 196_608]))
    window = data.draw(st.sampled_from([None, 512]))
    longest = st.one_of(st.integers(1, 300), st.integers(1, most))
    lengths = [n for n in data.draw(st.lists(longest, min_size=1, max_size=60)) if n <= most]
    chosen = []
    for length in lengths:
        if sum(chosen) + length <= most - cp:
            chosen.append(length)
    chosen = chosen or [1]
    pad = padding(sum(chosen), cp)
    plan = shard(np.array(chosen + [pad] * (pad > 0)), cp, kind)
    known = {
        (causal, near, bucket(*size))
        for causal, near, size in foreseen(most, cp, 2 * len(plan.lengths), 2 * len(plan.lengths), window)
    }
    for rank in range(cp):
        layout = device_layout(attention_layout(plan, rank, window), "cpu")
        assert graph(layout.diagonals) in known
        assert layout.rectangles is None or graph(layout.rectangles) in known
        assert layout.window is None or graph(layout.window.call) in known


def test_a_warm_up_calls_each_graph_forward_and_backward_and_again_where_recomputed():
    class Watched(TorchKernels):
        def __init__(self):
            self.calls = []

        def forward(self, call, q, kv, scale):
            self.calls.append(("forward", bucket(len(call.sizes), len(q), len(kv)), call.causal, call.window))
            return super().forward(call, q, kv, scale)

        def backward(self, call, q, kv, *rest):
            self.calls.append(
                ("backward", bucket(len(call.sizes), len(q), len(kv)), call.causal, call.window)
            )
            return super().backward(call, q, kv, *rest)

    graphs = [
        (True, None, Bucket(32, 100, 100)),
        (False, None, Bucket(64, 2048, 5000)),
        (True, 9, Bucket(32, 7, 9)),
    ]
    heads = {
        "heads": 2,
        "kv_heads": 1,
        "dim": 8,
        "v_dim": 8,
        "scale": 1.0,
        "dtype": torch.float32,
        "device": "cpu",
    }
    for recompute in (False, True):
        kernels = Watched()
        assert warm_up(kernels, graphs, **heads, recompute=recompute) == 3
        for causal, window, size in graphs:
            at = bucket(*size), causal, window
            assert kernels.calls.count(("forward", *at)) == 1 + recompute
            assert kernels.calls.count(("backward", *at)) == 1


def test_a_model_of_windowed_layers_only_builds_no_graph_of_others():
    assert all(window == 64 for _, window, _ in foreseen(8192, 2, 32, 32, 64, full=False))
    assert not any(window for _, window, _ in foreseen(8192, 2, 32, 32, None))
    assert not any(not causal for causal, _, _ in foreseen(8192, 1, 32, 32, None)), (
        "one rank has no rectangles"
    )
