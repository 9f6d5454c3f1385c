"""Steps of the attention benchmark: a rank's share over a process group, or alone with a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_bench import KERNELS, SCALE, Step, layers_of, leaves, padded_to
from torch import Tensor

from wlb_megatron.attention import kv_exchange
from wlb_megatron.attention.device_layout import DeviceLayout, device_layout
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.segments import ShardPlan

Mixes = dict[str, list[int]]


def swapped(all_to_all: Callable[..., Any], step: Step, layers: int) -> list[Tensor]:
    """The step with another way for rows to travel."""
    real = kv_exchange._all_to_all
    kv_exchange._all_to_all = all_to_all
    try:
        return step(layers)
    finally:
        kv_exchange._all_to_all = real


class Simulated:
    """A process group of one process: what would arrive is given, what is sent back is kept."""

    def __init__(self, arrived: Tensor, send_counts: tuple[int, ...]) -> None:
        self.arrived = arrived
        self.send_counts = send_counts
        self.back = arrived.new_zeros((sum(send_counts), *arrived.shape[1:]))
        self.returned: Tensor | None = None

    def all_to_all(self, sent: Tensor, send_counts: Any, recv_counts: Any, _: Any) -> tuple[Tensor, Any]:
        done = SimpleNamespace(wait=lambda: None)
        if send_counts is self.send_counts:
            return self.arrived, done
        self.returned = sent
        return self.back, done


def share(
    plan: ShardPlan, rank: int, x: SimpleNamespace, kv: Tensor
) -> tuple[Step, Simulated, Tensor, Tensor]:
    """One rank's step on one GPU, its simulated group, and the packed rows of its tokens and of what arrives."""
    arriving = []
    for sender in range(plan.cp_size):
        theirs = attention_layout(plan, sender).exchange
        begin = sum(theirs.send_counts[:rank])
        rows = theirs.send_rows[begin : begin + theirs.send_counts[rank]]
        arriving.append(plan.packed_index(sender)[rows])
    packed = torch.from_numpy(np.concatenate(arriving)).cuda()
    layout = device_layout(attention_layout(plan, rank), "cuda")
    group = Simulated(kv[packed], layout.exchange.send_counts if layout.exchange else ())
    step, index = sharded_step(layout, plan.packed_index(rank), x, group)

    def alone(layers: int = 1) -> list[Tensor]:
        return swapped(group.all_to_all, step, layers)

    return alone, group, index, packed


def sharded_step(
    layout: DeviceLayout, packed: np.ndarray, x: SimpleNamespace, group: Any, keep_keys: bool = True
) -> tuple[Step, Tensor]:
    """A rank's step over a group, and the packed rows of its tokens."""
    index = torch.from_numpy(packed).cuda()
    q, k, v, dout = (t[index] for t in (x.q, x.k, x.v, x.dout))
    q, k, v = leaves(q, k, v)

    def attend(query: Tensor) -> Tensor:
        return sharded_attention(query, k, v, layout, group, KERNELS, SCALE, keep_keys)

    return layers_of(attend, [q, k, v], dout), index


def sharded_by_turns(plan: ShardPlan, x: SimpleNamespace) -> list[Tensor]:
    """All ranks' shares one after the other; output and gradients in packed order."""
    kv = torch.stack((x.k, x.v), dim=1)
    out, dq, dkv = torch.empty_like(x.q), torch.empty_like(x.q), torch.zeros_like(kv, dtype=torch.float32)
    for rank in range(plan.cp_size):
        step, group, index, arriving = share(plan, rank, x, kv)
        out[index], dq[index], dk, dv = step()
        dkv[index] += torch.stack((dk, dv), dim=1)
        if group.returned is not None:
            dkv.index_add_(0, arriving, group.returned.float())
    return [out, dq, dkv[:, 0], dkv[:, 1]]


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


def checked_lengths(given: list[int], cp: int) -> np.ndarray:
    """A quarter of the lengths, odd, with some awkward ones: a reference in fp32 takes a second."""
    return padded_to([max(1, n // 4) | 1 for n in given] + [1, 2, 15, 16], cp)
