"""What the attention tests share: attention one document at a time, and ranks simulated by threads."""

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from hypothesis import strategies as st
from plan_checks import merge_touching, validate

from wlb_megatron.attention import kv_exchange
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels import before_training
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import LayerSettings, sharded_attention
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import padding

torch.set_num_threads(1)
SCALE = 0.37


@dataclass
class Tensors:
    """q, dout: [T, heads, dim]; k, v: [T, kv heads, dim], in packed order (v, dout: of the values' dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def random_tensors(tokens, heads=4, kv_heads=2, dim=4, dtype=torch.float64, seed=0, v_dim=None):
    generator = torch.Generator().manual_seed(seed)
    v_dim = v_dim or dim
    shapes = [
        (tokens, heads, dim),
        (tokens, kv_heads, dim),
        (tokens, kv_heads, v_dim),
        (tokens, heads, v_dim),
    ]
    return Tensors(*(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes))


def one_document_at_a_time(lengths, x: Tensors, scale=SCALE, window=None, sink=None):
    """Output, dq, dk, dv (and dsink) by torch's autograd through a masked softmax, in x's dtype.

    window: earlier keys a query sees. sink: [heads], a logit beside the keys', whose weight is then dropped.
    """
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    sink = None if sink is None else sink.clone().requires_grad_()
    outs, order = [], []
    repeat = q.shape[1] // k.shape[1]
    lengths = torch.as_tensor(lengths)
    starts = lengths.cumsum(0) - lengths
    for length in lengths.unique().tolist():  # those of one length are a batch's elements: none sees another
        rows = starts[lengths == length][:, None] + torch.arange(length)
        keys, values = (t[rows].repeat_interleave(repeat, dim=2) for t in (k, v))
        scores = torch.einsum("nqhd,nkhd->nhqk", q[rows], keys) * scale
        far = torch.arange(length)[:, None] - torch.arange(length)
        seen = (far >= 0) & (far <= (length if window is None else window))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sink is not None:
            scores = torch.cat((scores, sink[:, None, None].expand(len(rows), -1, length, 1)), dim=-1)
        outs.append(torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1)[..., :length], values).flatten(0, 1))
        order.append(rows.flatten())
    out = torch.cat(outs)[torch.cat(order).argsort()]
    grads = torch.autograd.grad(out, (q, k, v) if sink is None else (q, k, v, sink), x.dout)
    return out.detach(), *grads


def whole_call(lengths):
    """The one kernel call of whole documents on one rank."""
    return device_layout(attention_layout(shard(lengths, 1, "per-document"), 0), "cpu").diagonals


def each_sequence(q, k, v, bounds, scale, seen):
    """What a stand-in for kernels computes a packed sequence by, with keys and values repeated for the queries' heads.

    bounds: slices of queries' rows and of keys' rows; seen: from their numbers, [queries, keys], whether one sees the
    other. Yields both slices, keys, values, and masked scores [heads, queries, keys].
    """
    for rows, keys in bounds:
        key, value = (x[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], key) * scale
        hidden = ~seen(rows.stop - rows.start, keys.stop - keys.start)
        yield rows, keys, key, value, scores.masked_fill(hidden, float("-inf"))


def sequence_gradients(scores, lse, delta, q, key, value, dout, kv_heads):
    """dq, dk, dv of a sequence whose queries may see other keys elsewhere; dq and dk without the scale of scores.

    lse, delta: [heads, queries], of all keys: log-sum-exp, and the sum of the output times its gradient.
    """
    probs = torch.exp(scores - lse[..., None])
    dscores = (torch.einsum("qhd,khd->hqk", dout, value) - delta[..., None]) * probs
    pairs = ((dscores, q), (probs, dout))
    grads = (torch.einsum("hqk,qhd->khd", *pair).unflatten(1, (kv_heads, -1)).sum(2) for pair in pairs)
    return torch.einsum("hqk,khd->qhd", dscores, key), *grads


@dataclass
class ThreadGroup:
    """All-to-all between threads that stand for ranks."""

    size: int
    mail: dict = field(default_factory=dict)
    traffic: int = 0

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size)

    def run(self, share_of):
        """share_of(rank) of each rank, in its thread. An error in one ends all."""

        def caught(rank):
            try:
                return share_of(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(caught, range(self.size)))


@dataclass
class Member:
    group: ThreadGroup
    rank: int


class _Done:
    def __init__(self, member, out, counts):
        self.member, self.out, self.counts = member, out, counts

    def wait(self):
        group, rank = self.member.group, self.member.rank
        group.barrier.wait()
        chunks = [group.mail[peer][rank] for peer in range(group.size)]
        assert [len(chunk) for chunk in chunks] == list(self.counts)
        self.out.copy_(torch.cat(chunks))
        group.barrier.wait()


def _thread_all_to_all(sent, send_counts, recv_counts, member, hidden):
    if not isinstance(member, Member):
        return _real_all_to_all(sent, send_counts, recv_counts, member, hidden)
    assert not send_counts[member.rank] and not recv_counts[member.rank]
    member.group.mail[member.rank] = sent.split(list(send_counts))
    member.group.traffic += sum(send_counts)
    return (out := sent.new_empty((sum(recv_counts), *sent.shape[1:]))), _Done(member, out, recv_counts)


_real_all_to_all = kv_exchange._all_to_all
kv_exchange._all_to_all = _thread_all_to_all


def bucket(sequences, queries, keys):
    """The graph that serves a call of these sizes."""
    sides = map(before_training.rows, (queries, keys))
    return before_training.Bucket(before_training.sequences_like(sequences), *sides)


def cached_bytes(caches=kv_exchange._caches):
    """Bytes of keys that layers keep for later chunks, gradients included."""
    entries = [entry for cache in caches for entry in cache._entries.values()]
    return sum(x.numel() * x.element_size() for e in entries for x in (e.kv, e.grad) if x is not None)


def on_all_ranks(
    plan: ShardPlan, x: Tensors, keep_keys=True, scale=SCALE, window=None, sink=None, kernels=None
):
    """Output, dq, dk, dv in packed order (and dsink) from every rank's own share of x; and the exchanged rows."""
    group = ThreadGroup(plan.cp_size)

    def share_of(rank):
        index = torch.from_numpy(plan.packed_index(rank))
        layout = device_layout(attention_layout(plan, rank, window), "cpu")
        inputs = [t[index].requires_grad_() for t in (x.q, x.k, x.v)]
        own_sink = None if sink is None else sink.clone().requires_grad_()
        settings = LayerSettings(keep_keys, own_sink, window is not None)
        member, used = Member(group, rank), kernels or TorchKernels()
        out = sharded_attention(*inputs, layout, member, used, scale, settings)
        inputs += [] if sink is None else [own_sink]
        return index, out.detach(), *torch.autograd.grad(out, inputs, x.dout[index])

    shares = group.run(share_of)
    results = [torch.full_like(t, float("nan")) for t in (x.dout, x.q, x.k, x.v)]
    for index, *tensors in shares:
        for result, tensor in zip(results, tensors[:4], strict=True):
            result[index] = tensor
    if sink is not None:
        results.append(sum(tensors[4] for _, *tensors in shares))
    return (*results, group.traffic)


def largest_error(got, expected):
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


def padded(lengths, cp):
    pad = padding(sum(lengths), cp)
    return np.array(lengths + [pad] * (pad > 0), dtype=np.int64)


@st.composite
def mixes(draw, cp):
    """Lengths that break things: around 2 * CP, one document alone, dozens of tiny ones; padded to CP."""
    awkward = st.sampled_from([1, 2, max(1, 2 * cp - 1), 2 * cp, 2 * cp + 1])
    lengths = draw(
        st.one_of(
            st.lists(st.one_of(awkward, st.integers(1, 60)), min_size=1, max_size=10),
            st.lists(st.integers(1, 150), min_size=1, max_size=1),
            st.integers(40, 80).flatmap(lambda n: st.lists(st.integers(1, 3), min_size=n, max_size=n)),
        )
    )
    return padded(lengths, cp)


@st.composite
def any_plans(draw, cp_sizes=(2, 3, 4)):
    """Plans no slot rule would make: pieces cut anywhere, dealt to any rank, in any order."""
    cp = draw(st.sampled_from(cp_sizes))
    lengths = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)), dtype=np.int64)
    held = [[] for _ in range(cp)]
    for piece, length in enumerate(lengths.tolist()):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=9)) | {0, length})
        for start, end in pairwise(cuts):
            held[draw(st.integers(0, cp - 1))].append((piece, start, end))
    ranks = []
    for rows in held:
        shuffled = draw(st.permutations(rows))
        ranks.append(merge_touching(np.array(shuffled, dtype=np.int64).reshape(-1, 3)))
    plan = ShardPlan(lengths, tuple(ranks))
    validate(plan)
    return plan


def import_over(patch, module, backend):
    """The kernels' backend of that name, imported over a stand-in for the module that it calls."""
    name, parts = f"wlb_megatron.attention.kernels.{backend}", module.__name__.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        patch.setitem(sys.modules, package, ModuleType(package))
    patch.setitem(sys.modules, module.__name__, module)
    patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
