"""Sliding windows, attention sinks and values narrower than keys: exact for any plan, in fp64."""

import numpy as np
import pytest
import torch
from attention_oracle import (
    any_plans,
    largest_error,
    mixes,
    on_all_ranks,
    one_document_at_a_time,
    padded,
    random_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard

EXACT = 1e-10


def random_sink(heads=4):
    return torch.randn(heads, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def assert_exact(plan, keep_keys=True, window=None, sink=None, **shape):
    x = random_tensors(plan.tokens, seed=plan.tokens, **shape)
    *got, _ = on_all_ranks(plan, x, keep_keys, window=window, sink=sink)
    assert largest_error(got, one_document_at_a_time(plan.lengths, x, window=window, sink=sink)) < EXACT


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_sharding_is_exact_with_windows_sinks_and_narrow_values(kind, data):
    cp = data.draw(st.sampled_from([1, 2, 4]))
    lengths = data.draw(mixes(cp))
    assert_exact(
        shard(lengths, cp, kind),
        keep_keys=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, 0, 1, 3, 16, 1000])),
        sink=data.draw(st.sampled_from([None, random_sink()])),
        v_dim=data.draw(st.sampled_from([4, 3])),
    )


@settings(max_examples=40, deadline=None)
@given(plan=any_plans(), window=st.integers(0, 45), keep_keys=st.booleans())
def test_any_plan_at_all_is_exact_with_a_window(plan, window, keep_keys):
    """Segments nearer to each other than the window have keys in common on one rank."""
    assert_exact(plan, keep_keys, window=window)


@settings(max_examples=30, deadline=None)
@given(plan=any_plans())
def test_any_plan_at_all_is_exact_with_a_sink(plan):
    assert_exact(plan, sink=random_sink())


def test_off_by_one_softmax_is_a_sink_of_zero():
    """exp(x) / (1 + sum of exp(x)): a document of one token of score 0 gets half of its value."""
    x = random_tensors(2, heads=1, kv_heads=1)
    x.q.zero_()
    out, *_ = on_all_ranks(shard([1, 1], 1, "per-document"), x, sink=torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(out, x.v / 2)


def test_a_very_low_sink_changes_nothing_and_a_very_high_one_leaves_nothing():
    plan, x = shard([12, 5, 7], 2, "hybrid"), random_tensors(24)
    plain, *_ = on_all_ranks(plan, x)
    low, *_ = on_all_ranks(plan, x, sink=torch.full((4,), -80.0, dtype=torch.float64))
    high, *_ = on_all_ranks(plan, x, sink=torch.full((4,), 80.0, dtype=torch.float64))
    assert torch.equal(low, plain)
    assert high.abs().max() < 1e-20


def test_only_keys_inside_the_window_travel():
    plan = shard([64], 2, "per-document")  # rank 0 holds [0, 16) and [48, 64), rank 1 [16, 48)
    x = random_tensors(64)
    # Rank 0's second segment needs 3 keys of rank 1, rank 1's 3 of rank 0; their gradients come back.
    assert on_all_ranks(plan, x, window=3)[-1] == 2 * (3 + 3)
    assert on_all_ranks(plan, x)[-1] == 2 * (32 + 16)


def test_a_windowed_layout_by_hand():
    """Piece [8], CP=2, window 1: the docstring's example."""
    first, second = (attention_layout(shard([8], 2, "per-document"), rank, 1).window for rank in (0, 1))
    assert first.call.cu_seqlens_q.tolist() == [0, 2, 4] and first.call.cu_seqlens_kv.tolist() == [0, 2, 5]
    # Rank 0 wants packed tokens 0 1 | 5 6 7; it holds 0 1 6 7 and gets row 3 (token 5) from rank 1.
    assert first.exchange.recv_counts == (0, 1) and first.exchange.place.tolist() == [0, 1, ~0, 2, 3]
    assert second.exchange.send_rows.tolist() == [3] and second.exchange.send_counts == (1, 0)
    assert second.call.cu_seqlens_q.tolist() == [0, 4] and second.call.cu_seqlens_kv.tolist() == [0, 5]


def test_keys_two_segments_share_reach_both_and_their_gradients_add_up():
    """[0, 4) and [5, 9) on one rank, window 6: key 3 is in both buffers."""
    plan = ShardPlan(np.array([9]), (np.array([[0, 0, 4], [0, 5, 9]]), np.array([[0, 4, 5]])))
    exchange = attention_layout(plan, 0, 6).window.exchange
    assert exchange.place.tolist().count(3) == 2
    assert_exact(plan, window=6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(4, 4, 6, 4), (4, 1, 6, 2), (6, 2, 12, 8)])
def test_values_narrower_than_keys_are_exact(heads, kv_heads, dim, v_dim):
    """Multi-latent attention: queries and keys of 192, values of 128 channels."""
    plan = shard(padded([16, 7, 1, 40], 4), 4, "hybrid")
    assert_exact(plan, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)


@pytest.mark.parametrize("v_dim", [6, 4])
@pytest.mark.parametrize("takes", [True, False])
def test_tensors_as_megatron_has_them_give_the_same_bitwise(v_dim, takes, monkeypatch):
    """[t, 1, heads, dim] in and [t, 1, heads * v dim] out, with values that the kernels take or that are padded."""
    from wlb_megatron.attention.device_layout import device_layout
    from wlb_megatron.attention.kernels.torch_backend import TorchKernels
    from wlb_megatron.attention.sharded_attention import sharded_attention

    monkeypatch.setattr(TorchKernels, "takes", lambda *_: takes)
    layout = device_layout(attention_layout(shard([5, 3], 1, "per-document"), 0), "cpu")
    x = random_tensors(8, dim=6, v_dim=v_dim)
    results = []
    for flat in (False, True):
        q, k, v = ((t.unsqueeze(1) if flat else t).clone().requires_grad_() for t in (x.q, x.k, x.v))
        out = sharded_attention(q, k, v, layout, None, TorchKernels(), 1.0)
        dout = x.dout.flatten(1).unsqueeze(1) if flat else x.dout
        assert out.shape == dout.shape
        grads = torch.autograd.grad(out, (q, k, v), dout)
        results.append((out.reshape(8, -1, v_dim), *(g.squeeze(1) if flat else g for g in grads)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_values_wider_than_keys_and_windows_without_a_layout_are_refused():
    from attention_oracle import Member, ThreadGroup

    from wlb_megatron.attention.device_layout import device_layout
    from wlb_megatron.attention.kernels.torch_backend import TorchKernels
    from wlb_megatron.attention.sharded_attention import sharded_attention

    layout = device_layout(attention_layout(shard([8], 1, "per-document"), 0), "cpu")
    rest = layout, Member(ThreadGroup(1), 0), TorchKernels(), 1.0
    x = random_tensors(8, v_dim=6)
    with pytest.raises(ValueError, match="must have one head dim"):
        sharded_attention(x.q, x.k, x.v, *rest)
    x = random_tensors(8)
    with pytest.raises(ValueError, match="needs a layout with a window"):
        sharded_attention(x.q, x.k, x.v, *rest, windowed=True)
