#!/usr/bin/env python3
"""FlashAttention-4's kernels beside cuDNN's on one GPU, in a few minutes: errors, a profile, shapes, shares of mixes.

    python3 scripts/gpu_fa4.py --mixes mixes.json --out DIR --seconds 340 [--parts errors,compile,profile,calls,choice]

errors: every case of attention_cases.py with both backends against fp32, in processes side by side, each killed after
    --errors-seconds (errors_*.csv, errors_*.log; a table of FlashAttention-4's errors over cuDNN's)
compile: from a fresh process to the first result, without a cache on disk (compile.log)
profile: wlb-megatron profile --backend fa4 of 7B at TP=4, from which its kernel table is built in (profile_fa4.json)
calls: one bottom-right call, and its diagonal and rectangle, for shapes of segments, with both (calls.csv)
choice: shares of all mixes by window and degree, what adaptive takes and its regret, with both (choice_*.csv)
Each part begins only while there is time; what is done is written as it comes.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("errors", "compile", "profile", "calls", "choice")
PROFILED = [
    *("--hidden-size", "4096", "--ffn-hidden-size", "11008", "--num-attention-heads", "32"),
    *(
        "--num-query-groups",
        "8",
        "--kv-channels",
        "128",
        "--swiglu",
        "--tp",
        "4",
        "--cp",
        "2",
        "--grid",
        "full",
    ),
]
"""7B at TP=4: 8 query and 2 key-value heads of 128 channels on a rank, as the built-in tables have."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=340)
    parser.add_argument("--errors-seconds", type=float, default=100)
    parser.add_argument("--profile-seconds", type=float, default=95)
    parser.add_argument("--profile-of", type=Path, help="of an earlier run, for `choice`")
    parser.add_argument("--jobs", type=int, default=6, help="processes of each backend in `errors`")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--windows", type=int, nargs="+", default=[131072, 32768, 65536])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts, until = args.parts.split(","), time.perf_counter() + args.seconds
    clock = _Clock(until)
    beside = []
    if "errors" in parts:
        beside += [_errors(name, at, args) for name in ("fa4", "cudnn") for at in range(args.jobs)]
    if "compile" in parts:
        beside.append(_compile(args))
    clock.say("started what runs beside")
    sys.path.insert(0, str(HERE))
    import torch
    from attention_bench import KERNELS

    torch.backends.cuda.matmul.allow_tf32 = False
    KERNELS.use("fa4")
    clock.say("imported")
    _wait(beside, args.errors_seconds)
    if "errors" in parts:
        _compare_errors(args)
    clock.say("errors")
    profile = args.profile_of
    if "profile" in parts:
        from wlb_megatron.cli import main as command

        budget, made = str(min(args.profile_seconds, clock.left())), args.out / "profile_fa4.json"
        if not command(["profile", "--backend", "fa4", *PROFILED, "--budget", budget, "--out", str(made)]):
            profile = made
        clock.say("profile")
    if "calls" in parts and clock.left() > 20:
        from attention_shapes import shapes

        shapes(args.out)
        clock.say("calls")
    if "choice" in parts:
        _choice(args, profile, clock)


class _Clock:
    def __init__(self, until: float) -> None:
        self.began, self.until = time.perf_counter(), until

    def left(self) -> float:
        return self.until - time.perf_counter()

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {what}", flush=True)


def _start(command: list[str], log: Path, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        ), log


def _errors(name: str, at: int, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path]:
    out = args.out / f"errors_{name}_{at}"
    command = [str(HERE / "gpu_attention.py"), "breadth", "--kernels", name, "--cases", f"{at}::{args.jobs}"]
    return _start([*command, "--out", str(out)], args.out / f"errors_{name}_{at}.log", OMP_NUM_THREADS="1")


def _compile(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path]:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_fa4; gpu_fa4.compile_times()"
    off = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    return _start(["-c", script, str(HERE)], args.out / "compile.log", **off)


def compile_times() -> None:
    """Seconds from nothing to FlashAttention-4's first results, of each kind of call that a CP job compiles."""
    began = time.perf_counter()
    import torch

    torch.zeros(1, device="cuda")
    print(f"torch and a CUDA context: {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    from wlb_megatron.attention.kernel_choice import kernels

    backend = kernels("fa4")
    print(f"FlashAttention-4 imported: {time.perf_counter() - began:.1f} s", flush=True)
    from wlb_megatron.attention.graph_buckets import Bucket
    from wlb_megatron.attention.warm_up import warm_up

    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "v_dim": 128, "scale": 128**-0.5}
    for causal in (True, False):
        for count in (1, 257):
            began = time.perf_counter()
            kind = (causal, None, Bucket(count, 128, 128 if causal else 256))
            warm_up(backend, [kind], **shape, dtype=torch.bfloat16, device="cuda")
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            print(f"{'causal' if causal else 'rectangle'}, {count} sequences: {took:.1f} s", flush=True)


def _wait(started: list[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> None:
    until = time.perf_counter() + seconds
    for process, log in started:
        try:
            status = process.wait(max(0.1, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = -9
        if status:
            text = log.read_text(errors="replace").strip().splitlines()[-6:]
            print(f"{log.name}: status {status}", *text, sep="\n    ", flush=True)


def _compare_errors(args: argparse.Namespace) -> None:
    """Of each case and plan, the largest of FlashAttention-4's errors over cuDNN's (errors.csv)."""
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for name in ("cudnn", "fa4"):
        for path in sorted(args.out.glob(f"errors_{name}_*/breadth.csv")):
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    plan = row["sharding"].removesuffix(", expected")
                    found[row["case"], row["documents"], plan, row["cp"]][name] = row
    from wlb_megatron.report.files import write_csv

    rows = []
    for (case, documents, plan, cp), both in sorted(found.items()):
        told: dict[str, Any] = {"case": case, "documents": documents, "sharding": plan, "cp": cp}
        for tensor in ("out", "dq", "dk", "dv", "dsink"):
            for name in ("cudnn", "fa4"):
                told[f"{tensor}_{name}"] = both.get(name, {}).get(tensor, "")
        pairs = [(told[f"{t}_fa4"], told[f"{t}_cudnn"]) for t in ("out", "dq", "dk", "dv", "dsink")]
        ratios = [float(a) / float(b) for a, b in pairs if a and b]
        told["worst_fa4_over_cudnn"] = max(ratios, default=float("nan"))
        rows.append(told)
        if not ratios or told["worst_fa4_over_cudnn"] > 1.2:
            print(f"  above 1.2, or missing: {case}, {plan}, CP={cp}: {told['worst_fa4_over_cudnn']:.2f}")
    if rows:
        write_csv(args.out / "errors.csv", rows)
        worst = max(
            (r["worst_fa4_over_cudnn"] for r in rows if not math.isnan(r["worst_fa4_over_cudnn"])), default=0
        )
        print(
            f"{len(rows)} cases with plans, FlashAttention-4's errors at most {worst:.2f} times cuDNN's",
            flush=True,
        )


def _choice(args: argparse.Namespace, profile: Path | None, clock: _Clock) -> None:
    """Windows in turn, both backends each, so that what is cut off is cut off of both."""
    from attention_bench import KERNELS
    from attention_choice import choice

    mixes = json.loads(args.mixes.read_text())
    taken: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    shares = {131072: 0.62, 65536: 0.8, 32768: 0.45}  # of the time that is left
    for window in args.windows:
        seconds = clock.left() * (shares.get(window, 0.5) if window != args.windows[-1] else 1.0)
        for name, part in (("fa4", 0.55), ("cudnn", 0.45)):
            KERNELS.use(name)
            given = argparse.Namespace(
                windows=[window],
                cp=args.cp,
                out=args.out,
                seconds=max(0.0, min(seconds * part, clock.left() - 5)),
                profile_of=profile if name == "fa4" else None,
            )
            for row in choice(mixes, given):
                if row["chosen"]:
                    taken[row["window"], row["mix"], row["cp"]][name] = row["ms"]
            clock.say(f"choice {window} {name}")
        for cp in args.cp:
            cells = [both for at, both in taken.items() if at[0] == window and at[2] == cp]
            ratios = [both["cudnn"] / both["fa4"] for both in cells if len(both) == 2]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                told = f"FlashAttention-4 {mean:.3f}x cuDNN, least {min(ratios):.3f}"
                print(f"{window} CP={cp}: {len(ratios)} mixes, {told}", flush=True)


if __name__ == "__main__":
    main()
