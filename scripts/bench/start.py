"""What benchmarks start with: options, a corpus, an environment, ranks that train a GPT, and a row for each iteration.

The GPT has layers of 2048, or those of an 8B model, in bf16 with Transformer Engine over NCCL.
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
from typing import Any

from scripts.environment import ROOT, free_port
from scripts.warm_ranks import WarmRanks

MODEL = """--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention
--num-query-groups 4 --kv-channels 128 --normalization RMSNorm --swiglu --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
LAYERS_8B = (
    MODEL.replace("2048", "4096")
    .replace("5632", "14336")
    .replace("heads 16", "heads 32")
    .replace("groups 4", "groups 8")
)
LAYERS_70B = LAYERS_8B.replace("4096", "8192").replace("14336", "28672").replace("heads 32", "heads 64")
LAYERS_30B_A3B = (
    f"{MODEL.replace('5632', '6144').replace('heads 16', 'heads 32')} --qk-layernorm --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-router-force-load-balancing"
)
"""Routers of so short a run send all tokens to the same eight experts, so logits are random (Megatron's own switch)."""
MODELS = {
    "2048": MODEL,
    "8B-layers": LAYERS_8B,
    "70B-layers": LAYERS_70B,
    "30B-A3B-layers": LAYERS_30B_A3B,
}
"""Layers of 2048, those of an 8B and a 70B model (hidden 4096, 8192), and Qwen3-30B-A3B's."""
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


def new_parser(description: str | None, folder: str) -> argparse.ArgumentParser:
    """A benchmark's options, with --out: by default out/`folder`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=ROOT / "out" / folder, help="folder of results")
    return made


def add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="prefix of a .bin/.idx pair (default: Python's sources)")
    parser.add_argument(
        "--lengths", type=Path, help=".npy: cut Python's sources into documents of these lengths"
    )


def add_training(parser: argparse.ArgumentParser, *, iterations: int, warm_up: int) -> None:
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--warm-up", type=int, default=warm_up, help="iterations left out of the times")


def environment(**more: str) -> dict[str, str]:
    """A rank's environment on GPUs: this process's, with `more`."""
    return {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore", **more}


def corpus(options: argparse.Namespace) -> Path:
    """The prefix of the documents that --data or --lengths name; made below --out if they are not there."""
    if options.data:
        return options.data
    prefix = options.out / "corpus" / "python_sources"
    if not prefix.with_suffix(".idx").exists():
        cut = ["--lengths", str(options.lengths)] if options.lengths else []
        subprocess.run([sys.executable, "-m", "scripts.corpus", str(prefix), *cut], check=True)
    return prefix


def run(
    name: str, gpus: int, flags: list[str], prefix: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train on `prefix`'s documents with these flags; a row for each iteration, none if the run failed.

    options: out, model, extra, layers, seq_length, global_batch_size, iterations, warm_up, script, warm_ranks, spans.
    Rows have ms, loss, gradient norm, tokens (with the plugin), the run's peak memory (MB), and start_s: seconds from
    its start to the end of step 1. work: of all ranks, in tokens of linear work. waiting_tokens: of documents held back
    after the iteration.
    """
    figures, log = options.out / f"{name}.jsonl", options.out / f"{name}.log"
    figures.unlink(missing_ok=True)
    module = options.spans or options.script is None
    arguments = [
        *(MODELS[options.model].split() + TRAINING.split() + options.extra.split()),
        *("--num-layers", str(options.layers), "--data-path", str(prefix), "--wlb-log", str(figures)),
        *("--seq-length", str(options.seq_length), "--max-position-embeddings", str(2 * options.seq_length)),
        *("--global-batch-size", str(options.global_batch_size), "--train-iters", str(options.iterations)),
        *(["--wlb-log-plans"] if options.spans else []),
        *flags,
    ]
    started, began = time.perf_counter(), datetime.now()
    if options.warm_ranks:
        ranks = _warm_ranks(gpus, stock="--wlb-off" in flags)
        script = [] if module else [str(options.script)]
        noted = (options.out / f"{name}.spans", options.warm_up + 1) if options.spans else None
        status = ranks.run("train" if module else "launch", script + arguments, log, 600.0, noted)
    else:
        entry = ["wlb_megatron.pretrain_gpt"] if module else ["wlb_megatron.launch", str(options.script)]
        status = torchrun(gpus, [*entry, *arguments], environment(), log)
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
            "work": figures_of(step).get("work", float("nan")),
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


@cache
def _warm_ranks(gpus: int, *, stock: bool) -> WarmRanks:
    """The processes that train run after run, stock Megatron's or the plugin's."""
    ranks = WarmRanks(gpus, environment())
    atexit.register(ranks.close)
    return ranks


def torchrun(
    gpus: int, module: list[str], environment: dict[str, str], log: Path, limit: float | None = None
) -> int:
    """The exit status of a module with its arguments on fresh ranks, ended after `limit` seconds; output in `log`.

    Its ranks have sessions of their own: torchrun alone can end them, so it is first asked to.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", *module),
    ]
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
