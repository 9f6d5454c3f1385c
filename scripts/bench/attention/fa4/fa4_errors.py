"""Parts of gpu_fa4.py that run in processes of their own, side by side: errors of both backends, time to compile."""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from wlb_megatron.report.files import write_csv


def _start(command: list[str], log: Path, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        ), log


def start_errors(name: str, at: int, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path]:
    out = args.out / f"errors_{name}_{at}"
    command = ["-m", "scripts.bench.attention.gpu_attention", "breadth", "--kernels", name]
    command += ["--cases", f"{at}::{args.jobs}"]
    return _start([*command, "--out", str(out)], args.out / f"errors_{name}_{at}.log", OMP_NUM_THREADS="1")


def start_compile(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], Path]:
    script = "from scripts.bench.attention.fa4.fa4_errors import compile_times; compile_times()"
    off = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
    return _start(["-c", script], args.out / "compile.log", **off)


def compile_times() -> None:
    """Seconds from nothing to FlashAttention-4's first results, of each kind of call that a CP job compiles."""
    began = time.perf_counter()
    import torch

    torch.zeros(1, device="cuda")
    print(f"torch and a CUDA context: {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    from wlb_megatron.attention.kernels.kernel_choice import kernels

    backend = kernels("fa4")
    print(f"FlashAttention-4 imported: {time.perf_counter() - began:.1f} s", flush=True)
    from wlb_megatron.attention.kernels.graph_buckets import Bucket
    from wlb_megatron.attention.kernels.warm_up import warm_up

    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "v_dim": 128, "scale": 128**-0.5}
    for causal in (True, False):
        for count in (1, 257):
            began = time.perf_counter()
            kind = (causal, None, Bucket(count, 128, 128 if causal else 256))
            warm_up(backend, [kind], **shape, dtype=torch.bfloat16, device="cuda")
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            print(f"{'causal' if causal else 'rectangle'}, {count} sequences: {took:.1f} s", flush=True)


def wait(started: list[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> None:
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


def compare_errors(args: argparse.Namespace) -> None:
    """Of each case and plan, the largest of FlashAttention-4's errors over cuDNN's (errors.csv)."""
    errors: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for name in ("cudnn", "fa4"):
        for path in sorted(args.out.glob(f"errors_{name}_*/breadth.csv")):
            with path.open(newline="") as file:
                for source in csv.DictReader(file):
                    plan = source["sharding"].removesuffix(", expected")
                    errors[source["case"], source["documents"], plan, source["cp"]][name] = source
    rows = []
    for (case, documents, plan, cp), both in sorted(errors.items()):
        row: dict[str, Any] = {"case": case, "documents": documents, "sharding": plan, "cp": cp}
        for tensor in ("out", "dq", "dk", "dv", "dsink"):
            for name in ("cudnn", "fa4"):
                row[f"{tensor}_{name}"] = both.get(name, {}).get(tensor, "")
        pairs = [(row[f"{t}_fa4"], row[f"{t}_cudnn"]) for t in ("out", "dq", "dk", "dv", "dsink")]
        ratios = [float(a) / float(b) for a, b in pairs if a and b]
        row["worst_fa4_over_cudnn"] = max(ratios, default=float("nan"))
        rows.append(row)
        if not ratios or row["worst_fa4_over_cudnn"] > 1.2:
            print(f"  above 1.2, or missing: {case}, {plan}, CP={cp}: {row['worst_fa4_over_cudnn']:.2f}")
    if rows:
        write_csv(args.out / "errors.csv", rows)
        worst = max(
            (r["worst_fa4_over_cudnn"] for r in rows if not math.isnan(r["worst_fa4_over_cudnn"])), default=0
        )
        print(
            f"{len(rows)} cases with plans, FlashAttention-4's errors at most {worst:.2f} times cuDNN's",
            flush=True,
        )
