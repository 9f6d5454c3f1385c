"""Correctness and speed of sharded attention on GPUs: one layer, forward and backward, bf16.

    python3 -m scripts.bench.attention.gpu_attention MODE --out DIR ...                           # one GPU
    torchrun --nproc-per-node 2 -m scripts.bench.attention.gpu_attention MODE --out DIR ...       # a process a GPU

One GPU:
    share --mixes mixes.json                each rank's share
    breadth                                 errors: head dims, windows, sinks, MLA, deterministic, fp16
    windows --mixes mixes.json              time of windowed layers beside full ones
    warm --mixes mixes.json                 kernel graphs: 200 random micro-batches
    choice --mixes mixes.json --cp 2 4 8    regret of adaptive, predictions
    chunks --mixes mixes.json               a document in chunks (torchrun: over GPUs)
    memory --mixes mixes.json               exchanged keys kept, or exchanged again
Under torchrun:
    real --mixes mixes.json                 over NCCL, beside Transformer Engine's own context parallelism
    profile --mixes mixes.json --only NAMES
    backends --mixes mixes.json --profile-of FA4.json
    host --mixes mixes.json                 host time, by parts

--kernels fa4 takes FlashAttention-4's in place of cuDNN's (Transformer Engine's own attention stays cuDNN's).
mixes.json: {"name": [document lengths], ...}. Writes DIR/<mode>.csv and prints tables. Errors are norms of the
difference to an fp32 reference over its norm, beside those of Transformer Engine's own unsharded attention.
In `share` the exchange is simulated: its copies count, its transfer does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

try:
    import transformer_engine  # noqa: F401
except ImportError:
    raise SystemExit(
        f"{__doc__}\nThis needs Transformer Engine and a GPU; here is no transformer_engine."
    ) from None
from scripts.bench.attention.attention_backends import backends
from scripts.bench.attention.attention_bench import (
    KERNELS,
    errors,
    machine,
    measure,
    padded_to,
    profile,
    reference,
    te_attention,
    tensors,
    timing,
)
from scripts.bench.attention.attention_breadth import breadth, windows
from scripts.bench.attention.attention_choice import choice
from scripts.bench.attention.attention_chunks import chunks
from scripts.bench.attention.attention_host import host
from scripts.bench.attention.attention_memory import memory
from scripts.bench.attention.attention_profile import profile as trace
from scripts.bench.attention.attention_real import real
from scripts.bench.attention.attention_steps import (
    ErrorTable,
    Mixes,
    checked_lengths,
    planned,
    sharded_by_turns,
    share,
)
from scripts.bench.attention.attention_warm import warm
from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard


def check(mixes: Mixes, args: argparse.Namespace) -> None:
    table = ErrorTable()
    for name, given in mixes.items():
        lengths = checked_lengths(given, 8)
        x = tensors(int(lengths.sum()))
        expected = reference(lengths, x)
        base = errors(te_attention(lengths, x)(), expected)
        table.add(name, "unsharded TE", 1, base, base)
        for kind in args.kinds:
            for cp in (2, 4, 8):
                table.add(
                    name, kind, cp, errors(sharded_by_turns(shard(lengths, cp, kind), x), expected), base
                )
    write_csv(args.out / "errors.csv", table.rows)


def time_shares(mixes: Mixes, args: argparse.Namespace) -> None:
    rows = []
    stamp = machine()
    total: dict[tuple[int, str], float] = {}
    print(f"\n{'mix':16}{'cp':>3}{'TE / CP':>9}  slowest rank: GPU ms p50 (host ms)")
    for name, given in mixes.items():
        lengths = padded_to(given, 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        whole = measure(te_attention(lengths, x))
        rows.append(timing(name, 1, "unsharded TE", 0, whole, stamp))
        for cp in args.cp:
            line = f"{name:16}{cp:3}{whole[1] / cp:9.2f}  "
            total[cp, "TE / CP"] = total.get((cp, "TE / CP"), 0.0) + whole[1] / cp
            for kind in args.kinds:
                plan = planned(lengths, cp, kind)
                times = [measure(share(plan, rank, x, kv)[0]) for rank in range(cp)]
                rows += [timing(name, cp, kind, rank, t, stamp) for rank, t in enumerate(times)]
                slowest = max(times, key=lambda t: t[1])
                total[cp, kind] = total.get((cp, kind), 0.0) + slowest[1]
                line += f"  {kind} {slowest[1]:.2f} ({slowest[3]:.2f})"
            print(line, flush=True)
    for cp in args.cp:
        base = total[cp, "TE / CP"]
        kinds = ("TE / CP", *args.kinds)
        print(
            f"sum, CP={cp}: "
            + "  ".join(f"{k} {total[cp, k]:.2f} ms ({base / total[cp, k]:.1%})" for k in kinds)
        )
    write_csv(args.out / "share.csv", rows)


def profile_shares(mixes: Mixes, args: argparse.Namespace) -> None:
    cp = args.cp[-1]
    for name in filter(None, args.profile.split(",")):
        lengths = padded_to(mixes[name], 16)
        x = tensors(int(lengths.sum()))
        kv = torch.stack((x.k, x.v), dim=1)
        for kind in args.kinds:
            plan = shard(lengths, cp, kind)
            for _ in range(2):
                begin = time.perf_counter()
                layout = attention_layout(plan, 1)
                made = time.perf_counter()
                device_layout(layout, "cuda")
                sent = time.perf_counter()
            print(
                f"\nlayout: {(made - begin) * 1e3:.2f} ms, to the device: {(sent - made) * 1e3:.2f} ms of host time"
            )
            profile(f"{name}, CP={cp}, {kind}, rank 1", share(plan, 1, x, kv)[0])


OTHERS = {
    "real": real,
    "choice": choice,
    "breadth": breadth,
    "windows": windows,
    "warm": warm,
    "chunks": chunks,
    "memory": memory,
    "profile": trace,
    "host": host,
    "backends": backends,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("share", *OTHERS))
    parser.add_argument("--mixes", type=Path, nargs="+")
    parser.add_argument("--only", help="comma list of mixes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", default=["per-sequence", "per-document", "hybrid"])
    parser.add_argument("--windows", type=int, nargs="+", help="of `choice` and `host`")
    parser.add_argument(
        "--profile-of",
        type=Path,
        help="of `choice` and `backends`: predict by a wlb-megatron profile (default: the built-in table)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="of `choice` and `backends`: begin no mix after these"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument(
        "--check", nargs="+", help="in `real`, the mixes whose errors are measured (default all)"
    )
    parser.add_argument(
        "--profile", default="", help="comma list of mixes whose shares at the last CP are profiled"
    )
    parser.add_argument("--kernels", choices=("cudnn", "fa4"), default="cudnn")
    parser.add_argument(
        "--cases", help="of `breadth`: I::N, every Nth from the Ith on, so that N processes share them"
    )
    args = parser.parse_args()
    KERNELS.use(args.kernels)
    args.windows = args.windows or ([16384, 131072] if args.mode == "host" else [32768, 65536, 131072])
    mixes: Mixes = {}
    for path in args.mixes or ():
        mixes |= json.loads(path.read_text())
    if not mixes and args.mode != "breadth":
        parser.error(f"{args.mode} needs --mixes")
    if args.only:
        mixes = {name: mixes[name] for name in args.only.split(",")}
    args.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.mode in OTHERS:
        OTHERS[args.mode](mixes, args)
        return
    if not args.no_check:
        check(mixes, args)
    time_shares(mixes, args)
    profile_shares(mixes, args)


if __name__ == "__main__":
    sys.exit(main())
