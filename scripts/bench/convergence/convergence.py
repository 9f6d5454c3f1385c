"""Does reordering documents cost loss? One GPT trained on the same documents in other orders, many seeds of each.

Each run trains through Megatron's own loop in one process, the learning rate decaying linearly to zero, and evaluates
the same held-out documents once, at the end. An arm's loss minus plain's of the same seed (same first weights, same
document stream) is averaged over seeds. Documents are functions of Python sources, byte by byte. Work is weighed as at
a window of 128K, so that as many documents wait, as long, as there.

From scratch, seeds differ by when a model learns to copy from its context, which no pairing removes. With --starts,
runs go on from weights that were trained beforehand in arrival order on other files (seed s from start s mod --starts),
with a new optimizer.

    python -m scripts.bench.convergence.convergence --seeds 4 --workers 2
        a small model on the CPU
    python -m scripts.bench.convergence.convergence --device cuda --size large --seq-length 4096 --iterations 512 \\
        --held-out 1000000 --workers 14 --seeds 24 --seconds 340 --text FOLDER
        4 layers of 512, as many runs at a time as there are cores; stops by itself
        --starts 4 --start-iterations 1280: the same from four trained models
    python -m scripts.bench.convergence.convergence_report out/a/runs.jsonl out/b/runs.jsonl --out DIR
        table, CSV and picture of several calls' runs

Each run is appended to runs.jsonl under --out when it is done, and not made again: start anew to go on. Options that
change what is trained are kept there, too; others given later are refused. On another machine go on with --first-seed,
and report both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.convergence.convergence_report import read_runs, report
from scripts.bench.start import environment, new_parser
from scripts.environment import ROOT, cpu_environment
from scripts.megatron_job import Losses, arguments
from scripts.warm_ranks import WarmRanks
from wlb_megatron.whole_files import renamed_at_end

ARMS = {
    "plain": "--wlb-packing original",
    "wlb": "--wlb-packing varlen --wlb-chunks off",
    "no-delay": "--wlb-packing varlen --wlb-chunks off --wlb-max-delay 0",
    "wlb-equal": "--wlb-packing varlen --wlb-chunks off --wlb-token-weights equal",
    "chunks": "--wlb-packing varlen --wlb-chunks on",
    "cut": "--wlb-packing original",
    "sorted": "--wlb-packing original",
    "unmasked": "--wlb-packing original",
}
"""wlb-equal: a token weighs the same in every step. no-delay: variable-length packing without any reordering. Its
documents are whole, plain's are cut at the ends of windows: cut is between the two. chunks: no-delay's documents in
each step, in more and smaller micro-batches. sorted and unmasked must change the loss (controls.py)."""
FEWER = ("chunks", "sorted", "unmasked")
"""Arms of fewer seeds: chunks take twice as long and can be paired with no-delay, controls show at once."""

SIZES = {
    "small": "--num-layers 2 --num-attention-heads 2 --num-query-groups 1 --init-method-std 0.05 --lr 3e-3",
    "large": """--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --num-query-groups 2 --kv-channels 64 --lr 1e-3""",
}
DEVICES = {
    "cpu": "",
    "cuda": "--distributed-backend nccl --wlb-rehearsal never --transformer-impl transformer_engine --bf16",
}
CPU_ALONE = ("--use-cpu-initialization", "--no-rope-fusion")
FASTER = "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled --wlb-max-documents 256"
"""Without a device synchronisation in each micro-batch, and with few sizes of kernel graphs to build."""


def main() -> None:
    parser = new_parser(__doc__, "convergence")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--fewer-seeds", type=int, default=4, help=f"runs of {', '.join(FEWER)}, at most")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS)[1:], default=list(ARMS)[1:])
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the workers are spread over")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="model")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end then, with what is done")
    parser.add_argument("--iterations", type=int, default=128, help="training steps")
    parser.add_argument("--starts", type=int, default=0, help="models trained beforehand (default: none)")
    parser.add_argument("--start-iterations", type=int, default=1024, help="their training steps")
    parser.add_argument("--seq-length", type=int, default=1024, help="window (tokens)")
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--held-out", type=int, default=200_000, help="tokens to evaluate on")
    parser.add_argument("--extra", default="", help="further flags for every run")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of Python sources (default: the standard library)",
    )
    options = parser.parse_args()
    if min(options.seeds, options.workers, options.gpus, options.iterations, options.held_out) < 1:
        parser.error("--seeds, --workers, --gpus, --iterations and --held-out must be at least 1")
    if options.starts < 0 or options.start_iterations < 1:
        parser.error("--starts must be at least 0, --start-iterations at least 1")
    keep_options(options)
    Experiment(options, time.monotonic() + options.seconds).run()


KEPT = (
    *("device", "size", "iterations", "starts", "start_iterations", "seq_length", "global_batch_size"),
    *("held_out", "extra"),
)
"""Options that change the corpus, the starts or the runs."""


def keep_options(options: argparse.Namespace) -> None:
    """Write those of the first call under --out. SystemExit where a later one has others: runs would not compare."""
    now, kept = {name: getattr(options, name) for name in KEPT}, options.out / "options.json"
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        changed = [f"--{name.replace('_', '-')} {before[name]}" for name in KEPT if before[name] != now[name]]
        if changed:
            raise SystemExit(
                f"{options.out} was begun with {', '.join(changed)}: give that, or another --out"
            )
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with renamed_at_end(kept) as scratch:
        scratch.write_text(json.dumps(now), encoding="utf-8")


def start_of(at: int) -> str:
    return f"start-{at}"


def is_start(job: str) -> bool:
    return job.startswith("start-")


class Experiment:
    """Runs of all arms and seeds, several at a time, each worker in a process of its own that stays warm."""

    def __init__(self, options: argparse.Namespace, until: float) -> None:
        self._options, self._until = options, until
        self._kept = options.out / "runs.jsonl"
        self._lock = threading.Lock()
        self._latest = 0.0  # seconds of the run that ended last
        self._failed: list[str] = []
        self._facts = corpora(options)
        self._ranks = [WarmRanks(1, worker_environment(options, index)) for index in range(options.workers)]

    def run(self) -> None:
        """Train what is not there, then report. SystemExit where a run failed."""
        options, starts = self._options, [(start_of(at), 1001 + at) for at in self._missing()]
        try:
            # Workers without a start to train import meanwhile: 15 s on a GPU.
            for ranks in self._ranks[: max(len(starts), len(self._jobs()))]:
                ranks.start()
            self._all(starts, self._train_start)
            missing = self._missing()  # whose runs would begin from scratch
            if not missing:
                self._all(self._jobs(), self._train_arm)
        finally:
            for ranks in self._ranks:
                ranks.close()
        runs = read_runs([self._kept])
        if len([run for run in runs if run["arm"] == "plain"]) > 1:
            report(runs, options.out)
        if self._failed:
            raise SystemExit(f"failed: {', '.join(self._failed)}; their logs are in {options.out}")
        if missing:
            raise SystemExit(
                f"time was over before all starts were trained, {len(missing)} are missing: go on"
            )

    def _missing(self) -> list[int]:
        """Numbers of the starts without a whole checkpoint; Megatron writes this file after all others."""
        return [
            at
            for at in range(self._options.starts)
            if not (self._folder(start_of(at)) / "latest_checkpointed_iteration.txt").exists()
        ]

    def _jobs(self) -> list[tuple[str, int]]:
        """Seed by seed, so that what is done can be compared at any time; without the runs that are there."""
        options, first = self._options, self._options.first_seed
        jobs = [
            (arm, seed)
            for seed in range(first, first + options.seeds)
            for arm in ("plain", *options.arms)
            if arm not in FEWER or seed < first + options.fewer_seeds
        ]
        there = {
            (run["arm"], run["seed"])
            for run in read_runs([self._kept])
            if run["flags"] == self._flags(run["arm"], run["seed"]) and run["corpus"] == self._facts["digest"]
        }
        return [job for job in jobs if job not in there]

    def _all(self, jobs: list[tuple[str, int]], train: Callable[[str, int, WarmRanks], None]) -> None:
        """Train job after job in each worker, until none is left or time is over."""
        left = deque(jobs)

        def work(ranks: WarmRanks) -> None:
            while True:
                with self._lock:
                    if not left or time.monotonic() + 1.05 * self._latest > self._until:
                        return
                    job = left.popleft()
                train(*job, ranks)

        workers = [threading.Thread(target=work, args=(ranks,)) for ranks in self._ranks[: len(left)]]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _train_arm(self, arm: str, seed: int, ranks: WarmRanks) -> None:
        """Train a run and keep what it gave."""
        started = time.monotonic()
        if (result := self._train(arm, seed, ranks)) is None:
            return
        with self._lock:
            self._latest = time.monotonic() - started
            with self._kept.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(result) + "\n")
            print(f"{arm} {seed}: {result['held_out_loss']:.4f}, {result['seconds']} s", flush=True)

    def _folder(self, start: str) -> Path:
        """Of the checkpoint of a start."""
        return self._options.out / start

    def _flags(self, arm: str, seed: int) -> list[str]:
        options = self._options
        corpus, part, iterations = options.out / "corpus", "train", options.iterations
        schedule = "--lr-decay-style linear --min-lr 0"
        if is_start(arm):
            part, iterations = "start", options.start_iterations
            schedule = (
                f"--lr-decay-style constant --save {self._folder(arm)} --save-interval {iterations} "
                "--ckpt-format torch_dist --no-save-optim"
            )
        elif options.starts:
            begin = self._folder(start_of(seed % options.starts))
            schedule += f" --load {begin} --finetune --ckpt-format torch_dist"
        text = (
            f"{SIZES[options.size]} {DEVICES[options.device]} {FASTER} {ARMS.get(arm, ARMS['plain'])} --seed {seed} "
            f"--adam-beta2 0.95 {schedule} --lr-warmup-iters {iterations // 10} "
            f"--wlb-quadratic-at {3 * options.seq_length // 16} --wlb-document-cost 0 "
            f"--full-validation --eval-iters 1 --eval-interval {iterations + 1} "
            f"--seq-length {options.seq_length} --max-position-embeddings {2 * options.seq_length} "
            f"--global-batch-size {options.global_batch_size} "
            f"--train-data-path {corpus / part} --valid-data-path {corpus / 'held-out'} {options.extra}"
        )
        flags = arguments(text.split(), iterations)
        # Megatron would leave such a model on the CPU.
        return [flag for flag in flags if options.device == "cpu" or flag not in CPU_ALONE]

    def _train_start(self, name: str, seed: int, ranks: WarmRanks) -> None:
        """Weights that arms go on from, in a folder of that name."""
        began = time.monotonic()
        shutil.rmtree(self._folder(name), ignore_errors=True)  # half a checkpoint
        if not self._run_job(name, seed, ranks):
            print(f"{name}: trained, {time.monotonic() - began:.0f} s", flush=True)

    def _run_job(self, arm: str, seed: int, ranks: WarmRanks) -> int:
        """Train; the exit status. A failure is noted, unless time ran out."""
        name, out = f"{arm}-{seed}", self._options.out
        log, figures = out / f"{name}.log", out / f"{name}.steps.jsonl"
        figures.unlink(missing_ok=True)
        result, flags = out / f"{name}.json", [*self._flags(arm, seed), "--wlb-log", str(figures)]
        job = ["scripts.bench.convergence.convergence_run", arm, str(result), *flags]
        status = ranks.run("module", job, log, max(1.0, min(self._until - time.monotonic(), 1e6)))
        if status and time.monotonic() < self._until:
            self._failed.append(name)
            print(f"{name} failed: {log}", *log.read_text(encoding="utf-8").splitlines()[-15:], sep="\n")
        return status

    def _train(self, arm: str, seed: int, ranks: WarmRanks) -> dict[str, Any] | None:
        """One run's losses and figures of its plans; None if it failed or time ran out."""
        name, out = f"{arm}-{seed}", self._options.out
        result, figures, log = (out / f"{name}{end}" for end in (".json", ".steps.jsonl", ".log"))
        started = time.monotonic()
        if self._run_job(arm, seed, ranks):
            return None
        losses = Losses()
        for line in log.read_text(encoding="utf-8").splitlines():
            losses.read(line)
        steps = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
        tokens, delay, imbalance = (
            [step[key] for step in steps] for key in ("tokens", "token_delay", "imbalance")
        )
        return {
            "arm": arm,
            "seed": seed,
            **json.loads(result.read_text(encoding="utf-8")),
            "token_delay": float(np.average(delay, weights=tokens)),
            "imbalance": float(np.mean(imbalance)),
            "tokens": sum(tokens),
            "seconds": round(time.monotonic() - started, 1),
            "training": [losses.training[step["iteration"]] for step in steps],
            "corpus": self._facts["digest"],
            "flags": self._flags(arm, seed),
        }


def corpora(options: argparse.Namespace) -> dict[str, Any]:
    """The facts of the corpora, which are made if they are not there."""
    folder = options.out / "corpus"
    facts = folder / "facts.json"
    if not facts.exists():
        needed = int(1.05 * options.iterations * options.global_batch_size * options.seq_length)
        sizes = {"window": options.seq_length, "train": needed, "held-out": options.held_out}
        if options.starts:
            sizes["start"] = needed * options.start_iterations // options.iterations
        command = [
            sys.executable,
            "-m",
            "scripts.bench.convergence.text",
            str(folder),
            "--text",
            str(options.text),
        ]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        if subprocess.run(command, env=cpu_environment(), cwd=ROOT).returncode:
            raise SystemExit(1)  # text.py has said why
    made = json.loads(facts.read_text(encoding="utf-8"))
    print(
        *(
            f"{part}: {made[part]['documents']:,} documents, {made[part]['tokens']:,} tokens"
            for part in sorted(set(made) - {"digest"}, reverse=True)
        ),
        sep="\n",
    )
    return dict(made)


def worker_environment(options: argparse.Namespace, worker: int) -> dict[str, str]:
    """Of a worker's process."""
    if options.device == "cpu":
        return cpu_environment()
    seen = str(worker % options.gpus)
    return environment(CUDA_VISIBLE_DEVICES=seen, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")


if __name__ == "__main__":
    main()
