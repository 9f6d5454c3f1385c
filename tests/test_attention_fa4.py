"""What FlashAttention-4's two functions are asked for; a stand-in checks it as they do and computes as documented."""

import importlib
import inspect
import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

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
OURS = [f"wlb_megatron.attention.kernels.{name}" for name in ("fa4_backend", "fa4_launches")]
MANY = 6
"""Sequences above which the stand-in's functions do not launch what they launch below."""


class AuxData(NamedTuple):
    tensors: None
    scalars: None


class Asked:
    """Stands for flash_attn.cute.interface: functions that launch compiled kernels. Keeps what these were asked.

    It compiles a kernel for a mask, as the real one does, and like it takes tensors of its own for sums in between.
    """

    def __init__(self):
        self.calls, self.told = [], []
        names = "_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert"
        functions = self.forward, self.backward, self.forward, self.forward
        self.module = ModuleType(NAME)
        for name, function in zip(names, functions, strict=True):
            setattr(self.module, name, partial(function))
            getattr(self.module, name).compile_cache = {}
        self.module.BIN_BATCH_SEARCH_THRESH = MANY
        self.module.AuxData = AuxData
        self.module._tile_size_bwd_sm90 = lambda dim, *_: SimpleNamespace(
            m_block_size=8, n_block_size=16, dKV_swapAB=dim > 16
        )

    def _launch(self, function, kernel, given, *key):
        kernels = getattr(self.module, function).compile_cache
        key = kernel.__name__, *key
        if key not in kernels:
            kernels[key] = partial(kernel, *key[1:])
        kernels[key](*given)

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
        self.told.append("forward")
        self._check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
        lse = q.new_full((q.shape[1], len(q)), float("nan"))
        bounds = cu_seqlens_q, cu_seqlens_k, None, None, None, *self._window(causal, window_size_left)
        given = q, k, v, out, lse, softmax_scale, *bounds, None, None, AuxData(None, None), None, None
        if len(q) and len(k):
            self._launch("_flash_attn_fwd", self._attend, given, causal)
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
        dq,
        dk,
        dv,
    ):
        self.told.append("backward")
        self._check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert out.shape == dout.shape == (*q.shape[:2], v.shape[-1])
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
        (rows, heads, dim), keys, sequences = q.shape, len(k), len(cu_seqlens_q) - 1
        step = 64 if dim > 16 else 32
        width = (dim + step - 1) // step * step
        padded = (rows + (sequences + 1) * 8 - 1) // 8 * 8
        delta, lse_log2 = (lse.new_full((heads, padded), float("nan")) for _ in range(2))
        wide = [lse.new_full((heads, padded * width), float("nan")), dk, dv]
        grouped = heads != k.shape[1]
        if grouped:
            padded = (keys + (sequences + 1) * 16 - 1) // 16 * 16
            wide[1:] = (lse.new_zeros((k.shape[1], padded * width)) for _ in range(2))
        given = out, dout, delta, lse, lse_log2, wide[0], cu_seqlens_q, *[None] * 4, 1.0, None, None
        self._launch("_bwd_preprocess", self._prepare, given)
        given = q, k, v, dout, lse_log2, delta, *wide, softmax_scale, cu_seqlens_q, cu_seqlens_k, None, None
        order = torch.zeros(1) if deterministic else None
        given += (*self._window(causal, window_size_left), order, None, None, AuxData(None, None), None, None)
        self._launch("_flash_attn_bwd", self._pull, given, causal)
        for at, (narrow, scale) in enumerate(((dq, softmax_scale), (dk, softmax_scale), (dv, 1.0))):
            if at == 0 or grouped:
                given = wide[at], narrow, scale, cu_seqlens_k if at else cu_seqlens_q, None, None, None
                self._launch("_bwd_postprocess_convert", self._narrow, given)

    @staticmethod
    def _window(causal, left):
        return left, 0 if causal and left is not None else None

    def _attend(self, causal, q, k, v, out, lse, scale, cu_q, cu_k, *rest):
        self.calls.append({"q": q, "k": k, "v": v, "causal": causal, "window": rest[3]})
        for rows, _, _, values, scores, _ in self._each(q, k, v, cu_q, cu_k, scale, causal, rest[3]):
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    def _prepare(self, out, dout, delta, lse, lse_log2, wide_dq, *_):
        delta[:, : len(out)] = (out * dout).sum(-1).T
        lse_log2[:, : len(out)] = lse / math.log(2)
        wide_dq.zero_()

    def _pull(self, causal, q, k, v, dout, lse_log2, delta, *rest):
        *wide, scale, cu_q, cu_k, _, _, left, _, order = rest[:11]
        self.calls.append({"deterministic": order is not None})
        grouped = q.shape[1] != k.shape[1]
        dq, dk, dv = (
            self._rows(x, like) if grouped or like is q else x
            for x, like in zip(wide, (q, k, v), strict=True)
        )
        for rows, keys, one, values, scores, repeat in self._each(q, k, v, cu_q, cu_k, scale, causal, left):
            probs = torch.exp(scores - lse_log2[:, rows, None] * math.log(2))
            dscores = torch.einsum("qhd,khd->hqk", dout[rows], values) - delta[:, rows, None]
            dscores = dscores * probs
            dq[rows] += torch.einsum("hqk,khd->qhd", dscores, one)
            for whole, grad, factor in (
                (dk, torch.einsum("hqk,qhd->khd", dscores, q[rows]), scale),
                (dv, torch.einsum("hqk,qhd->khd", probs, dout[rows]), 1.0),
            ):
                if grouped:
                    whole[keys] += grad.unflatten(1, (-1, repeat)).sum(2)
                else:
                    whole[keys] = grad * factor

    def _narrow(self, wide, narrow, scale, *_):
        self.calls.append({"gradient": narrow})
        narrow.copy_(self._rows(wide, narrow) * scale)

    @staticmethod
    def _rows(wide, like):
        """Some of a buffer of sums by heads, as [rows, heads, dim]."""
        rows, heads, dim = like.shape
        return wide[:, : rows * dim].view(heads, rows, dim).transpose(0, 1)

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
            one, values = (x[keys].repeat_interleave(repeat, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], one) * scale
            yield rows, keys, one, values, scores.masked_fill(~shown, float("-inf")), repeat


@pytest.fixture(scope="module")
def asked():
    """The backend imported over the stand-in."""
    stand_in, patch = Asked(), pytest.MonkeyPatch()
    parts = NAME.split(".")
    for depth in range(1, len(parts)):
        patch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    patch.setitem(sys.modules, NAME, stand_in.module)
    for name in OURS:
        patch.delitem(sys.modules, name, raising=False)
    stand_in.backend, stand_in.launches = map(importlib.import_module, OURS)
    patch.setattr(stand_in.launches, "_WIDE", torch.float64)  # to compare exactly
    yield stand_in
    for name in OURS:
        sys.modules.pop(name, None)
    patch.undo()


def attend(asked, plan, x, deterministic=False, **way):
    for kept in (asked.calls, asked.told, asked.launches._known):
        kept.clear()
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
    halves = []
    for cp in (1, 2):
        plan = shard(padded([9, 30], cp), cp, "per-document")
        calls = attend(asked, plan, random_tensors(plan.tokens))
        halves += [(call["k"], call["v"]) for call in calls if "k" in call]
        if cp == 1:  # else two threads' calls take turns
            _, *gradients = [call["gradient"] for call in calls if "gradient" in call]
            halves.append(gradients)
    assert len(halves) == 6
    for first, second in halves:
        assert second.data_ptr() - first.data_ptr() == first[0].numel() * first.element_size()
        assert first.stride(0) == 2 * first[0].numel()


@pytest.mark.parametrize(("dim", "v_dim", "given"), [(192, 128, 128), (24, 16, 24), (16, 16, 16)])
def test_narrow_values_are_given_as_they_are_where_tried_and_else_padded(asked, dim, v_dim, given):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    x = random_tensors(plan.tokens, heads=2, kv_heads=2, dim=dim, v_dim=v_dim)
    assert {call["v"].shape[-1] for call in attend(asked, plan, x) if "v" in call} == {given}


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_reaches_every_backward(asked, deterministic):
    plan = shard(padded([9, 30], 2), 2, "per-document")
    calls = attend(asked, plan, random_tensors(plan.tokens), deterministic)
    assert {call["deterministic"] for call in calls if "deterministic" in call} == {deterministic}
    assert asked.told.count("backward") == 4 or not deterministic


def test_one_call_serves_segments_of_whole_and_of_cut_documents(asked):
    plan = replace(shard(padded([9, 1, 40], 2), 2, "hybrid"), one_call=True)
    calls = attend(asked, plan, random_tensors(plan.tokens))
    assert [call["causal"] for call in calls if "causal" in call] == [True, True]


def test_rows_are_merged_from_contiguous_ones_as_the_gpu_wants_them(asked, monkeypatch):
    """FlashAttention-4 gives the log-sum-exp by heads."""
    merge, spread = sharded_attention.merge_rows, sharded_attention.spread_four

    def merge_rows(*given):
        assert all(x.is_contiguous() for x in given[:4])
        merge(*given)

    def spread_four(sources, *rest):
        assert all(x.is_contiguous() for x in sources)
        return spread(sources, *rest)

    monkeypatch.setattr(sharded_attention, "merge_rows", merge_rows)
    monkeypatch.setattr(sharded_attention, "spread_four", spread_four)
    plan = shard(padded([9, 30], 2), 2, "per-document")
    attend(asked, plan, random_tensors(plan.tokens), sink=torch.zeros(4, dtype=torch.float64))


def call_of(*lengths):
    return device_layout(attention_layout(shard([*lengths], 1, "per-document"), 0), "cpu").diagonals


def test_lengths_are_told_long_enough_for_one_kernel_to_serve_all(asked, monkeypatch):
    told = []
    monkeypatch.setattr(
        asked.launches, "_flash_attn_fwd", lambda q, k, v, **given: told.append(given) or (q, q[..., 0])
    )
    monkeypatch.setattr(asked.launches, "_usual", lambda *given: False)
    for tokens in (1, 600):
        x = random_tensors(tokens)
        asked.backend.FlashAttention4Kernels().forward(
            call_of(tokens), x.q, torch.stack((x.k, x.v), 1), SCALE
        )
    assert [given["max_seqlen_q"] for given in told] == [given["max_seqlen_k"] for given in told]
    assert [given["max_seqlen_q"] for given in told] == [512, 600]


def attend_twice(asked, *lengths):
    """What the library's functions are asked for in two layers whose tokens are all different."""
    for kept in (asked.told, asked.launches._known):
        kept.clear()
    kernels = asked.backend.FlashAttention4Kernels()
    for layer, extra in enumerate((0, 5)):
        call = call_of(*lengths[:-1], lengths[-1] + extra)
        x = random_tensors(call.q_rows, seed=layer)
        given = call, x.q, torch.stack((x.k, x.v), 1)
        out, lse = kernels.forward(*given, SCALE)
        kernels.backward(*given, out, lse, x.dout, SCALE)
    return asked.told


def test_a_kinds_first_call_alone_goes_through_the_librarys_functions(asked):
    assert attend_twice(asked, 9, 30) == ["forward", "backward"]


def test_calls_of_many_sequences_go_through_the_librarys_functions(asked):
    assert attend_twice(asked, *[3] * (MANY + 1)) == ["forward", "backward"] * 2
    assert attend_twice(asked, *[3] * MANY) == ["forward", "backward"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda given: (*given[:-1], 1),
        lambda given: (*given, None),
        lambda given: (*given[:4], given[5], given[4], *given[6:]),
        lambda given: (*given[:4], given[4].new_empty(given[4].shape[0], given[4].shape[1] + 8), *given[5:]),
    ],
    ids=["another value", "one more argument", "two swapped", "a longer buffer"],
)
def test_a_library_that_launches_otherwise_goes_on_doing_so(asked, monkeypatch, changed):
    launch = Asked._launch

    def otherwise(self, function, kernel, given, *key):
        launch(self, function, lambda *_: None, changed(given) if kernel == self._pull else given, *key)

    monkeypatch.setattr(Asked, "_launch", otherwise)
    for function in ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert"):
        monkeypatch.setattr(getattr(asked.module, function), "compile_cache", {})
    assert attend_twice(asked, 9, 30) == ["forward", "backward", "backward"]


def test_the_installed_package_takes_what_the_stand_in_takes():
    real = pytest.importorskip(NAME)
    for name, stand_in in (("_flash_attn_fwd", Asked.forward), ("_flash_attn_bwd", Asked.backward)):
        ours = [one for one in inspect.signature(stand_in).parameters if one != "self"]
        assert set(ours) <= set(inspect.signature(getattr(real, name)).parameters), name
