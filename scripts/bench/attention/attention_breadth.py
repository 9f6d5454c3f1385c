"""Errors of sharded attention on one GPU over head dims, windows, sinks and deterministic mode, beside TE's own."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.bench.attention.attention_bench import KERNELS, errors, machine, padded_to, te_attention, tensors
from scripts.bench.attention.attention_cases import ALONE, CASES, CROWD, CROWDED, LENGTHS, WITH_NANS, Case
from scripts.bench.attention.attention_steps import Mixes, Way, keys_of, planned, sharded_by_turns, share
from scripts.csv_files import write_csv
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import apply_sink, sink_gradient
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.sharding.cut import shard
from wlb_megatron.sharding.segments import ShardPlan


def exact(lengths: np.ndarray, x: SimpleNamespace, case: Case, sink: Tensor | None) -> list[Tensor]:
    """Output, dq, dk, dv (and dsink) in fp32, one document at a time."""
    kernels, scale = TorchKernels(), case.dim**-0.5
    q, k, v, dout = (t.float() for t in (x.q, x.k, x.v, x.dout))
    narrow = case.dim - v.shape[-1]
    v, dout = (torch.nn.functional.pad(t, (0, narrow)) for t in (v, dout))
    kv = torch.stack((k, v), dim=1)
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(kv)
    dsink = None if sink is None else torch.zeros_like(sink)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        rows = slice(int(start), int(start + length))
        call: Any = SimpleNamespace(causal=True, window=case.window, sizes=((int(length), int(length)),))
        o, lse = kernels.forward(call, q[rows], kv[rows], scale)
        if sink is not None and dsink is not None:
            o, lse = apply_sink(o, lse, sink)
            dsink += sink_gradient(o, lse, dout[rows], sink)
        out[rows] = o
        dq[rows], dkv[rows] = kernels.backward(call, q[rows], kv[rows], o, lse, dout[rows], scale)
    wide = x.v.shape[-1]
    return [out[..., :wide], dq, dkv[:, 0], dkv[:, 1, :, :wide]] + ([] if dsink is None else [dsink])


def breadth(_: Mixes, args: argparse.Namespace) -> None:
    rows, wrong = [], 0
    print(
        f"{'case':36}{'sharding':24}{'cp':>3}{'out':>10}{'dq':>10}{'dk':>10}{'dv':>10}{'dsink':>10}{'worst / TE':>12}"
    )
    packed = [("per-document", 1), ("per-sequence", 4), ("per-document", 4), ("hybrid", 4)]
    packed.append(("per-document, one call", 4))
    alone = [("per-sequence", cp) for cp in (1, 2, 4)]
    first, stride = map(int, (args.cases or "0::1").split("::"))
    cases = CASES[first::stride]
    ways = ((LENGTHS, packed), (CROWD, [("per-document", 1), ("hybrid", 2)]), (ALONE, alone))
    for case, documents, plans in [(case, *way) for case in cases for way in ways]:
        if documents is CROWD and case.name not in CROWDED:
            continue
        lengths = padded_to(documents, 4)
        x = tensors(int(lengths.sum()), case.heads, case.kv_heads, case.dim, case.v_dim, case.dtype)
        sink = None
        if case.softmax != "vanilla":
            sink = torch.linspace(-2, 6, case.heads, device="cuda") * (case.softmax == "learnable")
        way = Way(kernel_choice.kernels(KERNELS.name, case.deterministic), case.window, sink)
        expected = exact(lengths, x, case, sink)
        base = _te_errors(lengths, x, case, sink, expected)
        for kind, cp in plans:
            plan = planned(lengths, cp, kind)
            if documents is ALONE and KERNELS.name == "cudnn":
                expect(plan, x, way)
                kind = f"{kind}, expected"
            try:
                error = errors(sharded_by_turns(plan, x, way), expected)
            except (
                Exception
            ) as failed:  # a shape that the kernels do not take: the others are reported all the same
                print(f"{case.name:36}{kind:24}{cp:3}  FAIL: {str(failed)[:300]}", flush=True)
                wrong += 1
                continue
            worst = max((a / b for a, b in zip(error, base, strict=False)), default=float("nan"))
            good = worst <= 1.5 if base else max(error[:4]) < 6e-3
            good &= len(error) < 5 or error[4] < 1e-2
            wrong += not good
            text = "".join(f"{e:10.2e}" for e in error) + " " * 10 * (5 - len(error))
            print(f"{case.name:36}{kind:24}{cp:3}{text}{worst:12.2f}{'' if good else '  FAIL'}", flush=True)
            by_tensor = dict(zip(("out", "dq", "dk", "dv", "dsink"), [*error, ""][:5], strict=False))
            rows.append(
                {"case": case.name, "documents": len(documents), "sharding": kind, "cp": cp}
                | by_tensor
                | {"worst_over_te": worst}
                | machine()
            )
            write_csv(args.out / "breadth.csv", rows)
        if documents is not LENGTHS:
            continue
        if case.deterministic:
            wrong += not repeats(lengths, x, way)
        if case.name in WITH_NANS:
            wrong += not unread(lengths, x, way)
    print(f"{len(cases)} cases, {wrong} wrong")
    if wrong:
        raise SystemExit(1)


def expect(plan: ShardPlan, x: SimpleNamespace, way: Way) -> None:
    """Have the kernels serve what they can of this plan as batches of equal sequences."""
    kv = keys_of(x, way)
    kernels: Any = way.kernels  # those of Transformer Engine
    for rank in range(plan.cp_size):
        layout = device_layout(attention_layout(plan, rank, way.window), "cuda")
        near = layout.window or layout.single
        for call in [near.call] if near else [layout.diagonals, layout.rectangles]:
            if call and call.equal:
                kernels.expect(call, x.q, kv)


def _te_errors(
    lengths: np.ndarray, x: SimpleNamespace, case: Case, sink: Tensor | None, expected: list[Tensor]
) -> list[float]:
    """Of Transformer Engine's own module on the unsharded documents, where it takes the case; else none."""

    def set_sink(module: Any) -> None:
        if case.softmax == "learnable":
            module.softmax_offset.data.copy_(sink)

    try:
        return errors(te_attention(lengths, x, set_sink, **case.te_options)(), expected[:4])
    except Exception as error:
        print(f"  (Transformer Engine's own module refuses: {str(error).splitlines()[0][:90]})")
        return []


def unread(lengths: np.ndarray, x: SimpleNamespace, way: Way) -> bool:
    """Whether rows to spare are never read: with new memory full of NaN, all results are as they were."""
    plan = shard(lengths, 4, "per-document")
    expected = sharded_by_turns(plan, x, way)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        got = sharded_by_turns(plan, x, way)
    finally:
        torch.use_deterministic_algorithms(False)
    error = max(
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True)
    )
    good = error < 1e-3
    print(f"  with NaN in all memory that is not written: difference {error:.1e}{'' if good else '  FAIL'}")
    return good


def repeats(lengths: np.ndarray, x: SimpleNamespace, way: Way) -> bool:
    """Whether five runs of a rank's share are bitwise the same; beside it, how often the default kernels are."""
    plan = shard(lengths, 4, "per-document")
    kv = keys_of(x, way)
    same = []
    for kernels in (way.kernels, kernel_choice.kernels(KERNELS.name)):
        step = share(plan, 1, x, kv, Way(kernels, way.window, way.sink))[0]
        first = [t.clone() for t in step()]
        same.append([all(map(torch.equal, step(), first)) for _ in range(4)])
    print(
        f"  repeats bitwise: {sum(same[0])} of 4; by default {sum(same[1])} of 4{'' if all(same[0]) else '  FAIL'}"
    )
    return all(same[0])
