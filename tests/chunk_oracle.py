"""What the tests of documents in chunks share: random iterations, their plans, one layer's attention over them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from attention_oracle import SCALE, Member, Tensors, ThreadGroup, cached_bytes, random_tensors
from hypothesis import strategies as st
from plan_checks import validate
from torch.utils.checkpoint import checkpoint

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.kv_exchange import KeyCache
from wlb_megatron.attention.sharded_attention import LayerSettings, sharded_attention
from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import PADDING, Piece
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import cut, pad
from wlb_megatron.workload.kernel_table import h100


@st.composite
def iterations(draw, most=60, documents=5, micro_batches=5):
    """Pieces of each micro-batch: documents in 1 to 5 chunks, in any micro-batches as long as they are in order."""
    count = draw(st.integers(2, micro_batches))
    pieces_of_micro_batches = [[] for _ in range(count)]
    for document in range(draw(st.integers(1, documents))):
        chunks = draw(st.integers(1, min(5, count)))
        where = sorted(draw(st.permutations(range(count)))[:chunks])
        begin = start = draw(st.sampled_from([0, 0, 7]))  # a document split before it came in chunks
        for index in where:
            size = draw(st.one_of(st.integers(1, 4), st.integers(1, most)))
            pieces_of_micro_batches[index].append(Piece(0, document, start, start + size, start - begin))
            start += size
    pieces_of_micro_batches = [draw(st.permutations(pieces)) for pieces in pieces_of_micro_batches]
    return [pieces or [Piece(0, 100 + index, 0, 3)] for index, pieces in enumerate(pieces_of_micro_batches)]


def shard_plans(micro_batches, cp, kind, table=None):
    """Padded pieces and valid shard plans of an iteration."""
    padded = [pad(tuple(pieces), cp) for pieces in micro_batches]
    lengths = [np.array([piece.tokens for piece in pieces], dtype=np.int64) for pieces in padded]
    plans = cut(lengths, cp, kind, table or h100(), links_of(padded))
    for plan in plans:
        validate(plan)
    return padded, plans


def tokens_of(pieces, rows):
    """(document, token) of each key of rows (piece, start, end, ..), in order; padding has its micro-batch's own."""
    return [
        (pieces[at].document, pieces[at].start - pieces[at].prefix + token)
        for at, start, end, *_ in np.asarray(rows).tolist()
        for token in range(start, end)
    ]


def is_real(token):
    return token[0] != PADDING


class WithRoomToSpare(TorchKernels):
    """Buffers with more rows than a call's, as backends with rounded sizes want them."""

    def buffer_rows(self, call):
        queries, keys = super().buffer_rows(call)
        return queries + 3, keys + 5


@dataclass
class Layer:
    """How one layer's attention runs over an iteration. recompute: None, or a checkpoint around it: "reentrant", whose
    first forward is not recorded, or "recorded", whose both are. order: (micro-batch, whether backward), by default all
    forwards and then all backwards, last first."""

    window: int | None = None
    sink: torch.Tensor | None = None
    keep_keys: bool = True
    recompute: str | None = None
    kernels: TorchKernels = field(default_factory=TorchKernels)
    order: list[tuple[int, bool]] | None = None


class Iteration:
    """An iteration's documents as whole ones, end to end, and where each packed token of each micro-batch is there."""

    def __init__(self, padded, plans):
        self.plans = plans
        documents: dict[tuple[int, int], int] = {}
        for index, pieces in enumerate(padded):
            for piece in pieces:
                key = self._key(index, piece)
                documents[key] = documents.get(key, 0) + piece.tokens
        self.lengths = list(documents.values())
        starts = dict(zip(documents, np.cumsum([0, *self.lengths]).tolist(), strict=False))
        self.places = []
        for index, pieces in enumerate(padded):
            rows = [starts[self._key(index, p)] + p.prefix + np.arange(p.tokens) for p in pieces]
            self.places.append(torch.from_numpy(np.concatenate(rows)))
        self.tokens = sum(self.lengths)

    def tensors(self, **shape) -> Tensors:
        return random_tensors(self.tokens, **shape)

    @staticmethod
    def _key(index, piece):
        padding = piece.document == PADDING
        return (piece.document, index) if padding else (piece.document, piece.start - piece.prefix)

    def on_rank(self, rank, group, x: Tensors, layer: Layer, cache: KeyCache):
        """(rows, output, dq, dk, dv) of each micro-batch; dsink; and bytes in the cache after each of the order."""
        sink = None if layer.sink is None else layer.sink.clone().requires_grad_()
        indices = range(len(self.plans))
        done, held = {}, []
        for index, backward in layer.order or [
            *((m, False) for m in indices),
            *((m, True) for m in indices[::-1]),
        ]:
            if backward:
                rows, out, _ = done[index]
                out.backward(x.dout[rows])
            else:
                done[index] = self._forward(index, rank, group, x, layer, cache, sink)
            held.append(cached_bytes([cache]))
        assert not cache._entries and not cache._recorded
        results = [(rows, out.detach(), *(t.grad for t in inputs)) for rows, out, inputs in done.values()]
        return results, None if sink is None else sink.grad, held

    def _forward(self, index, rank, group, x, layer, cache, sink):
        plan = self.plans[index]
        layout = device_layout(attention_layout(plan, rank, layer.window), "cpu")

        def attend(q, k, v):
            settings = LayerSettings(layer.keep_keys, sink, layer.window is not None, cache)
            return sharded_attention(q, k, v, layout, group, layer.kernels, SCALE, settings)

        rows = self.places[index][torch.from_numpy(plan.packed_index(rank))]
        inputs = [t[rows].requires_grad_() for t in (x.q, x.k, x.v)]
        if layer.recompute:
            again = layer.recompute == "reentrant"
            return rows, checkpoint(attend, *inputs, use_reentrant=again, preserve_rng_state=False), inputs
        return rows, attend(*inputs), inputs

    def on_all_ranks(self, x: Tensors, layer: Layer):
        """Output, dq, dk, dv (and dsink) of the whole documents; ranks are threads."""
        group = ThreadGroup(self.plans[0].cp_size)
        shares = group.run(lambda rank: self.on_rank(rank, Member(group, rank), x, layer, KeyCache()))
        results = [torch.full_like(t, float("nan")) for t in (x.dout, x.q, x.k, x.v)]
        for micro_batches, *_ in shares:
            for rows, *tensors in micro_batches:
                for result, tensor in zip(results, tensors, strict=True):
                    result[rows] = tensor
        return results if layer.sink is None else [*results, sum(sink for _, sink, _ in shares)]
