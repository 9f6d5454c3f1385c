"""Train the same GPT in several layouts on this machine's GPUs (NCCL, Transformer Engine, bf16) and compare.

python -m scripts.bench.training.gpu_train --gpus 2 --script ../Megatron-LM/pretrain_gpt.py --out out/gpu

cp1 / cpN: same documents on 1 and on N GPUs, through the launcher; cpN-module: -m wlb_megatron.pretrain_gpt, without a
--script; cp1-fa4-module and the like: by FlashAttention-4's kernels, or by cuDNN's; dynN and
dynN-cp: dynamic groups over all N, with CP=1 or N; *-plain: arrival order, per-sequence sharding, right document mask;
stock-*: Megatron without the plugin, without a document mask (its windows hold as many tokens, its loss is of another
task). Losses are compared with cp1's, or the first run's; times are medians of Megatron's own per-iteration times
after --warm-up. Logs, CSV and table go to --out.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from scripts.environment import ROOT, free_port
from scripts.warm_ranks import WarmRanks
from wlb_megatron.report.files import write_csv

MODEL = """--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention
--num-query-groups 4 --kv-channels 128 --normalization RMSNorm --swiglu --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
LAYERS_8B = (
    MODEL.replace("2048", "4096")
    .replace("5632", "14336")
    .replace("heads 16", "heads 32")
    .replace("groups 4", "groups 8")
)
MODELS = {"2048": MODEL, "8B-layers": LAYERS_8B}
"""Layers of 2048, and those of an 8B model (hidden 4096)."""
TRAINING = """--micro-batch-size 1 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 5 --bf16
--clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 1000 --seed 1234
--tokenizer-type NullTokenizer --vocab-size 257 --num-workers 2 --no-gradient-accumulation-fusion
--use-distributed-optimizer --distributed-backend nccl --log-throughput"""
STEP = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([0-9.]+).*?lm loss: ([0-9.Ee+-]+).*?"
    r"grad norm: ([0-9.]+)"
)
FIRST = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration\s+1/")
MEMORY = re.compile(r"max allocated: ([0-9.]+)")
WLB = ["--wlb-packing", "varlen"]
PLAIN = ["--wlb-packing", "original", "--wlb-sharding", "per-sequence"]
STOCK = ["--wlb-off", "--no-create-attention-mask-in-dataloader", "--split", "1,0,0"]


def runs(gpus: int) -> dict[str, tuple[int, list[str]]]:
    """Name: (GPUs, flags)."""
    cp, pp = ["--context-parallel-size", str(gpus)], ["--pipeline-model-parallel-size", str(gpus)]
    return {
        "cp1": (1, WLB),
        "cpN": (gpus, WLB + cp),
        "cpN-module": (gpus, WLB + cp),
        **{
            f"{layout}-{kernels}-module": (count, [*WLB, *flags, "--wlb-kernels", kernels])
            for kernels in ("cudnn", "fa4")
            for layout, count, flags in (("cp1", 1, []), ("cpN", gpus, cp))
        },
        "cpN-plain": (gpus, PLAIN + cp),
        "ppN": (gpus, WLB + pp),
        "ppN-plain": (gpus, PLAIN + pp),
        "dpN": (gpus, WLB),
        "dpN-plain": (gpus, PLAIN),
        "dynN": (gpus, [*WLB, "--wlb-cp-mode", "dynamic"]),
        "dynN-cp": (gpus, [*WLB, *cp, "--wlb-cp-mode", "dynamic"]),
        "stock-cp1": (1, STOCK),
        "stock-cpN": (gpus, STOCK + cp),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of the parallel runs")
    parser.add_argument("--script", type=Path, help="Megatron-LM's pretrain_gpt.py (needed but for *-module)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder of results")
    parser.add_argument("--runs", default="cp1,cpN,cpN-module", help="comma list of: " + ", ".join(runs(2)))
    parser.add_argument(
        "--data", type=Path, help="prefix of a .bin/.idx pair (default: made of Python's sources)"
    )
    parser.add_argument(
        "--lengths", type=Path, help=".npy: cut Python's sources into documents of these lengths"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=8, help="iterations left out of the times")
    parser.add_argument("--seq-length", type=int, default=32768, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--layers", type=int, default=8)
    add_model(parser)
    parser.add_argument("--extra", default="", help="further flags for every run")
    add_warm_ranks(parser)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.data or corpus(options.out / "corpus", options.lengths)
    results = {}
    for name in options.runs.split(","):
        results[name] = run(name, *runs(options.gpus)[name], prefix, options)
        print(f"{name}: {len(results[name])} iterations", flush=True)
        write_csv(options.out / "iterations.csv", [row for steps in results.values() for row in steps])
    report(results, options)


def corpus(folder: Path, lengths: Path | None) -> Path:
    prefix = folder / "python_sources"
    if not prefix.with_suffix(".idx").exists():
        cut = ["--lengths", str(lengths)] if lengths else []
        subprocess.run([sys.executable, "-m", "wlb_megatron.cli", "corpus", str(prefix), *cut], check=True)
    return prefix


def run(
    name: str,
    gpus: int,
    flags: list[str],
    prefix: Path,
    options: argparse.Namespace,
    extra_environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Per-iteration ms, loss, gradient norm, tokens (with the plugin) and peak memory (MB) of one run; start_s: seconds
    from its start to the end of step 1.

    work: in tokens of linear work, tokens and what their attention weighs (metrics.work_per_rank), of the first
    data-parallel rank's micro-batches. waiting_tokens: of documents held back after the iteration.
    """
    figures, log = options.out / f"{name}.jsonl", options.out / f"{name}.log"
    figures.unlink(missing_ok=True)
    spans = getattr(options, "spans", False)
    module = spans or options.script is None or name.endswith("module")
    arguments = [
        *(MODELS[options.model].split() + TRAINING.split() + options.extra.split()),
        *("--num-layers", str(options.layers), "--data-path", str(prefix), "--wlb-log", str(figures)),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size), "--train-iters", str(options.iterations)),
        *(["--wlb-log-plans"] if spans else []),
        *flags,
    ]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= extra_environment or {}
    started, began = time.perf_counter(), datetime.now()
    limit = getattr(options, "limit", None)
    if getattr(options, "warm_ranks", False):
        ranks = warm_ranks(gpus, environment, stock="--wlb-off" in flags)
        script = [] if module else [str(options.script)]
        noted = (options.out / f"{name}.spans", options.warm_up + 1) if spans else None
        status = ranks.run("train" if module else "launch", script + arguments, log, limit or 600.0, noted)
    else:
        entry = ["wlb_megatron.pretrain_gpt"] if module else ["wlb_megatron.launch", str(options.script)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus)),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", *entry, *arguments),
        ]
        status = finish(command, environment, log, limit)
    text = log.read_text(encoding="utf-8")
    if status:
        print(
            text[-4000:], f"\n{name} failed with status {status} after {time.perf_counter() - started:.0f} s"
        )
        return []
    tokens = {}
    if figures.exists():
        rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
        tokens = {row["iteration"]: row for row in rows}
    window = options.seq_length * options.global_batch_size
    first = FIRST.search(text)
    start = (datetime.fromisoformat(first[1]) - began).total_seconds() if first else float("nan")
    memory = max((float(megabytes) for megabytes in MEMORY.findall(text)), default=0.0)

    def figures_of(step: re.Match[str]) -> dict[str, Any]:
        """What the plugin's own figures tell of an iteration; of stock's there are none."""
        return tokens.get(int(step[1]), {})

    return [
        {
            "run": name,
            "iteration": int(step[1]),
            "ms": float(step[2]),
            "loss": float(step[3]),
            "grad_norm": float(step[4]),
            "tokens": figures_of(step).get("tokens", window),
            "work": sum(figures_of(step).get("micro_batch_work", [float("nan")])),
            "imbalance": figures_of(step).get("imbalance", float("nan")),
            "step_over_ideal": figures_of(step).get("step_over_ideal", float("nan")),
            "micro_batches": figures_of(step).get("micro_batches", options.global_batch_size),
            "cp_imbalance": figures_of(step).get("cp_imbalance", float("nan")),
            "waiting_tokens": figures_of(step).get("waiting_tokens", 0),
            "predicted_ms": figures_of(step).get("predicted_ms"),
            "peak_mb": memory,
            "recomputed_share": figures_of(step).get("recomputed_share"),
            "planned_peak_gib": figures_of(step).get("planned_peak_gib"),
            "peak_gib": figures_of(step).get("peak_gib"),
            "start_s": start,
        }
        for step in STEP.finditer(text)
    ]


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="2048", help="kind of layers (default: 2048 wide)")


def add_warm_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warm-ranks",
        action="store_true",
        help="train run after run in the same processes, stock Megatron and the plugin in their own: saves the start",
    )


@cache
def _pool(gpus: int, seen: str | None, stock: bool) -> WarmRanks:
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = WarmRanks(gpus, environment | ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}))
    atexit.register(ranks.close)
    return ranks


def warm_ranks(gpus: int, environment: dict[str, str], *, stock: bool) -> WarmRanks:
    """The processes on these GPUs, stock Megatron's or the plugin's."""
    return _pool(gpus, environment.get("CUDA_VISIBLE_DEVICES"), stock)


def finish(command: list[str], environment: dict[str, str], log: Path, limit: float | None) -> int:
    """torchrun's exit status, its output in `log`. After `limit` seconds it and its ranks are ended.

    Its ranks have sessions of their own: torchrun alone can end them, so it is first asked to.
    """
    with log.open("w", encoding="utf-8") as output:
        started = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return started.wait(limit)
        except subprocess.TimeoutExpired:
            started.terminate()
        try:
            return started.wait(40.0)  # it gives its ranks 30 s
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            return started.wait()


def report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """CSV of all iterations and a table: step time, tokens/s, memory, loss against cp1."""
    import torch

    rows = [row for run_rows in results.values() for row in run_rows]
    if not rows:
        raise SystemExit(1)
    named = "cp1" if "cp1" in results else next(iter(results))
    first = {row["iteration"]: row for row in results[named]}
    gpu = torch.cuda.get_device_name(0)
    print(
        f"\n{gpu} x {options.gpus}, torch {torch.__version__}, {options.layers} layers of 2048, window "
        f"{options.seq_length}, global batch {options.global_batch_size}, {options.iterations} iterations"
    )
    print(
        f"run            ms/step   tokens/s     work/s   imb. CP imb.  peak MB start s     loss {'vs ' + named:>22}"
    )
    for name, run_rows in results.items():
        timed = run_rows[options.warm_up :]
        if not timed:
            print(f"{name:12} failed")
            continue
        speed, worked = (
            sum(r[what] for r in timed) / sum(r["ms"] for r in timed) * 1e3 for what in ("tokens", "work")
        )
        gaps = [abs(r["loss"] - first[r["iteration"]]["loss"]) for r in run_rows if r["iteration"] in first]
        gap = f"max {max(gaps):.4f} mean {sum(gaps) / len(gaps):.4f}" if gaps else ""
        print(
            f"{name:12} {median(r['ms'] for r in timed):9.1f} {speed:10,.0f} {worked:10,.0f} "
            f"{sum(r['imbalance'] for r in timed) / len(timed):6.3f} "
            f"{sum(r['cp_imbalance'] for r in timed) / len(timed):7.3f} {timed[-1]['peak_mb']:8.0f} "
            f"{timed[-1]['start_s']:7.1f} "
            f"{run_rows[-1]['loss']:8.4f} {gap:>22}"
        )


if __name__ == "__main__":
    main()
