"""The executor against attention one document at a time: output, dQ, dK, dV, in fp64, with windows and sinks."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_oracle import (
    SCALE,
    Member,
    Tensors,
    ThreadGroup,
    any_plans,
    largest_error,
    mixes,
    on_all_ranks,
    one_document_at_a_time,
    padded,
    random_tensors,
)
from forked_ranks import spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_runs import free_port

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import LayerSettings, sharded_attention
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan

EXACT = 1e-10


def random_sink(heads=4):
    return torch.randn(heads, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def assert_exact(plan, keep_keys=True, window=None, sink=None, **shape):
    x = random_tensors(plan.tokens, seed=plan.tokens, **shape)
    *got, _ = on_all_ranks(plan, x, keep_keys, window=window, sink=sink)
    assert largest_error(got, one_document_at_a_time(plan.lengths, x, window=window, sink=sink)) < EXACT


def test_what_is_compared_with_is_each_document_alone():
    lengths = [3, 1, 7, 3, 1, 3]
    x = random_tensors(18)
    alone = [
        one_document_at_a_time([length], Tensors(*(t[end - length : end] for t in (x.q, x.k, x.v, x.dout))))
        for length, end in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    for together, parts in zip(one_document_at_a_time(lengths, x), zip(*alone, strict=True), strict=True):
        assert torch.allclose(together, torch.cat(parts), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("kind", SHARDINGS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), cp=st.sampled_from([4, 2, 1]))
def test_every_sharding_equals_attention_one_document_at_a_time(kind, cp, data):
    lengths = data.draw(mixes(cp))
    assert_exact(shard(lengths, cp, kind), keep_keys=data.draw(st.booleans()))


@pytest.mark.parametrize("breadth", ["plain", "window", "sink"])
@settings(max_examples=60, deadline=None)
@given(plan=any_plans(), keep_keys=st.booleans(), window=st.integers(0, 45))
def test_any_plan_at_all_is_exact(breadth, plan, keep_keys, window):
    """Segments nearer to each other than the window have keys in common on one rank."""
    options = {"plain": {}, "window": {"window": window}, "sink": {"sink": random_sink()}}[breadth]
    assert_exact(plan, keep_keys, **options)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("per-document", {"heads": 4, "kv_heads": 4}),
        ("per-document", {"heads": 6, "kv_heads": 2}),
        ("per-document", {"heads": 4, "kv_heads": 1}),
        ("hybrid", {"heads": 4, "kv_heads": 4, "dim": 6, "v_dim": 4}),
        ("hybrid", {"heads": 4, "kv_heads": 1, "dim": 6, "v_dim": 2}),
        ("hybrid", {"heads": 6, "kv_heads": 2, "dim": 12, "v_dim": 8}),
    ],
    ids=str,
)
def test_any_number_of_key_heads_and_values_narrower_than_keys_are_exact(kind, shape):
    """Context parallelism is not capped by the number of key heads: one of them, four ranks. In multi-latent attention
    queries and keys have 192 channels, values 128."""
    assert_exact(shard(padded([16, 7, 1, 40], 4), 4, kind), **shape)


@pytest.mark.parametrize("kind", SHARDINGS)
def test_lengths_that_do_not_divide_need_no_padding_of_their_own(kind):
    """Documents of 4, 8, 6 and 10 tokens at CP=2, which other systems pad to 4 8 8 12 (and take 7 for 6)."""
    plan = shard([4, 8, 6, 10], 2, kind)
    assert plan.tokens_per_rank == (14, 14)
    assert_exact(plan)
    assert_exact(shard([7, 1], 2, kind))


def test_strided_inputs_give_what_contiguous_ones_give():
    """Megatron hands over views of one projection's output, and transposed tensors may come too."""
    plan = shard([10, 6], 2, "per-document")
    x = random_tensors(16)
    *expected, _ = on_all_ranks(plan, x)
    for name in ("q", "k", "v", "dout"):
        tensor = getattr(x, name)
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        setattr(x, name, wide[..., ::2])
        assert not getattr(x, name).is_contiguous()
    *got, _ = on_all_ranks(plan, x)
    assert largest_error(got, expected) == 0.0


@pytest.mark.parametrize("kind", SHARDINGS)
def test_changing_one_token_leaves_other_documents_bitwise_alone(kind):
    lengths = padded([9, 30, 1, 17, 6], 4)
    plan = shard(lengths, 4, kind)
    x = random_tensors(plan.tokens)
    before = on_all_ranks(plan, x)
    token = 9 + 4  # the fifth of the second document
    for tensor in (x.q, x.k, x.v):
        tensor[token] += 1.0
    after = on_all_ranks(plan, x)
    others = np.r_[0:9, 39 : plan.tokens]
    for a, b in zip(before[:4], after[:4], strict=True):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[9:39], b[9:39])
    assert torch.equal(before[0][9:token], after[0][9:token]), "earlier tokens must not see later ones"


@pytest.mark.parametrize("pad_value", [200.0, -200.0])
def test_what_stands_in_the_padding_changes_nothing(pad_value):
    lengths = padded([7, 8, 4], 8)
    plan = shard(lengths, 4, "per-document")
    x = random_tensors(plan.tokens)
    expected = on_all_ranks(plan, x)
    for tensor in (x.q, x.k, x.v):
        tensor[19:] = pad_value
    got = on_all_ranks(plan, x)
    assert all(torch.equal(a[:19], b[:19]) for a, b in zip(got[:4], expected[:4], strict=True))


def test_error_in_bf16_hardly_grows_with_context_parallelism():
    """Parts are merged in fp32 and rounded once more; the error at CP=8 stays near that of CP=1."""
    lengths = [400, 112]
    exact = one_document_at_a_time(lengths, random_tensors(512, dim=16))
    errors = {}
    for cp in (1, 2, 4, 8):
        rounded = random_tensors(512, dim=16, dtype=torch.bfloat16)
        *got, _ = on_all_ranks(shard(lengths, cp, "per-document"), rounded)
        errors[cp] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True))
    assert errors[8] < 1.5 * errors[1], errors
    assert 1e-4 < errors[1] < 1e-2, errors


def test_rows_travel_only_to_ranks_that_need_their_keys_with_a_window_those_inside_it():
    x = random_tensors(32)
    whole = ShardPlan(np.array([16, 16]), (np.array([[0, 0, 16]]), np.array([[1, 0, 16]])))
    assert on_all_ranks(whole, x)[-1] == 0
    # One document on two ranks: rank 0 holds [0, 8) and [24, 32), whose keys [8, 24) rank 1 sends; rank 1
    # holds [8, 24), which sees only keys [0, 8) of rank 0. Their gradients come back: twice 24 rows.
    plan = shard([32], 2, "per-document")
    assert on_all_ranks(plan, x)[-1] == 2 * 24
    plan = shard([64], 2, "per-document")  # rank 0 holds [0, 16) and [48, 64), rank 1 [16, 48)
    x = random_tensors(64)
    # Rank 0's second segment needs 3 keys of rank 1, rank 1's 3 of rank 0; their gradients come back.
    assert on_all_ranks(plan, x, window=3)[-1] == 2 * (3 + 3)
    assert on_all_ranks(plan, x)[-1] == 2 * (32 + 16)


def test_every_row_of_every_buffer_is_written():
    """With uninitialised memory full of NaN, nothing of it is left, padding included."""
    plan = shard(padded([3, 8, 1, 30], 16), 4, "per-document")
    x = random_tensors(plan.tokens)
    expected = on_all_ranks(plan, x)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = on_all_ranks(plan, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


def test_gradients_travel_under_the_diagonals_only_where_ranks_are_in_step(monkeypatch):
    # One document, CP=4: ranks 0 to 2 have rectangles of 7 chunks squared, rank 3, whose two chunks touch, of 6.
    # They differ by 64 x 64 pairs where 7 x 64 keys travel, or by 32,768 x 32,768 where 7 x 32,768 do.
    for chunk, hides in ((64, True), (32768, False)):
        plan = shard([8 * chunk], 4, "per-document")
        assert [attention_layout(plan, rank).hide_return for rank in range(4)] == [hides] * 4
    plan = shard([8 * 64], 4, "per-document")
    assert_exact(plan)
    monkeypatch.setattr("wlb_megatron.sharding.attention_calls.PAIRS_WORTH_A_KEY", 0)
    assert not attention_layout(plan, 0).hide_return
    assert_exact(plan)
    # Whole documents: nothing to wait for.
    plan = ShardPlan(np.array([16, 16]), (np.array([[0, 0, 16]]), np.array([[1, 0, 16]])))
    assert attention_layout(plan, 0).hide_return


def test_a_rank_without_tokens_takes_part_and_one_may_hold_three_segments_of_a_document():
    none = np.empty((0, 3), np.int64)
    assert_exact(ShardPlan(np.array([6]), (np.array([[0, 0, 2], [0, 4, 6]]), none, np.array([[0, 2, 4]]))))
    # Rank 0 holds [0, 3) [6, 9) [12, 20) of one document, out of order, and rank 1 the rest.
    first, second = [[0, 12, 20], [0, 0, 3], [1, 0, 2], [0, 6, 9]], [[0, 3, 6], [1, 2, 5], [0, 9, 12]]
    assert_exact(ShardPlan(np.array([20, 5]), (np.array(first), np.array(second))))


# --- sliding windows, sinks, values narrower than keys ---


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


def test_a_sink_of_zero_is_off_by_one_softmax_a_low_one_changes_nothing_and_a_high_one_leaves_nothing():
    """exp(x) / (1 + sum of exp(x)): a document of one token of score 0 gets half of its value."""
    x = random_tensors(2, heads=1, kv_heads=1)
    x.q.zero_()
    out, *_ = on_all_ranks(shard([1, 1], 1, "per-document"), x, sink=torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(out, x.v / 2)
    plan, x = shard([12, 5, 7], 2, "hybrid"), random_tensors(24)
    plain, *_ = on_all_ranks(plan, x)
    low, *_ = on_all_ranks(plan, x, sink=torch.full((4,), -80.0, dtype=torch.float64))
    high, *_ = on_all_ranks(plan, x, sink=torch.full((4,), 80.0, dtype=torch.float64))
    assert torch.equal(low, plain)
    assert high.abs().max() < 1e-20


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


@pytest.mark.parametrize("v_dim", [6, 4])
@pytest.mark.parametrize("takes", [True, False])
def test_tensors_as_megatron_has_them_give_the_same_bitwise(v_dim, takes, monkeypatch):
    """[t, 1, heads, dim] in and [t, 1, heads * v dim] out, with values that the kernels take or that are padded."""
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


def test_data_of_another_plan_wide_values_and_windows_without_a_layout_are_refused():
    layout = device_layout(attention_layout(shard([8], 1, "per-document"), 0), "cpu")
    for tokens, shape, options, says in (
        (9, {}, {}, "do not belong together"),
        (8, {"v_dim": 6}, {}, "must have one head dim"),
        (8, {}, {"windowed": True}, "needs a layout with a window"),
    ):
        x = random_tensors(tokens, **shape)
        with pytest.raises(ValueError, match=says):
            rest = layout, Member(ThreadGroup(1), 0), TorchKernels(), 1.0, LayerSettings(**options)
            sharded_attention(x.q, x.k, x.v, *rest)


# --- the exchange across real processes: gloo, fp32 and fp64, two and four ranks ---

LENGTHS = [1, 37, 2, 15, 80, 3, 3, 9]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def compare(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    compare_in(pairs[rank // 2])
    compare_in(dist.group.WORLD)
    dist.destroy_process_group()


def compare_in(group):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    lengths = padded(LENGTHS, world)
    for dtype, tolerance in TOLERANCE.items():
        x = random_tensors(int(lengths.sum()), dtype=dtype)
        expected = one_document_at_a_time(lengths, random_tensors(int(lengths.sum())))
        for kind in SHARDINGS:
            plan = replace(shard(lengths, world, kind), one_call=dtype is torch.float32)
            index = torch.from_numpy(plan.packed_index(rank))
            for keep_keys in (True, False):
                layout = device_layout(attention_layout(plan, rank), "cpu")
                q, k, v = (t[index].requires_grad_() for t in (x.q, x.k, x.v))
                out = sharded_attention(
                    q, k, v, layout, group, TorchKernels(), SCALE, LayerSettings(keep_keys)
                )
                got = out, *torch.autograd.grad(out, (q, k, v), x.dout[index])
                for a, b in zip(got, expected, strict=True):
                    error = (a.double() - b[index]).norm() / b[index].norm()
                    assert error < tolerance, (dtype, kind, keep_keys, float(error))


def test_two_and_four_real_processes_get_what_one_document_at_a_time_gives():
    spawn(compare, (free_port(),), 4)
