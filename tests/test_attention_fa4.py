"""What FlashAttention-4's two functions are asked for; a stand-in checks it as they do and computes as documented."""

import inspect
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from threading import get_ident
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attention_oracle import (
    SCALE,
    any_plans,
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
from hypothesis import given, settings

from wlb_megatron.attention import sharded_attention
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard

NAME = "flash_attn.cute.interface"
TILES = SimpleNamespace(m_block_size=8, n_block_size=16, dKV_swapAB=False)


class Asked:
    """Stands for flash_attn.cute.interface: functions that launch compiled kernels. Keeps what kernels are given."""

    def __init__(self):
        self.calls, self.functions, self.module_functions = [], 0, ()
        self.rounded = defaultdict(list)  # by thread, since each rank is one
        self.launched = []

    def forward(self, q, k, v, *, softmax_scale, causal, window_size_left, return_lse, **sizes):
        assert return_lse
        self.functions += 1
        self._check(q, k, v, **sizes)
        out = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
        lse = q.new_full((q.shape[1], len(q)), float("nan"))
        ends = sizes["cu_seqlens_q"], sizes["cu_seqlens_k"]
        kernel = partial(self._attend, causal, window_size_left)
        rest = None, None, None, window_size_left, None, None, None, "aux", None, None
        one_tile = sizes["max_seqlen_q"] * (q.shape[1] // k.shape[1]) <= 192
        choice = *self._choice(causal, window_size_left, q, k, v), one_tile
        self._launch(0, choice, kernel, q.detach(), k, v, out, lse, softmax_scale, *ends, *rest)
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
        deterministic,
        dk,
        dv,
        **sizes,
    ):
        self.functions += 1
        self._check(q, k, v, **sizes)
        assert out.shape == dout.shape == (*q.shape[:2], v.shape[-1])
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        assert dk.shape == k.shape and dv.shape == v.shape
        cu_q, cu_k = sizes["cu_seqlens_q"], sizes["cu_seqlens_k"]
        rows, keys = self._room(q, cu_q, 8), self._room(k, cu_k, 16)
        dim, v_dim = (max(32, -(-x.shape[-1] // 32) * 32) for x in (q, v))
        dq, grouped = torch.full_like(q, float("nan")), q.shape[1] > k.shape[1]
        dpsum, weights = q.new_empty(2, q.shape[1], rows)
        sums = [q.new_empty(q.shape[1], rows * dim), dk, dv]
        if grouped:
            sums[1:] = (k.new_zeros(k.shape[1], keys * channels) for channels in (dim, v_dim))
        choice = *self._choice(causal, window_size_left, q, k, v), 0 in dout.stride()
        rest = *[None] * 4, 1.0, None, None
        self._launch(
            1, (q.dtype, dim, v_dim), self._prepare, out, dout, dpsum, lse, weights, sums[0], cu_q, *rest
        )
        semaphore = "semaphore" if deterministic else None
        inputs = q.detach(), k, v, dout, weights, dpsum, *sums, softmax_scale, cu_q, cu_k
        rest = None, None, window_size_left, None, semaphore, None, None, "aux", None, None
        kernel = partial(self._pull, causal, window_size_left)
        one_tile = sizes["max_seqlen_q"] <= 128, sizes["max_seqlen_k"] <= 128
        self._launch(2, (*choice, deterministic, one_tile), kernel, *inputs, *rest)
        results = (dq, softmax_scale, cu_q, 8), (dk, softmax_scale, cu_k, 16), (dv, 1.0, cu_k, 16)
        for total, (gradient, scale, bounds, tile) in zip(sums, results[: 3 if grouped else 1], strict=False):
            kernel = partial(self._round, tile)
            self._launch(3, (tile, q.dtype), kernel, total, gradient, scale, bounds, *[None] * 3)
        return dq, dk, dv

    def _launch(self, cache, key, kernel, *arguments):
        """As flash-attn does: by way of the cache that its function has at the moment."""
        compiled = self.module_functions[cache].compile_cache
        if key not in compiled:
            compiled[key] = partial(self._run, (cache, key), kernel)
        compiled[key](*arguments)

    def _run(self, name, kernel, *arguments):
        self.launched.append(name)
        kernel(*arguments)

    @staticmethod
    def _choice(causal, left, q, k, v):
        """What flash-attn compiles kernels by, and the value of the window, by which this stand-in's compute."""
        dims = q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
        return causal, left, q.dtype, *dims, *(0 in x.stride() for x in (q, k, v))

    def _attend(self, causal, left, q, k, v, out, lse, scale, cu_q, cu_k, *rest):
        assert rest == (None, None, None, left, None, None, None, "aux", None, None)
        assert not q.requires_grad
        self.calls.append({"q": q, "k": k, "v": v, "causal": causal, "window": left})
        for rows, _, _, values, scores in self._each(q, k, v, cu_q, cu_k, scale, causal, left):
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    def _prepare(self, out, dout, dpsum, lse, weights, dq_sum, cu_q, *rest):
        assert rest == (None, None, None, None, 1.0, None, None)
        dq_sum.zero_()
        for rows, place in self._places(cu_q, 8):
            dpsum[:, place] = (out * dout).sum(-1)[rows].T
            weights[:, place] = lse[:, rows]

    def _pull(self, causal, left, q, k, v, dout, weights, dpsum, dq, dk, dv, scale, cu_q, cu_k, *rest):
        assert rest[:4] == (None, None, left, None) and rest[5:] == (None, None, "aux", None, None)
        assert not q.requires_grad
        self.deterministic = rest[4] is not None
        if dk is not k and dk.shape == k.shape:
            self.calls.append({"dk": dk, "dv": dv, "deterministic": self.deterministic})
        queries, keys = self._places(cu_q, 8), self._places(cu_k, 16)
        each = self._each(q, k, v, cu_q, cu_k, scale, causal, left)
        for (_, place), (_, spot), (rows, seen, key, values, scores) in zip(queries, keys, each, strict=True):
            sums = weights[:, place], dpsum[:, place]
            q_grad, *kv_grads = sequence_gradients(
                scores, *sums, q[rows], key, values, dout[rows], k.shape[1]
            )
            self._padded(dq, q.shape[1], dpsum.shape[1])[:, place, : q.shape[-1]] += q_grad.transpose(0, 1)
            for total, grad in zip((dk, dv), kv_grads, strict=True):
                if total.dim() == 3:
                    total[seen] = grad * (scale if total is dk else 1)
                else:
                    padded = self._padded(total, k.shape[1], self._room(k, cu_k, 16))
                    padded[:, spot, : grad.shape[-1]] += grad.transpose(0, 1)

    def _round(self, tile, total, gradient, scale, bounds, *rest):
        assert rest == (None, None, None)
        padded = self._padded(total, gradient.shape[1], self._room(gradient, bounds, tile))
        for rows, place in self._places(bounds, tile):
            rounded = (padded[:, place, : gradient.shape[-1]] * scale).to(gradient.dtype)
            gradient[rows] = rounded.transpose(0, 1)
        rounded = self.rounded[get_ident()]
        if tile == 16:
            rounded.append(gradient)
        if len(rounded) == 2:
            dk, dv = rounded
            self.calls.append({"dk": dk, "dv": dv, "deterministic": self.deterministic})
            rounded.clear()

    @staticmethod
    def _room(x, bounds, tile):
        """Rows of a buffer for x in which each sequence begins at a multiple of the tile."""
        return (len(x) + len(bounds) * tile - 1) // tile * tile

    @staticmethod
    def _padded(total, heads, room):
        assert total.shape[0] == heads and total.is_contiguous()
        return total.view(heads, room, -1 if room else 0)

    @staticmethod
    def _places(bounds, tile):
        """A sequence's rows, and those where it is in a buffer: it begins at a multiple of the tile."""
        found = []
        for number, (begin, end) in enumerate(pairwise(bounds.tolist())):
            start = (begin + number * tile) // tile * tile
            found.append((slice(begin, end), slice(start, start + end - begin)))
        return found

    @staticmethod
    def _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        """What interface.py asserts, and what its kernels take for granted: strides of whole 16 bytes."""
        for x in (q, k, v):
            assert x.stride(-1) == 1 and not x.data_ptr() % 16
            assert not any(stride * x.element_size() % 16 for stride in x.stride()[:-1]), x.stride()
        assert k.shape == (*v.shape[:-1], q.shape[-1]) and q.shape[1] % k.shape[1] == 0
        sides = (cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)
        for bounds, rows, longest in sides:
            assert bounds.dtype == torch.int32 and bounds.is_contiguous()
            assert bounds[-1] == len(rows), "no rows to spare"
            assert isinstance(longest, int) and all(longest >= size for size in bounds.diff().tolist())

    @staticmethod
    def _each(q, k, v, cu_q, cu_k, scale, causal, left):
        """The mask is bottom-right: query i of n sees keys up to m - n + i of m, with a window the last left + 1."""

        def seen(n, m):
            far = torch.arange(n)[:, None] + m - n - torch.arange(m)
            shown = (far >= 0) if causal else torch.ones_like(far, dtype=torch.bool)
            return shown if left is None else shown & (far <= left)

        queries, keys = ([slice(*ends) for ends in pairwise(cu.tolist())] for cu in (cu_q, cu_k))
        return each_sequence(q, k, v, zip(queries, keys, strict=True), scale, seen)


@pytest.fixture(scope="module")
def asked():
    """The backend imported over the stand-in."""
    stand_in, patch = Asked(), pytest.MonkeyPatch()
    module = ModuleType(NAME)
    module._tile_size_bwd_sm90, module.BIN_BATCH_SEARCH_THRESH = lambda *_: TILES, 4
    functions = {
        "_flash_attn_fwd": partial(stand_in.forward),
        "_bwd_preprocess": lambda: None,
        "_flash_attn_bwd": partial(stand_in.backward),
        "_bwd_postprocess_convert": lambda: None,
    }
    stand_in.module_functions = tuple(functions.values())
    for name, function in functions.items():
        function.compile_cache = {}
        setattr(module, name, function)
    stand_in.backend = import_over(patch, module, "fa4_backend")
    yield stand_in
    sys.modules.pop(stand_in.backend.__name__, None)
    patch.undo()


PLAN = shard(padded([9, 30], 2), 2, "per-document")


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
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    attend(asked, PLAN, random_tensors(PLAN.tokens), window=window, sink=sink)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_heads_are_grouped_as_they_come(asked, heads, kv_heads):
    attend(asked, PLAN, random_tensors(PLAN.tokens, heads=heads, kv_heads=kv_heads))


def test_keys_values_and_their_gradients_are_halves_of_one_buffer(asked):
    for call in attend(asked, PLAN, random_tensors(PLAN.tokens)):
        first, second = (call["k"], call["v"]) if "k" in call else (call["dk"], call["dv"])
        assert second.data_ptr() - first.data_ptr() == first[0].numel() * first.element_size()
        assert first.stride(0) == 2 * first[0].numel()


def test_keys_that_stay_on_their_rank_are_copied_only_if_they_are_views(asked):
    """Nor are their gradients. Saved views would keep all projections in memory."""
    layout = device_layout(attention_layout(shard([9, 30], 1, "per-document"), 0), "cpu")
    x, results = random_tensors(39), []
    pairs = torch.stack((x.k, x.v), 2)
    for k, v, same in ((x.k, x.v, True), (x.k, pairs[:, :, 1], False)):
        asked.calls.clear()
        leaves = [y.detach().requires_grad_() for y in (x.q, k, v)]
        kernels = asked.backend.FlashAttention4Kernels()
        out = sharded_attention.sharded_attention(*leaves, layout, None, kernels, SCALE)
        results.append([out, *torch.autograd.grad(out, leaves, x.dout)])
        ahead, back = asked.calls
        places = [
            (ahead["k"], k),
            (ahead["v"], v),
            (back["dk"], results[-1][2]),
            (back["dv"], results[-1][3]),
        ]
        assert [a.data_ptr() == b.data_ptr() for a, b in places] == [same] * 4
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))


@pytest.mark.parametrize(("dim", "v_dim", "channels"), [(192, 128, 128), (24, 16, 24), (16, 16, 16)])
def test_narrow_values_are_given_as_they_are_where_tried_and_else_padded(asked, dim, v_dim, channels):
    x = random_tensors(PLAN.tokens, heads=2, kv_heads=2, dim=dim, v_dim=v_dim)
    assert {call["v"].shape[-1] for call in attend(asked, PLAN, x) if "v" in call} == {channels}


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_mode_reaches_every_backward(asked, deterministic):
    calls = attend(asked, PLAN, random_tensors(PLAN.tokens), deterministic)
    assert {call["deterministic"] for call in calls if "dk" in call} == {deterministic}


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "deterministic", "functions"),
    [([9, 30], 2, False, 2), ([9, 30], 4, False, 2), ([9, 30], 2, True, 4), ([8, 2, 3, 4, 9], 2, False, 6)],
)
def test_only_the_first_call_of_a_kind_goes_through_the_functions(
    asked, lengths, kv_heads, deterministic, functions
):
    """The backward of deterministic mode always does, and so do calls of more sequences than the limit, here 4."""
    call = whole_call(lengths)
    kernels, results = asked.backend.FlashAttention4Kernels(deterministic), []
    x = random_tensors(sum(lengths), heads=4, kv_heads=kv_heads)
    before = asked.functions
    for _ in range(3):
        kv = torch.stack((x.k, x.v), 1)
        out, lse = kernels.forward(call, x.q, kv, SCALE)
        results.append([out, lse, *kernels.backward(call, x.q, kv, out, lse, x.dout, SCALE)])
    assert asked.functions - before == functions
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def each_kind_of_call():
    """Calls that choose different kernels, of sizes that must not matter, with heads, key heads and channels."""
    heads = (4, 2), (4, 4), (2, 2), (4, 1)
    shapes = *((*pair, 16, 16) for pair in heads), (4, 2, 32, 32), (2, 2, 192, 128)
    for lengths, window in product(([9, 30], [1, 1, 1], [300, 4], [560]), (None, 0, 3)):
        plan = shard(padded(lengths, 2), 2, "per-document")
        layout = device_layout(attention_layout(plan, 0, window), "cpu")
        calls = [layout.window.call] if window is not None else [layout.diagonals, layout.rectangles]
        yield from product(filter(None, calls), shapes, (torch.float64, torch.float32))


def launched(asked, kernels, call, q, kv, dout):
    """Names of the kernels that a forward and a backward launch, and their results."""
    asked.launched.clear()
    out, lse = kernels.forward(call, q, kv, SCALE)
    results = out, *kernels.backward(call, q, kv, out, lse, dout, SCALE)
    return list(asked.launched), results


def test_a_noted_kernel_is_launched_only_where_its_function_would_choose_it(asked):
    noting, direct = asked.backend.FlashAttention4Kernels(), 0
    for call, (heads, kv_heads, dim, v_dim), dtype in each_kind_of_call():
        kv_shape = (2, kv_heads, dim) if dim == v_dim else (kv_heads, dim + v_dim)
        q = torch.randn(call.q_rows, heads, dim, dtype=dtype)
        kv = torch.randn(call.kv_rows, *kv_shape, dtype=dtype)
        dout = torch.randn(call.q_rows, heads, v_dim, dtype=dtype)
        names, results = launched(asked, asked.backend.FlashAttention4Kernels(), call, q, kv, dout)
        before = asked.functions
        again, same = launched(asked, noting, call, q, kv, dout)
        direct += asked.functions == before
        assert again == names
        assert all(torch.equal(a, b) for a, b in zip(results, same, strict=True))
    assert direct > 90


def test_tensors_that_functions_would_copy_or_compile_for_go_through_them(asked):
    """Addresses between multiples of 16 bytes, which the stand-in refuses, and a single row with a stride of 0."""
    kernels, x = asked.backend.FlashAttention4Kernels(), random_tensors(9)
    call, single = whole_call([9]), whole_call([1])
    kv = torch.stack((x.k, x.v), 1)
    before = asked.functions
    for _ in range(2):
        launched(asked, kernels, call, x.q, kv, x.dout)
        launched(asked, kernels, single, x.q[:1], kv[:1], x.dout[:1])
    assert asked.functions - before == 2
    out, lse = kernels.forward(call, x.q, kv, SCALE)
    odd = torch.empty(x.q.numel() + 1, dtype=x.q.dtype)[1:].view_as(x.q).copy_(x.q)
    with pytest.raises(AssertionError):
        kernels.forward(call, odd, kv, SCALE)
    kernels.backward(call, x.q, kv, out, lse, odd, SCALE)
    kernels.forward(single, x.q.as_strided((1, *x.q.shape[1:]), (0, *x.q.stride()[1:])), kv[:1], SCALE)
    assert asked.functions - before == 5


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
    attend(asked, PLAN, random_tensors(PLAN.tokens), sink=torch.zeros(4, dtype=torch.float64))


def test_lengths_are_told_long_enough_for_one_kernel_to_serve_all(asked, monkeypatch):
    calls = []
    noted = lambda q, k, v, **arguments: calls.append(arguments) or (q, q[..., 0])  # noqa: E731
    noted.compile_cache = {}
    monkeypatch.setattr(asked.backend.interface, "_flash_attn_fwd", noted)
    kernels = asked.backend.FlashAttention4Kernels()
    for tokens in (1, 600):
        x = random_tensors(tokens)
        kernels.forward(whole_call([tokens]), x.q, torch.stack((x.k, x.v), 1), SCALE)
    longest = [(arguments["max_seqlen_q"], arguments["max_seqlen_k"]) for arguments in calls]
    assert longest == [(512, 512), (600, 600)]


def test_the_installed_package_takes_what_the_stand_in_takes(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)  # the stand-in, which `asked` leaves for the whole file
    real = pytest.importorskip(NAME)
    for name, stand_in in (("_flash_attn_fwd", Asked.forward), ("_flash_attn_bwd", Asked.backward)):
        ours, sizes, theirs = (
            inspect.signature(function).parameters.keys()
            for function in (stand_in, Asked._check, getattr(real, name))
        )
        assert (ours | sizes) - {"self", "sizes"} <= theirs, name
