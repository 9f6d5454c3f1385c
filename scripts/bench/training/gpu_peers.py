"""Whole steps on the same documents: this plugin, and what Megatron-LM itself has for packed sequences (two GPUs).

python -m scripts.bench.training.gpu_peers --megatron DEV --main MAIN --out out/peers

DEV: a checkout of branch dev. dcp: its dynamic context parallelism (default_dynamic_cp). MAIN: one of main with pull
request 6742. balanced: its dp_balanced; sft: packs of --sft; both with Transformer Engine's p2p. The references are DEV
with one document a forward, on one GPU and at CP=2 (a layout may begin with other weights), for a few steps.

All train the same documents in each step: they fill its windows exactly and are multiples of 8 tokens, so that
Megatron pads at most one token a document. Ours delays none. Losses are compared with the reference's; tokens/s are of
the steps after --warm-up. A run that fails or takes longer than --limit gets a row with no figures, and its log.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.training.gpu_train import MODEL, STEP, TRAINING, finish, warm_ranks
from scripts.bench.training.peer_documents import write_documents
from scripts.environment import ROOT, free_port
from wlb_megatron.documents.synthetic import paper_like
from wlb_megatron.report.files import write_csv

OURS = ["--split", "1,0,0", "--wlb-max-delay", "0", "--wlb-chunks", "off"]
THEIRS = """--calculate-per-token-loss --no-create-attention-mask-in-dataloader --dataloader-type single --split 1,0,0
--moe-token-dispatcher-type alltoall --null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257 --vocab-size 258"""
BALANCED = ["--use-varlen-dataset", "--sequence-packing-scheduler", "dp_balanced"]
ALONE = [*BALANCED, "--thd-max-packed-sequences", "1"]
DYNAMIC = ["--use-varlen-dataset", "--dynamic-context-parallel"]
CP = ["--context-parallel-size", "2"]
RANK = "scripts.bench.training.peer_run"
PEAK = re.compile(r"\[peer\] rank \d+ peak MB: (\d+)")


class Run(NamedTuple):
    """code: "-" for ours, else the flag that names the checkout. per_rank: --max-seqlen-per-dp-cp-rank, in windows (our
    Lmax is 1.5 windows a micro-batch). few: only --checked steps, since their losses are what is wanted."""

    code: str
    gpus: int
    flags: list[str]
    per_rank: float = 0.0
    few: bool = False


RUNS = {
    "reference": Run("megatron", 1, ALONE, 1.0, few=True),
    "reference-cp2": Run("megatron", 2, [*ALONE, *CP], 0.5, few=True),
    "ours-cp2": Run("-", 2, [*OURS, *CP]),
    "dcp-cp2": Run("megatron", 2, [*DYNAMIC, *CP], 0.75),
    "sft-cp2": Run("main", 2, ["--sft", *CP]),
    "ours-dp2": Run("-", 2, OURS),
    "dcp-dp2": Run("megatron", 2, DYNAMIC, 1.5),
    "sft-dp2": Run("main", 2, ["--sft"]),
    "balanced-cp2": Run("main", 2, [*BALANCED, *CP], 0.75),
    "balanced-dp2": Run("main", 2, BALANCED, 1.5),
    "ours-dynamic": Run("-", 2, [*OURS, "--wlb-cp-mode", "dynamic"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron", type=Path, required=True, help="folder with dev's megatron/, pretrain_gpt.py"
    )
    parser.add_argument("--main", type=Path, required=True, help="the same of main")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "peers", help="folder of results")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--lengths", type=Path, help=".npy of document lengths (default: seeded, long-tailed)"
    )
    parser.add_argument("--seq-length", type=int, default=65536, help="window (tokens)")
    parser.add_argument("--windows", type=int, default=4, help="windows a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--warm-up", type=int, default=6, help="iterations left out of the times")
    parser.add_argument("--checked", type=int, default=6, help="iterations whose losses are compared")
    parser.add_argument("--limit", type=float, default=60.0, help="most that a run may take (seconds)")
    parser.add_argument("--seconds", type=float, default=240.0, help="no run begins after so many")
    parser.add_argument("--extra", default="", help="further flags for every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    lengths = (
        paper_like(100_000, window=options.seq_length)
        if options.lengths is None
        else np.load(options.lengths, allow_pickle=False)
    )
    prefix, count = options.out / "corpus" / "documents", options.iterations + 2
    documents = write_documents(prefix, lengths, options.seq_length, options.windows, count)
    told: dict[str, list[dict[str, float]]] = {}
    rows: list[dict[str, Any]] = []
    for name in options.runs:
        if time.monotonic() > until:
            print(f"{name}: no time left", flush=True)
            continue
        told[name], peak = train(name, RUNS[name], documents, options)
        rows.append(summary(name, told, peak, options))
        write_csv(options.out / "peers.csv", rows)
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    table(rows)


def train(
    name: str, run: Run, documents: int, options: argparse.Namespace
) -> tuple[list[dict[str, float]], float]:
    """ms and loss of each step, and the most memory (MB) of a rank; no steps where the run failed."""
    window, log = options.seq_length, options.out / f"{name}.log"
    batch = documents if "--use-varlen-dataset" in run.flags else options.windows
    arguments = [
        *(MODEL.split() + TRAINING.split() + options.extra.split()),
        *("--num-layers", str(options.layers), "--data-path", str(options.out / "corpus" / "documents")),
        *("--seq-length", str(window), "--max-position-embeddings", str(2 * window)),
        *("--train-iters", str(options.iterations)),
        *("--global-batch-size", str(batch), *(["--exit-interval", str(options.checked)] if run.few else [])),
        *([] if run.code == "-" else THEIRS.split()),
        *(["--max-seqlen-per-dp-cp-rank", str(int(run.per_rank * window))] if run.per_rank else []),
        *run.flags,
    ]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    module = [RANK, "-" if run.code == "-" else str(getattr(options, run.code)), *arguments]
    if run.code == "-":
        status = warm_ranks(run.gpus, environment, stock=False).run("module", module, log, options.limit)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(run.gpus)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", *module]
        status = finish(command, environment, log, options.limit)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if status:
        print(text[-3000:], f"\n{name}: failed, see {log}", flush=True)
    found = [{"ms": float(step[2]), "loss": float(step[3])} for step in STEP.finditer(text)]
    return found, max(map(float, PEAK.findall(text)), default=float("nan"))


def summary(
    name: str, told: dict[str, list[dict[str, float]]], peak: float, options: argparse.Namespace
) -> dict[str, Any]:
    """loss_off: from the reference's of that layout, the most and the mean over the steps checked; nan without one."""
    timed, nan = told[name][options.warm_up :], float("nan")
    named = "reference-cp2" if CP[0] in RUNS[name].flags else "reference"
    pairs = zip(told[name][: options.checked], told.get(named, []), strict=False)
    off = [abs(mine["loss"] - theirs["loss"]) for mine, theirs in pairs] or [nan]
    ms = [step["ms"] for step in timed] or [nan]
    tokens = options.seq_length * options.windows
    return {
        "run": name,
        "gpus": RUNS[name].gpus,
        "window": options.seq_length,
        "windows": options.windows,
        "layers": options.layers,
        "steps": len(timed),
        "tokens_per_s": round(1e3 * tokens / np.mean(ms), 1),
        "median_ms": round(median(ms), 1),
        "peak_mb": peak,
        "loss_off_most": round(max(off), 5),
        "loss_off_mean": round(sum(off) / len(off), 5),
        "losses": " ".join(str(step["loss"]) for step in told[name][: options.checked]),
    }


def table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'run':14} {'tokens/s':>9} {'ms':>8} {'peak MB':>8} {'loss off, most':>15} {'mean':>9}")
    for row in rows:
        print(
            f"{row['run']:14} {row['tokens_per_s']:>9} {row['median_ms']:>8} {row['peak_mb']:>8} "
            f"{row['loss_off_most']:>15} {row['loss_off_mean']:>9}"
        )


if __name__ == "__main__":
    main()
