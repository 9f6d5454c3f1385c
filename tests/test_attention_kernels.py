"""What Transformer Engine's kernels are asked for; its masks and windows are computed here as it documents them."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_oracle import (
    SCALE,
    Member,
    ThreadGroup,
    bucket,
    each_sequence,
    import_over,
    largest_error,
    on_all_ranks,
    one_document_at_a_time,
    padded,
    random_tensors,
    sequence_gradients,
    whole_call,
)
from megatron.core.transformer.enums import AttnMaskType

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels import before_training
from wlb_megatron.attention.kernels.before_training import TOLERATED, Equal, repeated, warm_up, worst_error
from wlb_megatron.attention.sharded_attention import LayerSettings, sharded_attention
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.errors import WlbError
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import padding


def seen(mask, window, queries, keys):
    """True where query i sees key j, by fused_attn_fwd's docstring: keys in [i + d - left, i + d + right]."""
    left, right = (math.inf if size < 0 else size for size in window)
    shift = keys - queries if mask.endswith("bottom_right") else 0
    far = torch.arange(queries)[:, None] + shift - torch.arange(keys)
    inside = (far <= left) & (far >= -right)
    return inside & (far >= 0) if "causal" in mask else inside


def as_packed(call, cu_q, cu_kv):
    """The same call of packed sequences."""
    layout = {"bshd_bs2hd": "thd_t2hd", "bshd_bshd_bshd": "thd_thd_thd"}[call["qkv_layout"]]
    masks = {name: f"padding_{name}" for name in ("causal", "causal_bottom_right")} | {"no_mask": "padding"}
    assert "cu_seqlens_q_padded" not in call
    packed = {"o_format": "thd", "qkv_layout": layout, "attn_mask_type": masks[call["attn_mask_type"]]}
    return call | packed | {"cu_seqlens_q_padded": cu_q, "cu_seqlens_kv_padded": cu_kv}


class Asked:
    """Stands for transformer_engine's fused_attn module; keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def _each(self, call, cu_q, cu_kv, *tensors):
        def slices(kind, bounds):
            starts = call[f"cu_seqlens_{kind}_padded"].tolist()
            return [slice(start, start + n) for start, n in zip(starts, bounds.diff().tolist(), strict=False)]

        bounds = zip(slices("q", cu_q), slices("kv", cu_kv), strict=True)
        shown = partial(seen, call["attn_mask_type"], call["window_size"])
        return each_sequence(*tensors, bounds, call["attn_scale"], shown)

    def forward(self, training, max_q, max_kv, cu_q, cu_kv, q, k, v, dtype, backend, **call):
        assert training
        self.calls.append(call)
        self.bounds = cu_q, cu_kv
        if call["o_format"] == "thd":
            return self._forward(call, cu_q, cu_kv, q, k, v)
        assert q.shape[:2] == (len(cu_q) - 1, max_q)
        assert k.shape[:2] == v.shape[:2] == (len(cu_kv) - 1, max_kv)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, (stats, rng) = self._forward(as_packed(call, cu_q, cu_kv), cu_q, cu_kv, *flat)
        # Of a batch [b, s, heads, dim] the statistics are [b, heads, s, 1].
        stats = stats.unflatten(0, q.shape[:2]).transpose(1, 2).contiguous()
        return out.unflatten(0, q.shape[:2]), [stats, rng]

    def _forward(self, call, cu_q, cu_kv, q, k, v):
        if call["qkv_layout"] == "thd_t2hd":
            side_by_side = k.data_ptr() + k[0].numel() * k.element_size() == v.data_ptr()
            assert side_by_side, "keys and values"
        else:
            assert call["qkv_layout"] == "thd_thd_thd" and k.is_contiguous() and v.is_contiguous()
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        stats = torch.empty(*q.shape[:2], 1, dtype=q.dtype)
        for rows, _, _, values, scores in self._each(call, cu_q, cu_kv, q, k, v):
            stats[rows] = scores.logsumexp(-1).T[..., None]
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def backward(self, max_q, max_kv, cu_q, cu_kv, q, k, v, out, dout, dtype, context, backend, **call):
        stats, rng = context
        self.calls.append(call)
        assert rng.shape == (2,) and call["dqkv_layout"] == call["qkv_layout"]
        assert call["do_format"] == call["o_format"]
        if call["o_format"] == "thd":
            return self._backward(call, cu_q, cu_kv, q, k, v, out, dout, stats)
        assert stats.shape == (q.shape[0], q.shape[2], q.shape[1], 1) and stats.is_contiguous()
        flat = [x.flatten(0, 1) for x in (q, k, v, out, dout, stats.transpose(1, 2))]
        grads = self._backward(as_packed(call, cu_q, cu_kv), cu_q, cu_kv, *flat)
        return tuple(g.unflatten(0, x.shape[:2]) for g, x in zip(grads, (q, k, v), strict=True))

    def _backward(self, call, cu_q, cu_kv, q, k, v, out, dout, stats):
        assert stats.shape == (*q.shape[:2], 1)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        delta = (out * dout).sum(-1)
        for rows, keys, key, values, scores in self._each(call, cu_q, cu_kv, q, k, v):
            sums = stats[rows, :, 0].T, delta[rows].T
            grads = sequence_gradients(scores, *sums, q[rows], key, values, dout[rows], k.shape[1])
            dq[rows], dk[keys], dv[keys] = grads
        return dq * call["attn_scale"], dk * call["attn_scale"], dv


@pytest.fixture
def asked(monkeypatch):
    """The backend imported over a stand-in for Transformer Engine."""
    stand_in = Asked()
    module = ModuleType("transformer_engine.pytorch.cpp_extensions.fused_attn")
    module.FusedAttnBackend = {"F16_arbitrary_seqlen": 1}
    module.fused_attn_fwd, module.fused_attn_bwd = stand_in.forward, stand_in.backward
    stand_in.backend = import_over(monkeypatch, module, "te_backend")
    yield stand_in
    sys.modules.pop(stand_in.backend.__name__, None)


def error_of(asked):
    return worst_error(asked.backend.TransformerEngineKernels(), torch.float64, "cpu", dim=8)


def test_the_check_of_kernels_accepts_what_is_right_and_calls_every_form(asked):
    assert error_of(asked) < 1e-12
    forms = {(call["o_format"], call["attn_mask_type"], call["window_size"]) for call in asked.calls}
    assert forms == {
        ("thd", "padding_causal", (-1, 0)),
        ("thd", "padding", (-1, -1)),
        ("thd", "padding_causal_bottom_right", (-1, 0)),
        ("thd", "padding_causal", (20, 0)),
        ("thd", "padding_causal_bottom_right", (20, 0)),
        ("bshd", "causal", (-1, 0)),
        ("bshd", "no_mask", (-1, -1)),
    }


@pytest.mark.parametrize(("deterministic", "error"), [(True, WlbError), (False, torch.OutOfMemoryError)])
def test_memory_that_a_deterministic_backward_lacks_is_explained(asked, monkeypatch, deterministic, error):
    def full(*_, **__):
        raise torch.OutOfMemoryError("Out of memory. Tried to allocate 256.50 GiB. GPU 0 has 5 GiB.")

    monkeypatch.setattr(asked.backend, "fused_attn_bwd", full)
    with pytest.raises(error, match=r"allocate 256\.50 GiB") as raised:
        alone(asked, padded([9, 1], 1), deterministic=deterministic)
    assert ("--wlb-kernels fa4" in str(raised.value)) == deterministic != ("GPU 0" in str(raised.value))


def top_left(call):
    return call | {"attn_mask_type": call["attn_mask_type"].replace("_bottom_right", "")}


def no_window(call):
    return call | {"window_size": (-1, call["window_size"][1])}


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("_forward", lambda result, call: (result[0], [1.4427 * result[1][0], result[1][1]])),  # of base 2
        ("_forward", lambda result, call: (torch.full_like(result[0], math.nan), result[1])),
        ("_backward", lambda result, call: (result[0], result[2], result[1])),
        ("_each", top_left),
        ("_each", no_window),
        ("_each", lambda call: call | {"attn_scale": 1.0}),
    ],
)
def test_the_check_of_kernels_finds_an_entry_point_that_means_something_else(asked, monkeypatch, way, change):
    right = getattr(asked, way)

    def changed(call, *others):
        return right(change(call), *others) if way == "_each" else change(right(call, *others), call)

    monkeypatch.setattr(asked, way, changed)
    assert not error_of(asked) <= 3 * TOLERATED


def alone(asked, lengths, window=None, deterministic=False, **shape):
    plan = shard(lengths, 1, "per-document")
    x = random_tensors(plan.tokens, **shape)
    layout = device_layout(attention_layout(plan, 0, window), "cpu")
    inputs = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    kernels = asked.backend.TransformerEngineKernels(deterministic)
    out = sharded_attention(
        *inputs, layout, Member(ThreadGroup(1), 0), kernels, SCALE, LayerSettings(windowed=window is not None)
    )
    got = [out.detach(), *torch.autograd.grad(out, inputs, x.dout)]
    assert largest_error(got, one_document_at_a_time(lengths, x, window=window)) < 1e-10
    return asked.calls


@pytest.mark.parametrize("window", [None, 0, 3, 100])
def test_its_masks_and_windows_are_those_of_the_oracle(asked, window):
    forward, backward = alone(asked, padded([9, 1, 20, 2], 1), window)
    assert forward["attn_mask_type"] == backward["attn_mask_type"]
    assert forward["window_size"] == backward["window_size"] == (-1 if window is None else window, 0)


def forwards(asked, plan):
    """Each call of each rank, and what the engine is asked for it."""
    kernels = asked.backend.TransformerEngineKernels()
    for rank in range(plan.cp_size):
        layout = device_layout(attention_layout(plan, rank), "cpu")
        for call in (layout.diagonals, layout.rectangles):
            keys = torch.zeros(call.kv_rows, 2, 2, 4, dtype=torch.float64)
            kernels.forward(call, random_tensors(call.q_rows).q, keys, SCALE)
            yield call, asked.calls[-1]


def test_lengths_without_padding_are_told_by_one_tensor_twice(asked):
    """Transformer Engine takes padding for granted unless both are the same object, and then it is slower."""
    for call, passed in forwards(asked, shard(padded([16, 7, 9], 2), 2, "per-document")):
        assert passed["cu_seqlens_q_padded"] is asked.bounds[0]
        assert passed["cu_seqlens_kv_padded"] is asked.bounds[1]
        assert (asked.bounds[0] is asked.bounds[1]) == call.causal


def test_rectangles_have_no_mask_and_diagonals_the_fast_causal_one(asked):
    asked_for = forwards(asked, shard([64], 2, "per-document"))
    masks = {(call.causal, passed["attn_mask_type"], passed["window_size"]) for call, passed in asked_for}
    assert masks == {(True, "padding_causal", (-1, 0)), (False, "padding", (-1, -1))}


@pytest.mark.parametrize(
    ("dim", "v_dim", "layout"), [(24, 16, "thd_thd_thd"), (24, 24, "thd_t2hd"), (24, 4, "thd_t2hd")]
)
def test_narrow_values_are_given_apart_where_the_kernels_take_them_and_else_padded(asked, dim, v_dim, layout):
    forward, backward = alone(asked, padded([9, 1, 20], 1), dim=dim, v_dim=v_dim)
    assert forward["qkv_layout"] == backward["qkv_layout"] == backward["dqkv_layout"] == layout


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_reaches_the_backward_kernel(asked, deterministic):
    _, backward = alone(asked, padded([9, 4], 1), deterministic=deterministic)
    assert backward["deterministic"] is deterministic


@pytest.mark.parametrize(
    ("mode", "variable", "expected"),
    [(False, None, False), (True, None, True), (False, "0", True), (False, "1", False)],
)
def test_the_flag_and_the_environment_variable_ask_for_it(asked, monkeypatch, mode, variable, expected):
    """--deterministic-mode, or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, as for Transformer Engine's own attention."""
    from test_attention_module import Engine, build

    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    if variable is not None:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", variable)
    module = build(Engine, mask=AttnMaskType.causal, deterministic_mode=mode, kv_channels=8)
    name, kernels = module.kernels
    assert name == "cudnn" and kernels.deterministic is expected


@pytest.mark.parametrize(
    ("dim", "capability", "says"),
    [
        (260, (9, 0), "multiples of 8 up to 256"),
        (100, None, "multiples of 8"),
        (128, (8, 0), "needs Hopper or newer"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_when_built(asked, dim, capability, says):
    with pytest.raises(WlbError, match=says):
        asked.backend.refuse_unfit(dim, capability)
    asked.backend.refuse_unfit(256, (9, 0))
    asked.backend.refuse_unfit(64, (10, 0))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("one_call", [False, True])
def test_equal_sequences_go_as_a_batch_once_they_are_expected_and_come_out_the_same(
    asked, cp, window, one_call
):
    """A document of a window over the ranks, before and after: the oracle's gradients both times."""
    plan, x = replace(shard([64], cp, "per-sequence"), one_call=one_call), random_tensors(64)
    kernels = asked.backend.TransformerEngineKernels()
    expected = one_document_at_a_time([64], x, window=window)
    forms = []
    for _ in range(2):
        asked.calls.clear()
        *got, _ = on_all_ranks(plan, x, kernels=kernels, window=window)
        assert largest_error(got, expected) < 1e-10
        forms.append([past["o_format"] for past in asked.calls])
        for rank in range(cp):
            layout = device_layout(attention_layout(plan, rank, window), "cpu")
            near = layout.window or layout.single
            for call in [near.call] if near else [layout.diagonals, layout.rectangles]:
                if call and call.equal:
                    kernels.expect(call, x.q, torch.stack((x.k, x.v), dim=1))
    before, after = forms
    assert set(before) == {"thd"} and len(before) == len(after) and "bshd" in after
    if cp == 1 or (cp == 2 and window is None and not one_call):
        assert set(after) == {"bshd"}, "all calls of one document over two ranks are of equal sequences"


@pytest.mark.parametrize("window", [None, 5])
def test_what_a_warm_up_ran_as_a_batch_comes_as_one_in_training(asked, window):
    """Of three ranks the last holds 16 of 48 tokens, in the middle: its rectangle has 16 queries and 16 keys."""
    plan, kernels = shard([48], 3, "per-sequence"), asked.backend.TransformerEngineKernels()
    made = [attention_layout(plan, rank, window) for rank in range(3)]
    graphs = [graph for layout in made for graph in repeated(layout, windowed=window is not None)]
    assert window is not None or (False, None, Equal(1, 16, 16)) in graphs
    shape = {"heads": (4, 2), "dims": (4, 4), "scale": SCALE}
    warm_up(kernels, graphs, **shape, dtype=torch.float64, device="cpu")
    sizes = {tuple(size) for *_, size in graphs}
    for layout in (device_layout(attention, "cpu") for attention in made):
        calls = [layout.diagonals, layout.rectangles] if window is None else [layout.window.call]
        for call in calls:
            if call.equal in sizes:
                q, kv = (
                    torch.zeros(n, *shape, dtype=torch.float64)
                    for n, shape in ((call.q_rows, (4, 4)), (call.kv_rows, (2, 2, 4)))
                )
                kernels.forward(call, q, kv, SCALE)
                assert asked.calls[-1]["o_format"] == "bshd", (call.causal, call.equal)


def test_other_sizes_and_other_heads_than_expected_go_packed(asked):
    kernels, x = asked.backend.TransformerEngineKernels(), random_tensors(24)

    def form(lengths, x=x):
        kernels.forward(whole_call(lengths), x.q, torch.stack((x.k, x.v), dim=1), SCALE)
        return asked.calls[-1]["o_format"]

    kernels.expect(whole_call([24]), x.q, torch.stack((x.k, x.v), dim=1))
    assert form([24]) == "bshd"
    assert {form([12, 12]), form([8, 16])} == {"thd"}
    assert asked.backend.TransformerEngineKernels(True) is not kernels
    assert form([24], random_tensors(24, dim=2, v_dim=2)) == "thd"


def test_a_plan_with_only_whole_documents_makes_one_call_each_way(asked):
    plan = ShardPlan(np.array([8, 8]), (np.array([[0, 0, 8]]), np.array([[1, 0, 8]])))
    layout, x = device_layout(attention_layout(plan, 0), "cpu"), random_tensors(8)
    inputs, kernels = (t.requires_grad_() for t in (x.q, x.k, x.v)), asked.backend.TransformerEngineKernels()
    sharded_attention(*inputs, layout, None, kernels, SCALE).backward(x.dout)
    assert len(asked.calls) == 2


def test_one_call_is_a_bottom_right_one_over_each_segments_own_keys(asked):
    plan = replace(shard([64], 2, "per-document"), one_call=True)
    single = device_layout(attention_layout(plan, 0), "cpu").single
    keys = torch.zeros(single.call.kv_rows, 2, 2, 4, dtype=torch.float64)
    kernels = asked.backend.TransformerEngineKernels()
    kernels.forward(single.call, random_tensors(single.call.q_rows).q, keys, SCALE)
    (call,) = asked.calls
    assert call["attn_mask_type"] == "padding_causal_bottom_right" and call["window_size"] == (-1, 0)
    assert call["cu_seqlens_q_padded"].tolist() == [0, 16, 32] + 30 * [32]
    assert call["cu_seqlens_kv_padded"].tolist() == [0, 16, 80] + 30 * [80]


@pytest.mark.parametrize("documents", [1, 31, 32, 33, 513])
def test_the_number_of_sequences_is_told_rounded_up_with_empty_ones(asked, documents):
    lengths = [1] * documents
    forward, backward = alone(asked, lengths)
    expected = bucket(documents, 1, 1).sequences
    for call in (forward, backward):
        bounds = call["cu_seqlens_q_padded"]
        assert len(bounds) - 1 == expected and bounds is call["cu_seqlens_kv_padded"]
        assert bounds.diff().tolist() == lengths + [0] * (expected - documents)


def test_layers_of_a_micro_batch_share_the_rounded_bounds_and_keep_none_of_earlier_ones(asked):
    kernels, x = asked.backend.TransformerEngineKernels(), random_tensors(24)
    kv = torch.stack((x.k, x.v), dim=1)
    for _ in range(2):
        call = whole_call([12, 7, 5])
        bounds = []
        for _ in range(2):
            kernels.forward(call, x.q, kv, SCALE)
            bounds.append(asked.bounds[0])
        assert bounds[0] is bounds[1]
        assert len(asked.backend._rounded_bounds) == 1
        del call
        assert not len(asked.backend._rounded_bounds)


def test_an_engine_that_keeps_graphs_by_the_number_of_sequences_finds_those_of_the_warm_up(
    asked, monkeypatch
):
    """Forwards of long-tailed micro-batches, 128K over 4 ranks. From cuDNN 9.24 on Transformer Engine tells them apart
    by rows rounded up and by the number of sequences as it is."""
    met = set()

    def forward(training, max_q, max_kv, cu_q, cu_kv, q, k, v, dtype, backend, **passed):
        causal = "causal" in passed["attn_mask_type"]
        met.add((causal, len(cu_q) - 1, before_training.rows(len(q)), before_training.rows(len(k))))
        return torch.empty_like(q), [torch.empty(*q.shape[:2], 1), None]

    monkeypatch.setattr(asked.backend, "fused_attn_fwd", forward)
    kernels, cp, window = asked.backend.TransformerEngineKernels(), 4, 131072
    pool, rng, numbers = long_tailed(window, 4096, 3), np.random.default_rng(3), set()
    for step in range(60):
        chosen = rng.permutation(pool)
        chosen = chosen[np.cumsum(chosen) <= rng.uniform(0.4, 1.5) * window]
        lengths = np.append(chosen, padding(int(chosen.sum()), cp) or cp)
        layout = device_layout(attention_layout(shard(lengths, cp, "adaptive"), step % cp), "cpu")
        for call in filter(None, (layout.diagonals, layout.rectangles)):
            q, k = kernels.buffer_rows(call)
            kernels.forward(call, torch.empty(q, 1, 8), torch.empty(k, 2, 1, 8), SCALE)
            numbers.add(len(call.cu_seqlens_q) - 1)
    known = {
        (causal, *bucket(*size))
        for causal, _, size in before_training.foreseen(3 * window // 2, cp, 2 * len(pool), 64, None)
    }
    assert met <= known and len(met) < len(numbers), (len(met), len(numbers))
