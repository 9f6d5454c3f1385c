"""Steps of the attention benchmark: a rank's share over a process group, or alone with a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.bench.attention.attention_bench import KERNELS, Step, layers_of, leaves, padded_to
from wlb_megatron.attention import kv_exchange
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.row_sums import apart, side_by_side
from wlb_megatron.attention.sharded_attention import Kernels, LayerSettings, sharded_attention
from wlb_megatron.sharding.attention_calls import AttentionLayout, ExchangePlan, attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan

Mixes = dict[str, list[int]]


@dataclass(frozen=True)
class Way:
    """How a layer attends: its kernels, window (earlier keys that a query sees) and sink ([heads])."""

    kernels: Kernels = KERNELS
    window: int | None = None
    sink: Tensor | None = None
    keep_keys: bool = True

    def exchange(self, layout: AttentionLayout) -> ExchangePlan | None:
        return (layout.window or layout.single or layout).exchange


PLAIN = Way()


def swapped(all_to_all: Callable[..., Any], step: Step, layers: int = 1) -> list[Tensor]:
    """The step with another way for rows to travel."""
    real = kv_exchange._all_to_all
    kv_exchange._all_to_all = all_to_all
    try:
        return step(layers)
    finally:
        kv_exchange._all_to_all = real


def planned(lengths: np.ndarray, cp: int, kind: str) -> ShardPlan:
    """By a sharding's name, in two kernel calls a rank, or in one if the name goes on ", one call"."""
    sharding, *ways = kind.split(", ")
    return replace(shard(lengths, cp, sharding), one_call="one call" in ways)


class Simulated:
    """A process group of one process: what would arrive is given, what is sent back is kept."""

    def __init__(self, arrived: Tensor, send_counts: tuple[int, ...]) -> None:
        self.arrived = arrived
        self.send_counts = send_counts
        self.back = arrived.new_zeros((sum(send_counts), *arrived.shape[1:]))
        self.returned: Tensor | None = None

    def all_to_all(self, sent: Tensor, send_counts: Any, recv_counts: Any, *_: Any) -> tuple[Tensor, Any]:
        done = SimpleNamespace(wait=lambda: None)
        if send_counts is self.send_counts:
            return self.arrived, done
        self.returned = sent
        return self.back, done


def share(
    plan: ShardPlan, rank: int, x: SimpleNamespace, kv: Tensor, way: Way = PLAIN
) -> tuple[Step, Simulated, Tensor, Tensor]:
    """One rank's step on one GPU, its simulated group, and the packed rows of its tokens and of what arrives."""
    arriving = []
    layouts = _layouts(plan, way.window)
    for sender, made in enumerate(layouts):
        theirs = way.exchange(made)
        assert theirs is not None
        begin = sum(theirs.send_counts[:rank])
        rows = theirs.send_rows[begin : begin + theirs.send_counts[rank]]
        arriving.append(plan.packed_index(sender)[rows])
    packed = torch.from_numpy(np.concatenate(arriving)).cuda()
    layout = device_layout(layouts[rank], "cuda")
    exchange = way.exchange(layout)
    group = Simulated(kv[packed], exchange.send_counts if exchange else ())
    step, index = sharded_step(layout, plan.packed_index(rank), x, group, way)

    def alone(layers: int = 1) -> list[Tensor]:
        return swapped(group.all_to_all, step, layers)

    return alone, group, index, packed


_latest: tuple[ShardPlan, int | None, list[AttentionLayout]] | None = None


def _layouts(plan: ShardPlan, window: int | None) -> list[AttentionLayout]:
    """Of all ranks; kept for the plan that was asked for last, whose ranks come one after the other."""
    global _latest
    if _latest is None or _latest[0] is not plan or _latest[1] != window:
        made = [attention_layout(plan, rank, window) for rank in range(plan.cp_size)]
        _latest = plan, window, made
    return _latest[2]


def sharded_step(
    layout: AttentionLayout, packed: np.ndarray, x: SimpleNamespace, group: Any, way: Way = PLAIN
) -> tuple[Step, Tensor]:
    """A rank's step over a group, and the packed rows of its tokens."""
    index = torch.from_numpy(packed).cuda()
    q, k, v, dout = (t[index] for t in (x.q, x.k, x.v, x.dout))
    inputs = leaves(q, k, v, *([] if way.sink is None else [way.sink]))
    _, k, v, *sink = inputs
    scale = q.shape[-1] ** -0.5

    def attend(query: Tensor) -> Tensor:
        return sharded_attention(
            query,
            k,
            v,
            layout,
            group,
            way.kernels,
            scale,
            LayerSettings(way.keep_keys, sink[0] if sink else None, way.window is not None),
        )

    return layers_of(attend, inputs, dout), index


def keys_of(x: SimpleNamespace, way: Way = PLAIN) -> Tensor:
    """All tokens' keys and values as they travel."""
    narrow = x.k.shape[-1] - x.v.shape[-1]
    padded = narrow and not way.kernels.takes(x.k.shape[-1], x.v.shape[-1])
    return side_by_side(x.k, torch.nn.functional.pad(x.v, (0, narrow)) if padded else x.v)


def sharded_by_turns(plan: ShardPlan, x: SimpleNamespace, way: Way = PLAIN) -> list[Tensor]:
    """All ranks' shares one after the other; output and gradients (and dsink) in packed order."""
    kv = keys_of(x, way)
    out, dq, dkv = torch.empty_like(x.dout), torch.empty_like(x.q), torch.zeros_like(kv, dtype=torch.float32)
    dk_all, dv_all = apart(dkv, x.k.shape[-1])
    dv_all = dv_all[..., : x.v.shape[-1]]
    dsink = None if way.sink is None else torch.zeros_like(way.sink)
    for rank in range(plan.cp_size):
        step, group, index, arriving = share(plan, rank, x, kv, way)
        out[index], dq[index], dk, dv, *rest = step()
        dk_all[index] += dk
        dv_all[index] += dv
        if dsink is not None:
            dsink += rest[0]
        if group.returned is not None:
            dkv.index_add_(0, arriving, group.returned.float())
    return [out, dq, dk_all, dv_all] + ([] if dsink is None else [dsink])


class ErrorTable:
    """Prints errors beside those of Transformer Engine's own attention, and keeps them."""

    def __init__(self, say: Callable[..., Any] = print) -> None:
        self.rows: list[dict[str, Any]] = []
        self.say = say
        say(f"{'mix':16}{'attention':22}{'cp':>3}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}{'worst / TE':>12}")

    def add(self, mix: str, kind: str, cp: int, error: list[float], base: list[float]) -> None:
        worst = max(a / b for a, b in zip(error, base, strict=True))
        text = "".join(f"{e:10.2e}" for e in error)
        self.say(f"{mix:16}{kind:22}{cp:3}{text}{worst:12.2f}{'' if worst <= 1.5 else '  FAIL'}")
        named = dict(zip(("out", "dq", "dk", "dv"), error, strict=True))
        self.rows.append({"mix": mix, "attention": kind, "cp": cp} | named | {"worst_over_te": worst})


def checked_lengths(documents: list[int], cp: int) -> np.ndarray:
    """A quarter of the lengths, odd, with some awkward ones: a reference in fp32 takes a second."""
    return padded_to([max(1, n // 4) | 1 for n in documents] + [1, 2, 15, 16], cp)
