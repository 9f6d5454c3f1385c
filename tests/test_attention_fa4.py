"""What FlashAttention-4's two functions are asked for; a stand-in checks it as they do and computes as documented."""

import importlib
import inspect
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from attention_oracle import (
    SCALE,
    any_plans,
    largest_error,
    on_all_ranks,
    one_document_at_a_time,
    padded,
    random_tensors,
)
from hypothesis import given, settings

from wlb_megatron.attention import sharded_attention
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard

NAME = "flash_attn.cute.interface"


class Asked:
    """Stands for flash_attn.cute.interface; keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def forward(
        self,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size_left,
        return_lse,
    ):
        assert return_lse
        self._check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        self.calls.append({"q": q, "k": k, "v": v, "causal": causal, "window": window_size_left})
        out = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
        lse = q.new_full((q.shape[1], len(q)), float("nan"))
        for rows, _, _, values, scores, _ in self._each(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left
        ):
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, lse, None, None, None

    def backward(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        *,
        softmax_scale,
        causal,
        window_size_left,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
        dk,
        dv,
    ):
        self._check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert out.shape == dout.shape == (*q.shape[:2], v.shape[-1])
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert dk.shape == k.shape and dv.shape == v.shape
        self.calls.append({"dk": dk, "dv": dv, "deterministic": deterministic})
        dq = torch.full_like(q, float("nan"))
        delta = (out * dout).sum(-1)
        for rows, keys, key, values, scores, repeat in self._each(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left
        ):
            probs = torch.exp(scores - lse[:, rows, None])
            dscores = torch.einsum("qhd,khd->hqk", dout[rows], values) - delta[rows].T[..., None]
            dscores = dscores * probs * softmax_scale
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, key)
            for whole, grad in (
                (dk, torch.einsum("hqk,qhd->khd", dscores, q[rows])),
                (dv, torch.einsum("hqk,qhd->khd", probs, dout[rows])),
            ):
                whole[keys] = grad.unflatten(1, (-1, repeat)).sum(2)
        return dq, dk, dv

    @staticmethod
    def _check(q, k, v, cu_q, cu_k, max_q, max_k):
        """What interface.py asserts, and what its kernels take for granted: strides of whole 16 bytes."""
        for x in (q, k, v):
            assert x.stride(-1) == 1 and not x.data_ptr() % 16
            assert not any(stride * x.element_size() % 16 for stride in x.stride()[:-1]), x.stride()
        assert k.shape == (*v.shape[:-1], q.shape[-1]) and q.shape[1] % k.shape[1] == 0
        for bounds, rows, longest in ((cu_q, q, max_q), (cu_k, k, max_k)):
            assert bounds.dtype == torch.int32 and bounds.is_contiguous()
            assert bounds[-1] == len(rows), "no rows to spare"
            assert isinstance(longest, int) and all(longest >= size for size in bounds.diff().tolist())

    @staticmethod
    def _each(q, k, v, cu_q, cu_k, scale, causal, left):
        """The mask is bottom-right: query i of n sees keys up to m - n + i of m, with a window the last left + 1."""
        repeat = q.shape[1] // k.shape[1]
        for at in range(len(cu_q) - 1):
            rows, keys = slice(int(cu_q[at]), int(cu_q[at + 1])), slice(int(cu_k[at]), int(cu_k[at + 1]))
            n, m = rows.stop - rows.start, keys.stop - keys.start
            far = torch.arange(n)[:, None] + m - n - torch.arange(m)
            shown = (far >= 0) if causal else torch.ones_like(far, dtype=torch.bool)
            if left is not None:
                shown &= far <= left
            key, values = (x[keys].repeat_interleave(repeat, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], key) * scale
            yield rows, keys, key, values, scores.masked_fill(~shown, float("-inf")), repeat


@pytest.fixture(scope="module")
def asked():
    """The backend imported over the stand-in."""
    stand_in, patch = Asked(), pytest.MonkeyPatch()
    module = ModuleType(NAME)
    module._flash_attn_fwd, module._flash_attn_bwd = stand_in.forward, stand_in.backward
    parts = NAME.split(".")
    for depth in range(1, len(parts)):
        patch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    patch.setitem(sys.modules, NAME, module)
    patch.delitem(sys.modules, "wlb_megatron.attention.kernels.fa4_backend", raising=False)
    stand_in.backend = importlib.import_module("wlb_megatron.attention.kernels.fa4_backend")
    yield stand_in
    sys.modules.pop("wlb_megatron.attention.kernels.fa4_backend", None)
    patch.undo()


def attend(asked, plan, x, deterministic=False, **way):
    asked.calls.clear()
    kernels = asked.backend.FlashAttention4Kernels(deterministic)
    *got, _ = on_all_ranks(plan, x, kernels=kernels, **way)
    way.pop("keep_keys", None)
    assert largest_error(got, one_document_at_a_time(plan.lengths, x, **way)) < 1e-10
    return asked.calls


@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_masks_windows_and_merged_gradients_are_those_of_the_oracle(asked, cp, one_call, window):
    plan = replace(shard(padded([9, 1, 20, 2, 33], cp), cp, "per-document"), one_call=one_call)
    attend(asked, plan, random_tensors(plan.tokens), window=window)


@pytest.mark.parametrize("one_call", [False, True])
@settings(max_examples=25, deadline=None)
@given(plan=any_plans())
def test_any_plan_is_attended_exactly(asked, one_call, plan):
    attend(asked, replace(plan, one_call=one_call), random_tensors(plan.tokens), keep_keys=one_call)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_share_of_the_merged_log_sum_exp(asked, window):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    attend(asked, plan, random_tensors(plan.tokens), window=window, sink=sink)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_heads_are_grouped_as_they_come(asked, heads, kv_heads):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    attend(asked, plan, random_tensors(plan.tokens, heads=heads, kv_heads=kv_heads))


def test_keys_values_and_their_gradients_are_halves_of_one_buffer(asked):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    for call in attend(asked, plan, random_tensors(plan.tokens)):
        first, second = (call["k"], call["v"]) if "k" in call else (call["dk"], call["dv"])
        assert second.data_ptr() - first.data_ptr() == first[0].numel() * first.element_size()
        assert first.stride(0) == 2 * first[0].numel()


@pytest.mark.parametrize(("dim", "v_dim", "channels"), [(192, 128, 128), (24, 16, 24), (16, 16, 16)])
def test_narrow_values_are_given_as_they_are_where_tried_and_else_padded(asked, dim, v_dim, channels):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    x = random_tensors(plan.tokens, heads=2, kv_heads=2, dim=dim, v_dim=v_dim)
    assert {call["v"].shape[-1] for call in attend(asked, plan, x) if "v" in call} == {channels}


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_reaches_every_backward(asked, deterministic):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    calls = attend(asked, plan, random_tensors(plan.tokens), deterministic)
    assert {call["deterministic"] for call in calls if "dk" in call} == {deterministic}


def test_one_call_serves_segments_of_whole_and_of_cut_documents(asked):
    plan = replace(shard(padded([9, 1, 40], 2), 2, "hybrid"), one_call=True)
    calls = attend(asked, plan, random_tensors(plan.tokens))
    assert len(calls) == 4 and all(call["causal"] for call in calls if "causal" in call)


def test_rows_are_merged_from_contiguous_ones_as_the_gpu_wants_them(asked, monkeypatch):
    """FlashAttention-4 gives the log-sum-exp by heads."""
    merge, spread = sharded_attention.merge_rows, sharded_attention.spread_four

    def merge_rows(*tensors):
        assert all(x.is_contiguous() for x in tensors[:4])
        merge(*tensors)

    def spread_four(sources, *rest):
        assert all(x.is_contiguous() for x in sources)
        return spread(sources, *rest)

    monkeypatch.setattr(sharded_attention, "merge_rows", merge_rows)
    monkeypatch.setattr(sharded_attention, "spread_four", spread_four)
    plan = shard(padded([9, 30], 2), 2, "per-document")
    attend(asked, plan, random_tensors(plan.tokens), sink=torch.zeros(4, dtype=torch.float64))


def test_lengths_are_told_long_enough_for_one_kernel_to_serve_all(asked, monkeypatch):
    calls = []
    monkeypatch.setattr(
        asked.backend,
        "_flash_attn_fwd",
        lambda q, k, v, **arguments: calls.append(arguments) or (q, q[..., 0]),
    )
    for tokens in (1, 600):
        call = device_layout(attention_layout(shard([tokens], 1, "per-document"), 0), "cpu").diagonals
        x = random_tensors(tokens)
        asked.backend.FlashAttention4Kernels().forward(call, x.q, torch.stack((x.k, x.v), 1), SCALE)
    assert [arguments["max_seqlen_q"] for arguments in calls] == [
        arguments["max_seqlen_k"] for arguments in calls
    ]
    assert [arguments["max_seqlen_q"] for arguments in calls] == [512, 600]


def test_the_installed_package_takes_what_the_stand_in_takes():
    real = pytest.importorskip(NAME)
    for name, stand_in in (("_flash_attn_fwd", Asked.forward), ("_flash_attn_bwd", Asked.backward)):
        ours = [parameter for parameter in inspect.signature(stand_in).parameters if parameter != "self"]
        assert set(ours) <= set(inspect.signature(getattr(real, name)).parameters), name
