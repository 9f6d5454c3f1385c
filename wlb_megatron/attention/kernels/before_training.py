"""What kernels need before training: which shapes share a kernel graph in Transformer Engine, which shapes a run can
meet, and calls that build the kernels and check that they compute attention.

cuDNN's attention runs from a graph that is built on first use, in about 0.1 s, and cached by its sizes. Transformer
Engine rounds the sizes of packed sequences up, so one graph serves a range of sizes (its get_max_batch_size and
get_max_tokens, version 2.20). With cuDNN 9.24 and later it no longer rounds the number of sequences of a forward, so
the backend passes rounded numbers (te_backend.py).

They are built by an empty call of each kind or size, forward and backward. The calls go through autograd, because a
step has two threads, and each keeps its own graphs: forward runs in the caller's thread; backward, and forwards under
recomputation, in autograd's. They are checked by small calls of each kind that plans make, against plain torch in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wlb_megatron.attention.kernels.row_sums import side_by_side
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import Kernels
from wlb_megatron.sharding.attention_calls import AttentionCall, AttentionLayout
from wlb_megatron.sharding.cut import MOST_KEYS, MOST_ROWS


def warm_up(
    kernels: Any,
    graphs: Iterable[Warmable],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    scale: float,
    dtype: torch.dtype,
    device: torch.device | str,
    recompute: bool = False,
) -> None:
    """Runs one call of each graph (causal, window, sizes).

    A bucket of sizes gets one token. Equal sequences are run at full size, and the kernels expect them from then on.
    Graphs are cached by what layers on this device have, too.

    Args:
        kernels: sharded_attention.Kernels that run from graphs cached by size, as cuDNN's do.
        heads: Heads of queries and of keys.
        dims: Channels of a head's queries and keys, and of its values.
        scale: The softmax's.
        recompute: The forward also runs in backward.
    """
    dim, v_dim = dims if kernels.takes(*dims) else dims[:1] * 2
    for causal, window, size in graphs:
        call = _warming_call(causal, window, size, device)
        q = torch.zeros(call.q_rows, heads[0], dim, dtype=dtype, device=device, requires_grad=True)
        k, v = (torch.zeros(call.kv_rows, heads[1], d, dtype=dtype, device=device) for d in (dim, v_dim))
        kv = side_by_side(k, v)
        if call.equal:
            kernels.expect(call, q, kv)
        out = _Once.apply(q, kv, call, kernels, scale, recompute)
        torch.autograd.grad(out, q, torch.zeros_like(out))


def _warming_call(
    causal: bool, window: int | None, size: Bucket | Equal, device: torch.device | str
) -> AttentionCall:
    count, queries, keys = size
    if isinstance(size, Equal):
        return device_call([(queries, keys)] * count, device, causal=causal, window=window, equal=size)
    sizes = [(1, 1), *[(0, 0)] * (count - 1)]
    return device_call(sizes, device, causal=causal, window=window, rows=(queries, keys))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, call: AttentionCall, kernels: Kernels, scale: float, recompute: bool
    ) -> Tensor:
        out, lse = kernels.forward(call, q, kv, scale)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.rest = call, kernels, scale, recompute
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        call, kernels, scale, recompute = ctx.rest
        if recompute:
            kernels.forward(call, q, kv, scale)
        dq, _ = kernels.backward(call, q, kv, out, lse, dout, scale)
        return dq, None, None, None, None, None


HEADS, KV_HEADS = 4, 2
TOLERATED = 3e-2
"""Largest accepted error in bf16, relative to the largest entry. bf16's unit roundoff is 2^-8."""


def worst_error(kernels: Any, dtype: torch.dtype, device: torch.device | str, dim: int = 64) -> float:
    """Largest relative error of outputs, log-sum-exps and gradients of `kernels`, a sharded_attention.Kernels.

    dim: channels of a head. Returns NaN if any entry is not a number.
    """
    generator, scale = torch.Generator().manual_seed(0), dim**-0.5
    exact = TorchKernels()
    largest_error = 0.0

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    for call in _calls(device):
        q, dout = draw(call.q_rows, HEADS, dim), draw(call.q_rows, HEADS, dim)
        kv = side_by_side(draw(call.kv_rows, KV_HEADS, dim), draw(call.kv_rows, KV_HEADS, dim))
        if call.equal is not None and hasattr(kernels, "expect"):
            kernels.expect(call, q, kv)
        out, lse = kernels.forward(call, q, kv, scale)
        results = (out, lse, *kernels.backward(call, q, kv, out, lse, dout, scale))
        doubles = [x.double() for x in (q, kv, dout)]
        right_out, right_lse = exact.forward(call, doubles[0], doubles[1], scale)
        expected = (
            right_out,
            right_lse,
            *exact.backward(call, doubles[0], doubles[1], right_out, right_lse, doubles[2], scale),
        )
        for result, exact_result in zip(results, expected, strict=True):
            error = float((result.double() - exact_result).abs().max() / exact_result.abs().max())
            largest_error = error if error != error else max(largest_error, error)
    return largest_error


def _calls(device: torch.device | str) -> Iterator[AttentionCall]:
    """The kinds of call: diagonals, rectangles, one call instead of two, windows, and a batch of equal sequences."""
    whole_sizes, cut_sizes = [(9, 9), (1, 1), (190, 190), (64, 64)], [(64, 128), (5, 300), (70, 70)]
    yield device_call(whole_sizes, device, causal=True)
    yield device_call(cut_sizes, device, causal=False)
    yield device_call(cut_sizes, device, causal=True)
    yield device_call(whole_sizes, device, causal=True, window=20)
    yield device_call(cut_sizes, device, causal=True, window=20)
    yield device_call([(64, 64)] * 3, device, causal=True, equal=(3, 64, 64))
    yield device_call([(64, 128)] * 2, device, causal=False, equal=(2, 64, 128))


def device_call(
    sizes: Sequence[tuple[int, int]],
    device: torch.device | str,
    *,
    causal: bool,
    window: int | None = None,
    equal: tuple[int, int, int] | None = None,
    rows: tuple[int, int] | None = None,
    same_rows: bool = True,
) -> AttentionCall:
    """A call of sequences of these queries and keys. rows: those of all, if buffers have more. same_rows: queries are
    the keys, if they are equally many; the mask depends on it (te_backend.py)."""
    queries, keys = zip(*sizes, strict=True)
    q_rows, kv_rows = rows or (sum(queries), sum(keys))
    bounds_q, bounds_kv = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device) for side in (queries, keys)
    )
    bounds_kv = bounds_q if same_rows and q_rows == kv_rows else bounds_kv
    longest = max(queries), max(keys)
    return AttentionCall(causal, window, bounds_q, bounds_kv, *longest, q_rows, kv_rows, tuple(sizes), equal)


class Bucket(NamedTuple):
    """Sizes that a graph serves: sequences, query rows and key rows, each up to this many. 40 sequences of 5,000 rows
    run in the graph of 64 of 8,192."""

    sequences: int
    queries: int
    keys: int


def rows(tokens: int) -> int:
    """1,024; the next power of two up to 32,768; then the next multiple of that."""
    return max(1024, _power(tokens)) if tokens <= 32768 else -(-tokens // 32768) * 32768


def sequences_like(count: int) -> int:
    """32; the next power of two up to 512; then the next multiple of that."""
    return max(32, _power(count)) if count <= 512 else -(-count // 512) * 512


def buffer_rows(call: AttentionCall) -> tuple[int, int]:
    """Rows of a call's buffers: of rectangles' queries and exchanged keys, which are copied, some to spare, so that few
    graphs serve all. A rank's own rows are not copied."""
    same_rows = call.cu_seqlens_q is call.cu_seqlens_kv
    queries = call.q_rows if call.causal else padded_queries(call.q_rows)
    return queries, call.kv_rows if same_rows else padded_keys(call.kv_rows)


def padded_queries(count: int) -> int:
    """Rows of the buffer that a rectangle's queries are copied to, so that few graphs serve all: a power of two.

    Costs 20 us for 16K rows of 8 heads (H100); the buffer is not kept.
    """
    return max(4096, _power(count))


def padded_keys(count: int) -> int:
    """Rows of the buffer of exchanged keys, which is kept for backward: 16K at least, then at most a quarter more.

    Powers of two to 32K, multiples of 32K to 256K (graphs are kept by these anyway), eighths of an octave beyond.
    """
    if count <= 32768:
        return max(16384, _power(count))
    step = max(32768, _power(count) // 8)
    return -(-count // step) * step


def levels(max_rows: int) -> list[int]:
    """Row counts that stand for every bucket of 1 to `max_rows` rows, ascending: of 5,000 are 1024 2048 4096 5000."""
    return _ladder(min(1024, max_rows), max_rows, rows)


class Equal(NamedTuple):
    """Sequences of so many queries and keys each: kernels for packed sequences are 5 % slower than those for a batch of
    equal ones (H200, one of 32K), whose graph serves these very sizes alone."""

    sequences: int
    queries: int
    keys: int


Warmable = tuple[bool, int | None, Bucket | Equal]
"""Causal or not, window, sizes: what a graph is kept by, beside the shape of the heads."""


def repeated(layout: AttentionLayout, *, windowed: bool) -> list[Warmable]:
    """Of a micro-batch that comes again and again, the calls with equal sequences: a full or a windowed layer's."""
    one_call = layout.window if windowed else layout.single
    if one_call:
        calls: list[tuple[bool, int | None, AttentionCall | None]] = [
            (True, one_call.call.window, one_call.call)
        ]
    else:
        calls = [] if windowed else [(True, None, layout.diagonals), (False, None, layout.rectangles)]
    return [(causal, window, Equal(*call.equal)) for causal, window, call in calls if call and call.equal]


def foreseen(
    tokens: int,
    cp_size: int,
    sequences: int,
    cut_sequences: int,
    window: int | None,
    whole_documents: bool = True,
    one_call: bool = True,
    prefix: int = 0,
) -> list[Warmable]:
    """Every graph that micro-batches of up to `tokens` tokens can need on a rank.

    A rank holds an even share of the tokens; its rectangles' queries come at most twice (a document cut in causal
    pairs has two segments on a rank), their keys are those of the micro-batch and its prefixes at most. One call
    instead of two has few of either (sharding/cut.py).

    Args:
        sequences: segments that a rank can have.
        cut_sequences: those of them that see earlier keys.
        window: earlier keys that the model's windowed layers see.
        whole_documents: some layer sees whole documents.
        one_call: micro-batches may make one call of two.
        prefix: earlier tokens that a micro-batch's documents in chunks attend to at most, all together.
    """
    has_earlier_keys = cp_size > 1 or prefix > 0
    share = -(-tokens // cp_size)
    counts = _ladder(32, sequences_like(sequences), sequences_like)
    cut_counts = _ladder(32, sequences_like(cut_sequences), sequences_like)
    graphs: list[Warmable] = []
    if whole_documents:
        graphs += [(True, None, Bucket(b, t, t)) for b in counts for t in levels(share)]
        if has_earlier_keys:
            queries = _ladder(4096, padded_queries(2 * share), padded_queries)
            keys = _ladder(16384, padded_keys(tokens + prefix), padded_keys)
            graphs += [(False, None, Bucket(b, q, k)) for b in cut_counts for q in queries for k in keys]
            call_rows = levels(min(share, MOST_ROWS))
            call_keys = _ladder(16384, padded_keys(MOST_KEYS), padded_keys)
        if has_earlier_keys and one_call:
            graphs += [(True, None, Bucket(b, t, k)) for b in counts for t in call_rows for k in call_keys]
    if window is not None:
        # A segment attends to its own keys and, if it is cut, at most a window more.
        graphs += [(True, window, Bucket(b, t, t)) for b in counts for t in levels(share)]
        if has_earlier_keys:
            for b in counts:
                for t in levels(share):
                    limit = padded_keys(min(tokens + prefix, t + min(b, cut_sequences) * window))
                    keys = _ladder(16384, limit, padded_keys)
                    graphs += [(True, window, Bucket(b, t, k)) for k in keys if k > t]
    return graphs


def by_likelihood(graphs: list[Warmable], rows: int, segments: int) -> list[list[Warmable]]:
    """The causal ones and the rectangles, each by how unlike a usual micro-batch's their sizes are: by the doublings
    that rows, sequences and keys are away.

    rows, segments: tokens and segments that a rank usually holds. Of 8,192 rows and 64 segments, a diagonal of 4,096
    rows and 128 sequences is 2 away. A rectangle has few sequences and any number of keys.
    """

    def away(graph: Warmable) -> float:
        causal, _, size = graph
        doublings = abs(math.log2(size.queries / rows)) + abs(
            math.log2(size.sequences / (segments if causal else 32))
        )
        return doublings + (math.log2(size.keys / size.queries) if causal else 0.0)

    kinds = [[graph for graph in graphs if graph[0] == causal] for causal in (True, False)]
    return [sorted(kind, key=away) for kind in kinds]


def _ladder(first: int, limit: int, round_up: Callable[[int], int]) -> list[int]:
    """first, and each next rounding up, to `limit`."""
    rungs = [first]
    while rungs[-1] < limit:
        rungs.append(min(round_up(rungs[-1] + 1), limit))
    return rungs


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
