"""Kernel graphs: which sizes share one, that all which a run can meet are foreseen, and that a warm-up builds each."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from attention_oracle import bucket
from chunk_oracle import iterations, shard_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.attention.core_attention import WlbCoreAttention
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.before_training import (
    Bucket,
    Equal,
    buffer_rows,
    by_likelihood,
    foreseen,
    levels,
    padded_keys,
    padded_queries,
    repeated,
    warm_up,
)
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.plugin.micro_batches.planning import ShardSettings
from wlb_megatron.plugin.step import rehearsal
from wlb_megatron.plugin.step.rehearsal import GraphSizes, build_graphs, likeliest_first
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import in_fewest_calls, shard
from wlb_megatron.sharding.slots import padding
from wlb_megatron.workload.kernel_table import h100


def engines(count, least, step):
    """get_max_tokens of Transformer Engine 2.20 (1024, 32768), and get_max_batch_size (32, 512), in its own words."""
    if count <= least:
        return least
    return 2 ** math.ceil(math.log2(count)) if count <= step else (count + step - 1) // step * step


engines_rows, engines_sequences = (
    partial(engines, least=1024, step=32768),
    partial(engines, least=32, step=512),
)


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


def graphs_of(plans, window):
    """The graphs that ranks need for micro-batches."""
    calls = []
    for plan in plans:
        for rank in range(plan.cp_size):
            layout = device_layout(attention_layout(plan, rank, window), "cpu")
            calls += [layout.diagonals, layout.rectangles]
            calls += [near.call for near in (layout.window, layout.single) if near]
    made = [(call, bucket(len(call.cu_seqlens_q) - 1, *buffer_rows(call))) for call in calls if call]
    return {(call.causal, call.window, size) for call, size in made}


def buckets(graphs):
    return {(causal, window, bucket(*size)) for causal, window, size in graphs}


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
    (plan,) = in_fewest_calls([shard(np.array(chosen + [pad] * (pad > 0)), cp, kind)], h100())
    segments = 2 * len(plan.lengths)
    assert graphs_of([plan], window) <= buckets(foreseen(most, cp, segments, segments, window))


@pytest.mark.parametrize("kind", ["per-document", "hybrid"])
@settings(max_examples=25, deadline=None)
@given(
    micro_batches=iterations(most=40_000), cp=st.sampled_from([1, 2, 4]), window=st.sampled_from([None, 512])
)
def test_every_graph_that_documents_in_chunks_need_is_foreseen(kind, micro_batches, cp, window):
    plans = shard_plans(micro_batches, cp, kind)[1]
    most, prefix = max(plan.tokens for plan in plans), max(int(plan.prefixes.sum()) for plan in plans)
    segments = 2 * max(len(plan.lengths) for plan in plans)
    known = buckets(foreseen(most, cp, segments, segments, window, prefix=prefix))
    assert graphs_of(plans, window) <= known


class Watched(TorchKernels):
    """Notes which way it was called with which call and buffers, and what it was told to expect."""

    def __init__(self):
        self.expected, self.calls = [], []

    def expect(self, call, q, kv):
        assert 2 * len(self.expected) == len(self.calls), "expected, then called, each way"
        self.expected.append((call.equal, q.shape, kv.shape))

    def forward(self, call, q, kv, scale):
        self.calls.append(("forward", call, len(q), len(kv)))
        return super().forward(call, q, kv, scale)

    def backward(self, call, q, kv, *rest):
        self.calls.append(("backward", call, len(q), len(kv)))
        return super().backward(call, q, kv, *rest)


HEADS = {"heads": (2, 1), "dims": (8, 8), "scale": 1.0, "dtype": torch.float32, "device": "cpu"}


def test_a_warm_up_calls_each_graph_forward_and_backward_and_again_where_recomputed():
    sizes = (True, None, (32, 100, 100)), (False, None, (64, 2048, 5000)), (True, 9, (32, 7, 9))
    graphs = [(causal, window, Bucket(*size)) for causal, window, size in sizes]
    for recompute in (False, True):
        kernels = Watched()
        warm_up(kernels, graphs, **HEADS, recompute=recompute)
        called = [
            (way, call.causal, call.window, bucket(len(call.sizes), *rows))
            for way, call, *rows in kernels.calls
        ]
        for causal, window, size in graphs:
            assert called.count(("forward", causal, window, bucket(*size))) == 1 + recompute
            assert called.count(("backward", causal, window, bucket(*size))) == 1


@pytest.mark.parametrize(("cp", "calls"), [(1, 1), (2, 2), (4, 2), (8, 2)])
def test_a_document_of_a_window_makes_calls_of_equal_sequences(cp, calls):
    """Two ranks of 64 tokens hold 0-16 with 48-64, and 16-48: diagonals of 2 x 16 or 1 x 32, rectangles of 16 x 48 or
    32 x 16. Of more ranks all but the first have two rectangles, of different sizes."""
    plan = shard(np.array([32 * cp]), cp, "per-sequence")
    calls_of_ranks = [repeated(attention_layout(plan, rank), windowed=False) for rank in range(cp)]
    assert calls_of_ranks[0][0] == (True, None, Equal(2, 16, 16) if cp > 1 else Equal(1, 32, 32))
    assert calls_of_ranks[-1][0] == (True, None, Equal(1, 32, 32)), "the last rank's two chunks touch"
    assert len(calls_of_ranks[0]) == calls
    if cp == 2:
        rectangles = [size for rank in calls_of_ranks for _, _, size in rank[1:]]
        assert rectangles == [Equal(1, 16, 48), Equal(1, 32, 16)]
    assert repeated(attention_layout(plan, 0), windowed=True) == []
    (near,) = repeated(attention_layout(plan, cp - 1, 8), windowed=True)
    assert near == (True, 8, Equal(1, 32, 32 + 8 * (cp > 1)))
    uneven = shard(np.array([8 * cp, 24 * cp]), cp, "per-sequence")
    assert repeated(attention_layout(uneven, 0), windowed=False) == [] or cp > 1


def test_a_warm_up_runs_equal_sequences_whole_and_tells_the_kernels_to_expect_them():
    kernels = Watched()
    warm_up(kernels, [(True, None, Equal(2, 16, 16)), (False, None, Equal(1, 16, 48))], **HEADS)
    assert kernels.expected == [
        ((2, 16, 16), (32, 2, 8), (32, 2, 1, 8)),
        ((1, 16, 48), (16, 2, 8), (48, 2, 1, 8)),
    ]
    called = [call for way, call, *_ in kernels.calls if way == "forward"]
    bounds = [(call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()) for call in called]
    assert [call.sizes for call in called] == [((16, 16),) * 2, ((16, 48),)]
    assert bounds == [([0, 16, 32], [0, 16, 32]), ([0, 16], [0, 48])]


def test_no_graph_is_foreseen_of_layers_without_windows_alone_or_of_one_call_where_two_are_made():
    assert all(window == 64 for _, window, _ in foreseen(8192, 2, 32, 32, 64, whole_documents=False))
    assert not any(window for _, window, _ in foreseen(8192, 2, 32, 32, None))
    assert all(causal for causal, _, _ in foreseen(8192, 1, 32, 32, None)), "one rank has no rectangles"
    for one_call in (True, False):
        graphs = foreseen(8192, 2, 32, 32, None, one_call=one_call)
        assert any(causal and size.keys > size.queries for causal, _, size in graphs) == one_call


def a_rank(**changed):
    settings = ShardSettings(0, changed.pop("cp_size", 16), 1, "adaptive", h100())
    return GraphSizes(1_572_864, 1 << 20, settings, changed.pop("documents", 2400), **changed)


class Clock:
    """Time that passes as graphs are built."""

    def __init__(self, monkeypatch, each):
        self.now, self.each, self.built, self.lines = 0.0, each, [], []
        monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(rehearsal, "likeliest_first", self.listed)
        monkeypatch.setattr(rehearsal, "print_rank_0", self.lines.append)

    def listed(self, chunks, met):
        graphs = [(True, None, Bucket(32, n, n)) for n in range(1, 11)]
        return [(self, graph) for graph in graphs]

    def warm_up(self, graphs):
        self.built += graphs
        self.now += self.each


@pytest.mark.parametrize(("seconds", "built"), [(25, 3), (1000, 10)])
def test_graphs_are_built_while_there_is_time_and_told(monkeypatch, seconds, built):
    clock = Clock(monkeypatch, each=10.0)
    monkeypatch.setattr(rehearsal, "SECONDS", seconds)
    build_graphs([], a_rank())
    (line,) = clock.lines
    assert len(clock.built) == built
    assert f"{built} of 10 attention kernels built in {10.0 * built} s, 10.00 s each" in line
    assert ("others are built when a step needs them" in line) == (built < 10)


def test_which_equal_sequences_get_kernels_of_their_own_is_no_matter_of_time(monkeypatch):
    clock = Clock(monkeypatch, each=10.0)
    monkeypatch.setattr(rehearsal, "SECONDS", 1)
    equal = [(True, None, Equal(1, 32, 32)), (False, None, Equal(1, 32, 64))]
    listed = [(clock, graph) for graph in [*equal, (True, None, Bucket(32, 1, 1))]]
    monkeypatch.setattr(rehearsal, "likeliest_first", lambda chunks, met: listed)
    build_graphs([], a_rank())
    assert clock.built == equal


def test_graphs_of_usual_sizes_come_first():
    usual = a_rank()
    for window, full in ((None, True), (4096, False)):
        sizes = usual.tokens, usual.settings.cp_size, usual.segments, usual.cut_segments
        graphs = foreseen(*sizes, window, whole_documents=full)
        causal, rectangles = by_likelihood(graphs, usual.usual_tokens, usual.usual_segments)
        assert sorted(causal + rectangles) == sorted(graphs)
        assert causal[0] == (True, window, Bucket(128, 65536, 65536))
        at = {size: place for place, (_, _, size) in enumerate(causal)}
        for size in (Bucket(64, 65536, 65536), Bucket(256, 65536, 65536), Bucket(128, 32768, 32768)):
            assert at[size] < len(causal) / 4 < at[Bucket(4096, 1024, 1024)]
        assert not full or {size.queries for _, _, size in rectangles[:10]} == {65536}


def test_kinds_of_graphs_are_built_by_turns():
    class Layer(WlbCoreAttention, torch.nn.Module):
        whose = "cudnn"

        def __init__(self, windowed):
            torch.nn.Module.__init__(self)
            self._windowed, self.config = windowed, TransformerConfig()

        @property
        def kind(self):
            return self.whose, self._windowed

    class TransformerConfig:
        window_size = (4096, 0)

    chunks = [torch.nn.ModuleList([Layer(False), Layer(True), Layer(False)])]
    again = attention_layout(shard(np.array([131_072 * 16]), 16, "per-sequence"), 15, 4096)
    first = likeliest_first(chunks, a_rank(window_layout=again))[:4]
    assert [(module is chunks[0][0], type(size)) for module, (_, _, size) in first] == [
        (True, Equal),  # its diagonals and its rectangle
        (True, Equal),
        (False, Equal),
        (True, Bucket),
    ]
    order = likeliest_first(chunks, a_rank())
    assert len(order) == len({graph for _, graph in order})
    for (_causal, window, _), (module, _) in zip([graph for _, graph in order[:30]], order, strict=False):
        assert (window is None) == (module is chunks[0][0])
    for share in ((True, None), (False, None), (True, 4096)):
        assert sum(graph[:2] == share for _, graph in order[:30]) == 10
    Layer.whose = "torch"
    assert likeliest_first(chunks, a_rank()) == []
    Layer.whose = "fa4"
    kinds = [graph for _, graph in likeliest_first(chunks, a_rank(window_layout=again))]
    masks = [(causal, window, size.sequences) for causal, window, size in kinds]
    assert masks == [(True, None, 1), (True, None, 257), (False, None, 1), (True, 4096, 1), (True, 4096, 257)]
    few = [graph for _, graph in likeliest_first(chunks, a_rank(documents=20, cp_size=1))]
    assert [graph[:2] for graph in few] == [(True, None), (True, 4096)]


@pytest.mark.parametrize(("cp", "sharding"), [(1, "adaptive"), (8, "adaptive"), (8, "per-document")])
def test_what_a_rank_usually_holds_is_within_what_it_can_meet(cp, sharding):
    settings = ShardSettings(0, cp, cp, sharding, h100())
    met = GraphSizes(196_608, 131_072, settings, 300)
    assert met.usual_tokens == 131_072 // cp and met.segments == 600
    assert 32 <= met.usual_segments <= met.segments
    assert met.usual_segments == {1: 200, 8: 32 if sharding == "adaptive" else 400}[cp]
