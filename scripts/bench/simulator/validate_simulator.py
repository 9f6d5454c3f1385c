"""Real Megatron steps on two GPUs against the simulator's prediction of the same plans.

python3 -m scripts.bench.simulator.validate_simulator --out out/validate
    profile, train, simulate, compare
python3 -m scripts.bench.simulator.validate_simulator --out out/validate --simulate-only
    from what lies there
python3 -m scripts.bench.simulator.validate_simulator --again docs/results/2x_h200 --out out/validate
    today's predictions of stored plans and times, without a GPU

CP=2, PP=2 and DP=2, each plain (arrival order, per-sequence sharding) and balanced, on mixes of document lengths,
of a GPT of --layers x 2048 at a window of 32K. The profile is measured first, or given by --profile. All runs go
through the same two processes (warm_ranks.py), begun until --minutes are over; one that fails is reported and left out.
--out gets profile.json, runs.tgz (logs, plans, spans of forwards and backwards), iterations.csv, runs.csv and, where
matplotlib is, scatter.png; runs.tgz is whole after each run. Errors are of whole iterations, Megatron's own "elapsed
time per iteration", the first --warm-up ones left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from scripts.bench.simulator.validate_compare import SHAPE, WINDOW, compare, predicted, print_comparison
from scripts.bench.start import MODEL, PLAIN, TRAINING, WLB, add_training, environment, new_parser
from scripts.warm_ranks import WarmRanks
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.whole_files import renamed_at_end
from wlb_megatron.workload.profile import read_profile

PROFILED = """--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --num-query-groups 4 --kv-channels 128
--vocab-size 384 --swiglu"""
FLAGS = {
    "cp2": ["--context-parallel-size", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
}
SCHEMES = {"plain": PLAIN, "wlb": [*WLB, "--wlb-chunks", "off"]}
"""Steps with documents in chunks are compared by bench_micro_batches.py."""
MIXES = ("long-tailed", "half-long", "short")
ROUNDS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
"""Mix of each layout, by round: the first round has all layouts and all mixes."""
Job = tuple[str, str, str, str]
"""Name, layout, scheme and mix of a run."""


def main() -> None:
    parser = new_parser(__doc__, "validate")
    parser.add_argument("--profile", type=Path, help="of this model (default: made first, in --out)")
    parser.add_argument("--grid", default="reduced", help="of the profile that is made (default: reduced)")
    parser.add_argument("--budget", type=float, default=75, help="of the profile (seconds; default: 75)")
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--again", type=Path, help="folder of profile_2048.json and validation_*")
    parser.add_argument("--layouts", default="cp2,pp2,dp2")
    add_training(parser, iterations=12, warm_up=3)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--global-batch-size", type=int, default=4, help="windows a step")
    parser.add_argument("--rounds", type=int, default=len(ROUNDS), help="mixes of each layout")
    parser.add_argument(
        "--only", default="", help="these runs, as cp2-plain-short, comma list (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=7, help="begin no run that would end after this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.again is not None:
        made = read_profile(options.again / "profile_2048.json")
        print_comparison(predicted(options.again, made), made, int(SHAPE.layers), options.out)
        return
    profile = options.profile or options.out / "profile.json"
    with tempfile.TemporaryDirectory() as scratch:
        if not options.simulate_only:
            train(options, profile, Path(scratch))
        elif (options.out / "runs.tgz").exists():
            with tarfile.open(options.out / "runs.tgz") as archive:
                archive.extractall(scratch, filter="data")
        if not profile.exists():
            raise SystemExit(
                f"no profile {profile}: make it, then --simulate-only compares the runs that are there"
            )
        all_jobs = jobs(options.layouts.split(","), len(ROUNDS))
        compare(Path(scratch), all_jobs, read_profile(profile), options.layers, options.warm_up, options.out)


def jobs(layouts: list[str], rounds: int) -> list[Job]:
    """Every run, in order."""
    return [
        (f"{layout}-{scheme}-{mix}", layout, scheme, mix)
        for mixes in ROUNDS[:rounds]
        for layout in layouts
        for mix in [MIXES[mixes[list(FLAGS).index(layout)]]]
        for scheme in SCHEMES
    ]


def train(options: argparse.Namespace, profile: Path, scratch: Path) -> None:
    """Profile and run what time allows; logs, plans and spans come to lie in `scratch`, and in --out's archive."""
    began = time.perf_counter()
    ranks = WarmRanks(2, environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        ranks.start()
        corpora = build_corpora(options, scratch)
        print(f"corpora: at {time.perf_counter() - began:.0f} s", flush=True)
        if not profile.exists():
            make_profile(options, profile, ranks, scratch)
            print(f"profile: at {time.perf_counter() - began:.0f} s", flush=True)
        taken = [20.0]  # seconds of runs in warm processes; new ones take half a minute more
        only = set(options.only.split(",")) - {""}
        for name, layout, scheme, mix in jobs(options.layouts.split(","), options.rounds):
            if only and name not in only:
                continue
            left = options.minutes * 60 - (time.perf_counter() - began)
            need = 1.1 * max(taken[-4:]) + 30 * (not ranks.warm)
            if left < need:
                print(f"{name}: left out, {left:.0f} s remain of --minutes", flush=True)
                continue
            start = time.perf_counter()
            spans = (scratch / f"{name}.spans", options.warm_up + 1)
            log = scratch / f"{name}.log"
            flags = arguments(options, profile, scratch / f"{name}.jsonl", corpora[mix])
            limit = min(left + 10, 100)
            warm = ranks.warm
            failed = ranks.run("train", flags + SCHEMES[scheme] + FLAGS[layout], log, limit, spans)
            lasted = time.perf_counter() - start
            if failed:
                print(f"{name} failed after {lasted:.0f} s: {tail(log)}", flush=True)
            elif warm:
                taken.append(lasted)
            print(f"{name}: {lasted:.0f} s, ends at {time.perf_counter() - began:.0f} s", flush=True)
            archive(scratch, options.out / "runs.tgz")
    finally:
        ranks.close()


def arguments(options: argparse.Namespace, profile: Path, lines: Path, prefix: Path) -> list[str]:
    """Megatron's flags of a run, without its layout's and scheme's."""
    return [
        *(MODEL.split() + TRAINING.split()),
        *("--num-layers", str(options.layers), "--data-path", str(prefix), "--wlb-log", str(lines)),
        *("--seq-length", str(WINDOW), "--max-position-embeddings", str(2 * WINDOW), "--wlb-log-plans"),
        *("--global-batch-size", str(options.global_batch_size), "--train-iters", str(options.iterations)),
        *(["--wlb-profile", str(profile)] if profile.exists() else []),
    ]


def make_profile(options: argparse.Namespace, profile: Path, ranks: WarmRanks, scratch: Path) -> None:
    flags = ["--out", str(profile), "--grid", options.grid, "--budget", str(options.budget)]
    log = scratch / "profile.log"
    status = ranks.run("profile", flags + PROFILED.split(), log, options.budget + 80)
    print(log.read_text(encoding="utf-8")[-5000:] if log.exists() else "")
    if status:
        print(f"the profile failed: {tail(log)}; the runs go on without", flush=True)
    archive(scratch, options.out / "runs.tgz")


def tail(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-3000:] if log.exists() else "no log"


def archive(folder: Path, path: Path) -> None:
    """All but the corpora, in a file that is whole at any time."""
    with renamed_at_end(path) as scratch, tarfile.open(scratch, "w:gz") as packed:
        for file in sorted(folder.iterdir()):
            if file.is_file():
                packed.add(file, file.name)


def build_corpora(options: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Of each mix, Python's sources cut to its lengths, of enough documents for a run."""
    folder = scratch / "corpus"
    folder.mkdir()
    builds = []
    for mix in MIXES:
        lengths = folder / f"{mix}.npy"
        np.save(lengths, mix_lengths(mix, 2 * options.iterations * options.global_batch_size * WINDOW))
        build = [sys.executable, "-m", "scripts.corpus", str(folder / mix)]
        builds.append(subprocess.Popen([*build, "--lengths", str(lengths)]))
    if max(build.wait() for build in builds):
        raise SystemExit("a corpus could not be built: see above")
    return {mix: folder / mix for mix in MIXES}


def mix_lengths(mix: str, tokens: int) -> np.ndarray:
    """int64[n]: seeded document lengths of about `tokens` in all."""
    rng = np.random.default_rng(11)
    if mix == "long-tailed":
        lengths = long_tailed(WINDOW, 20_000, 3)
    elif mix == "half-long":
        short = rng.lognormal(np.log(900), 0.9, 20_000)
        lengths = np.where(
            rng.random(20_000) < 0.05, rng.uniform(12_000, WINDOW, 20_000), np.minimum(short, 6000)
        )
    else:
        lengths = np.minimum(rng.lognormal(np.log(700), 0.8, 20_000), 8000)
    lengths = np.maximum(lengths, 2).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]


if __name__ == "__main__":
    main()
