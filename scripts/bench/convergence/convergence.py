"""Does reordering documents cost loss? One GPT on the same tokens, plain, with WLB, and balanced over 8 batches.

Each run trains through Megatron's own loop in one process. Held-out documents are evaluated whole, and cut to windows
in arrival order as plain packing trains them, whatever the arm. An arm's loss minus plain's of the same seed (same
weights, same document stream) is set against seed noise, the standard deviation of plain over seeds. The corpus is
Python sources, byte by byte: one document a file, those longer than a window left out; or, joined and cut anew, as
long-tailed for the window as WLB-LLM's figure 3, each token given once.

    python -m scripts.bench.convergence.convergence --seeds 12 --workers 2
        a small model on the CPU
    python -m scripts.bench.convergence.convergence --device cuda --size large --documents long-tailed \\
        --seq-length 4096 --held-out 4
        8 layers of 512 on a GPU, bf16

Each run's figures are kept under --out and not made again: start it anew to go on, or with more --seeds to add some.
Writes a table (also convergence.txt), convergence.csv (every evaluation), convergence.json and convergence.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.convergence.convergence_report import report, write
from scripts.environment import ROOT, cpu_environment, free_port
from scripts.megatron_job import Losses, arguments
from wlb_megatron.documents.synthetic import KINDS

ARMS = {
    "plain": "--wlb-packing original",
    "wlb": "--wlb-packing varlen",
    "greedy-8": "--wlb-packing fixed-greedy --wlb-balance-batches 8",
    "no-delay": "--wlb-packing varlen --wlb-max-delay 0",
}
"""greedy-8 is the paper's warning: windows balanced over 8 global batches, which reorders documents most. no-delay
tells what variable-length packing does without any reordering."""

SIZES = {
    "small": """--num-layers 2 --num-attention-heads 2 --num-query-groups 1 --init-method-std 0.05
    --lr 1e-2 --min-lr 1e-4 --lr-warmup-iters 8 --adam-beta2 0.95""",
    "large": """--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --num-query-groups 2 --kv-channels 64 --lr 1e-3 --min-lr 1e-5 --lr-warmup-iters 16 --adam-beta2 0.95""",
}
DEVICES = {
    "cpu": "",
    "cuda": "--distributed-backend nccl --wlb-rehearsal never --transformer-impl transformer_engine --bf16",
}
CPU_ALONE = "--use-cpu-initialization"
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "convergence", help="folder of results")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(ARMS)[1:],
        default=list(ARMS)[1:],
        help="what is compared with plain",
    )
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="model")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no run later than this; what is there is reported",
    )
    parser.add_argument("--iterations", type=int, default=120, help="training steps; a multiple of 8")
    parser.add_argument("--eval-interval", type=int, default=48, help="iterations between evaluations")
    parser.add_argument("--seq-length", type=int, default=1024, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--held-out", type=int, default=20, help="percent of the documents, the last ones")
    parser.add_argument("--documents", choices=("files", "long-tailed"), default="files")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of Python sources (default: the standard library)",
    )
    options = parser.parse_args()
    if options.seeds < 2 or options.iterations % 8 or not 0 < options.eval_interval <= options.iterations:
        parser.error("give at least 2 seeds, iterations in multiples of 8, and an interval within them")
    if not 0 < options.held_out < 100 or options.workers < 1:
        parser.error("give --held-out between 1 and 99 (percent) and at least 1 worker")
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = corpus(options)
    flags = common_flags(prefix, options)
    # Seed by seed, so that what is done can be compared at any time.
    jobs = [(arm, seed) for seed in range(1, options.seeds + 1) for arm in ("plain", *options.arms)]
    results = dict(zip(jobs, train_all(jobs, flags, options), strict=True))
    done = [
        seed
        for seed in range(1, options.seeds + 1)
        if all(results[arm, seed] for arm in ("plain", *options.arms))
    ]
    if len(done) < 2:
        raise SystemExit(f"only {len(done)} seeds are complete: start again to go on, or allow more time")
    report({arm: [results[arm, seed] for seed in done] for arm in ("plain", *options.arms)}, options)


def corpus(options: argparse.Namespace) -> Path:
    """Prefix of the .bin/.idx pair, made if it is not there."""
    prefix = Path(options.out / "corpus" / f"{options.documents}_{options.seq_length}_{options.iterations}")
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        cut = ["--longest", str(options.seq_length)]
        if options.documents == "long-tailed":
            needed = options.iterations * options.global_batch_size * options.seq_length
            lengths = KINDS["paper-like"](needed // 16, 0) * options.seq_length // 131072 + 1
            lengths = lengths[
                : np.searchsorted(np.cumsum(lengths), 1.1 * needed * 100 / (100 - options.held_out))
            ]
            np.save(prefix.with_suffix(".npy"), lengths)
            cut = ["--lengths", str(prefix.with_suffix(".npy"))]
        script = ROOT / "scripts" / "build_corpus.py"
        command = [sys.executable, str(script), str(prefix), "--files", str(options.text), *cut]
        subprocess.run(command, env=cpu_environment(), check=True)
    return prefix


def common_flags(prefix: Path, options: argparse.Namespace) -> list[str]:
    """What all arms and seeds share. An evaluation goes through all held-out documents, so every seed has the same."""
    from wlb_megatron.documents.blend import split_bounds
    from wlb_megatron.documents.indexed import read_index

    split = f"{100 - options.held_out},{options.held_out},0"
    lengths = read_index(prefix).lengths
    held_out = lengths[slice(*split_bounds(split, len(lengths))[1])]
    if not held_out.any():
        raise SystemExit(f"no held-out file has at most {options.seq_length} bytes: raise --seq-length")
    batches = -(-int(held_out.sum()) // (options.seq_length * options.global_batch_size))
    print(f"{lengths.sum():,} tokens, of these held out {held_out.sum():,}")
    text = (
        f"{SIZES[options.size]} {DEVICES[options.device]} --split {split} --eval-iters {batches} "
        f"--eval-interval {options.eval_interval} --seq-length {options.seq_length} "
        f"--max-position-embeddings {2 * options.seq_length} --global-batch-size {options.global_batch_size}"
    )
    return [*text.split(), "--data-path", str(prefix)]


def train_all(
    jobs: list[tuple[str, int]], flags: list[str], options: argparse.Namespace
) -> Iterator[Result | None]:
    """Each job's result, in order; None for one that time did not allow."""
    from rich.progress import track

    started = time.monotonic()

    def run(job: tuple[str, int]) -> Result | None:
        late = time.monotonic() - started > options.stop_after
        return train(*job, flags, options, only_kept=late)

    with ThreadPoolExecutor(options.workers) as pool:
        yield from track(pool.map(run, jobs), "training", len(jobs))


def train(
    arm: str, seed: int, common: list[str], options: argparse.Namespace, *, only_kept: bool
) -> Result | None:
    """One run's losses and figures of its plans; read from its file if it was made with the same flags."""
    kept = options.out / f"{arm}-{seed}.json"
    figures, log = kept.with_suffix(".jsonl"), kept.with_suffix(".log")
    flags = arguments(
        [*common, *ARMS[arm].split(), "--seed", str(seed), "--wlb-log", str(figures)], options.iterations
    )
    if options.device != "cpu":  # Megatron would leave such a model on the CPU
        flags.remove(CPU_ALONE)
    if kept.exists():
        result = json.loads(kept.read_text(encoding="utf-8"))
        if result["flags"] == flags:
            return dict(result)
    if only_kept:
        return None
    figures.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "scripts.bench.convergence.convergence_run", *flags]
        done = subprocess.run(
            command,
            env=environment(options.device),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text(encoding="utf-8").splitlines()
    if done.returncode:
        tail = "\n".join(text[-15:])
        raise SystemExit(
            f"{tail}\nrun {arm} {seed} failed with status {done.returncode}; whole output: {log}"
        )
    losses = Losses()
    for line in text:
        losses.read(line)
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    tokens = [row["tokens"] for row in rows]
    result = {
        "arm": arm,
        "seed": seed,
        "flags": flags,
        "validation": losses.validation,
        "cut_windows": losses.test[options.iterations],
        "training": losses.training,
        "tokens": sum(tokens),
        "token_delay": float(np.average([row["token_delay"] for row in rows], weights=tokens)),
        "imbalance": float(np.mean([row["imbalance"] for row in rows])),
        "seconds": round(time.monotonic() - started, 1),
    }
    write(kept, json.dumps(result, indent=1))
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def environment(device: str) -> dict[str, str]:
    """Of a run: one process, without the torchrun that several would need."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    if device == "cpu":
        return {**cpu_environment(), **alone}
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **alone, **quiet, "PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


if __name__ == "__main__":
    main()
