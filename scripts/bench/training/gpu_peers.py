"""Whole steps on the same documents: this plugin, and what Megatron-LM itself has for packed sequences (two GPUs).

python -m scripts.bench.training.gpu_peers --megatron DEV --main MAIN --out out/peers

DEV: a checkout of branch dev. dcp: its dynamic context parallelism (default_dynamic_cp). MAIN: one of main with pull
request 6742. balanced: its dp_balanced; sft: packs of --sft; both with Transformer Engine's p2p. The references are DEV
with one document a forward, on one GPU and at CP=2 (a layout may begin with other weights), for a few steps.

All train the same documents in each step: they fill its windows exactly and are multiples of 8 tokens, so that
Megatron pads at most one token a document. Ours delays none. Losses are compared with the reference's; tokens/s are of
the steps after --warm-up.

Each of the three has its own rank processes, which train run after run (scripts/warm_ranks.py). All are started at once
and import while the documents are written. A run that fails or takes longer than --limit keeps the steps that it
printed; its row's `ended` says so. --earlier PEERS.CSV adds the rows of another call, if it had the same options.

With --conversations all train the same long-tailed conversations, with masks (peer_documents.py). A row has trained
tokens (targets) per second beside tokens per second, and the padding: what the model computed above the conversations'
tokens, over all that it computed. Steps of the three hold nearly, not exactly, the same ones; losses are not compared.

Runs that read one document an item use --num-workers 0: through worker processes each step waits for some 900 small
tensors, which on two H200s made it 1.8 times as long as that of --sft (`dcp-cp2-workers`).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.start import MODEL, STEP, TRAINING, add_training, environment, new_parser
from scripts.bench.training.peer_documents import Items, write_conversations, write_documents
from scripts.csv_files import write_csv
from scripts.lengths import lognormal, paper_like
from scripts.warm_ranks import WarmRanks

SFT = ["--sft", "--wlb-sft-mask-data", "--wlb-rehearsal", "off"]
"""Forwards of a rehearsal would count as padding."""
OURS = ["--split", "1,0,0", "--wlb-max-delay", "0", "--wlb-chunks", "off"]
THEIRS = """--calculate-per-token-loss --no-create-attention-mask-in-dataloader --dataloader-type single --split 1,0,0
--moe-token-dispatcher-type alltoall --null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257 --vocab-size 258"""
VARLEN = ["--use-varlen-dataset", "--num-workers", "0"]
BALANCED = [*VARLEN, "--sequence-packing-scheduler", "dp_balanced"]
ALONE = [*BALANCED, "--thd-max-packed-sequences", "1"]
DYNAMIC = [*VARLEN, "--dynamic-context-parallel"]
CP = ["--context-parallel-size", "2"]
RANK = "scripts.bench.training.peer_run"
PEAK = re.compile(r"\[peer\] rank \d+ peak MB: (\d+), held before: (\d+), computed: (\d+)")
IMPORTS = 120.0
"""Most that the processes may take to import (seconds)."""
SHORTEST = 16
"""Tokens of a conversation."""
Team = tuple[str, int]
"""Whose rank processes: a run's code, and how many."""


class Run(NamedTuple):
    """code: "-" for ours, else the flag that names the checkout. per_rank: --max-seqlen-per-dp-cp-rank, in windows (our
    Lmax is 1.5 windows a micro-batch). few: only --checked steps, since their losses are what is wanted."""

    code: str
    gpus: int
    flags: list[str]
    per_rank: float = 0.0
    few: bool = False


RUNS = {
    "ours-cp2": Run("-", 2, [*OURS, *CP]),
    "sft-cp2": Run("main", 2, ["--sft", *CP]),
    "dcp-cp2": Run("megatron", 2, [*DYNAMIC, *CP], 0.75),
    "ours-dp2": Run("-", 2, OURS),
    "sft-dp2": Run("main", 2, ["--sft"]),
    "dcp-dp2": Run("megatron", 2, DYNAMIC, 1.5),
    "balanced-cp2": Run("main", 2, [*BALANCED, *CP], 0.75),
    "balanced-dp2": Run("main", 2, BALANCED, 1.5),
    "ours-dynamic": Run("-", 2, [*OURS, "--wlb-cp-mode", "dynamic"]),
    "dcp-cp2-workers": Run("megatron", 2, [*DYNAMIC, *CP, "--num-workers", "2"], 0.75),
    "reference": Run("megatron", 1, ALONE, 1.0, few=True),
    "reference-cp2": Run("megatron", 2, [*ALONE, *CP], 0.5, few=True),
}
CONVERSATIONS = {
    "ours-cp2": Run("-", 2, [*SFT, *OURS, *CP]),
    "sft-cp2": RUNS["sft-cp2"],
    "ours-dp2": Run("-", 2, [*SFT, *OURS]),
    "sft-dp2": RUNS["sft-dp2"],
    "balanced-cp2": RUNS["balanced-cp2"],
    "balanced-dp2": RUNS["balanced-dp2"],
}


def main() -> None:
    parser = new_parser(__doc__, "peers")
    parser.add_argument(
        "--megatron", type=Path, help="folder with dev's megatron/, pretrain_gpt.py (for its runs)"
    )
    parser.add_argument("--main", type=Path, required=True, help="the same of main")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), help="default: all")
    parser.add_argument("--conversations", action="store_true", help="with masks, of any length")
    parser.add_argument(
        "--lengths", type=Path, help=".npy of document lengths (default: seeded, long-tailed)"
    )
    parser.add_argument("--seq-length", type=int, default=65536, help="window (tokens)")
    parser.add_argument("--windows", type=int, default=4, help="windows a step")
    parser.add_argument("--layers", type=int, default=4)
    add_training(parser, iterations=14, warm_up=6)
    parser.add_argument("--checked", type=int, default=6, help="iterations whose losses are compared")
    parser.add_argument("--limit", type=float, default=60.0, help="most that a run may take (seconds)")
    parser.add_argument("--seconds", type=float, default=240.0, help="no run is going on after so many")
    parser.add_argument("--earlier", type=Path, help="peers.csv of an earlier call, whose rows are added")
    parser.add_argument("--extra", default="", help="further flags for every run")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    runs = CONVERSATIONS if options.conversations else RUNS
    names = options.runs or list(runs)
    if unknown := set(names) - set(runs):
        parser.error(f"--conversations has no runs {sorted(unknown)}")
    if options.megatron is None and any(runs[name].code == "megatron" for name in names):
        parser.error("--megatron is needed for these --runs")
    options.out.mkdir(parents=True, exist_ok=True)
    earlier = [] if options.earlier is None else read_rows(options.earlier)
    for column, flag in (("window", "seq_length"), ("windows", "windows"), ("layers", "layers")):
        if others := {row[column] for row in earlier} - {str(getattr(options, flag))}:
            raise SystemExit(
                f"{options.earlier} was measured with --{flag.replace('_', '-')} {min(others)}: give that"
            )
    call = 1 + max((int(row["call"]) for row in earlier), default=0)
    prefix, count = options.out / "corpus" / "documents", options.iterations + 2
    teams = {(runs[name].code, runs[name].gpus): ranks(runs[name].gpus) for name in names}
    try:
        with ThreadPoolExecutor() as pool:
            imports = [pool.submit(begin, team, teams[team], options) for team in teams]
            corpus = write_corpus(prefix, count, options)
            failed = [team for team, imported in zip(teams, imports, strict=True) if imported.result()]
        print(f"documents written and all imported; failed: {failed or 'none'}", flush=True)
        rows = {row["run"]: row for row in earlier}
        losses = {name: [float(loss) for loss in row["losses"].split()] for name, row in rows.items()}
        for name in names:
            run, left = runs[name], until - time.monotonic()
            if left < 10.0:
                print(f"{name}: no time left", flush=True)
                continue
            began = time.monotonic()
            team = teams[run.code, run.gpus]
            steps, row = train(name, run, team, corpus, min(left, options.limit), options)
            losses[name] = [step["loss"] for step in steps[: options.checked]]
            rows[name] = {"call": call, **row, "losses": " ".join(map(str, losses[name]))}
            if not options.conversations:
                # All of them anew: the reference may be the run that ended now.
                rows = {each: {**row, **compare(each, losses)} for each, row in rows.items()}
            write_csv(options.out / "peers.csv", list(rows.values()))
            cells = ", ".join(f"{key} {value}" for key, value in rows[name].items())
            print(f"{cells}; {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for team in teams.values():
            team.close()
    table(list(rows.values()))


class Corpus(NamedTuple):
    """documents: a step's. items: of conversations, None for documents."""

    documents: int
    items: Items | None = None


def write_corpus(prefix: Path, steps: int, options: argparse.Namespace) -> Corpus:
    window, windows = options.seq_length, options.windows
    if options.lengths is not None:
        lengths = np.load(options.lengths, allow_pickle=False)
    elif options.conversations:
        lengths = np.maximum(lognormal(100_000, mean=1200, max_tokens=window), SHORTEST)
    else:
        lengths = paper_like(100_000, window=window)
    if not options.conversations:
        return Corpus(write_documents(prefix, lengths, window, windows, steps))
    items = write_conversations(prefix, lengths, window, windows * steps)
    of_pack = len(items.packs) / (int(items.packs[-1]) + 1)
    return Corpus(2 * round(of_pack * windows / 2), items)  # for two ranks


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ranks(count: int) -> WarmRanks:
    return WarmRanks(count, environment(PYTHONUNBUFFERED="1"))


def module(code: str, options: argparse.Namespace) -> list[str]:
    return [RANK, "-" if code == "-" else str(getattr(options, code))]


def begin(team: Team, processes: WarmRanks, options: argparse.Namespace) -> int:
    """Start them, and let them import their Megatron. 0 if they did."""
    name = f"imports-{team[0].replace('-', 'ours')}-{team[1]}"
    return processes.run("module", module(team[0], options), options.out / f"{name}.log", IMPORTS)


def train(
    name: str, run: Run, team: WarmRanks, corpus: Corpus, limit: float, options: argparse.Namespace
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """ms and loss of each step that was printed, and the run's row."""
    window, log = options.seq_length, options.out / f"{name}.log"
    batch = corpus.documents if "--use-varlen-dataset" in run.flags else options.windows
    figures = options.out / f"{name}.jsonl"
    figures.unlink(missing_ok=True)
    arguments = [
        *(MODEL.split() + TRAINING.split() + options.extra.split()),
        *("--num-layers", str(options.layers), "--data-path", str(options.out / "corpus" / "documents")),
        *("--seq-length", str(window), "--max-position-embeddings", str(2 * window)),
        *("--train-iters", str(options.iterations)),
        *("--global-batch-size", str(batch), *(["--exit-interval", str(options.checked)] if run.few else [])),
        *(["--wlb-log", str(figures)] if run.code == "-" else THEIRS.split()),
        *(["--max-seqlen-per-dp-cp-rank", str(int(run.per_rank * window))] if run.per_rank else []),
        *run.flags,
    ]
    status = team.run("module", module(run.code, options) + arguments, log, limit)
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    steps = [{"ms": float(step[2]), "loss": float(step[3])} for step in STEP.finditer(text)]
    wanted = options.checked if run.few else options.iterations
    ended = "well" if not status else f"failed or {limit:.0f} s over, after {len(steps)} of {wanted} steps"
    if status:
        print(text[-3000:], f"\n{name}: {ended}, see {log}", flush=True)
        team.start()  # others import while the next run trains
    ranks = PEAK.findall(text)
    row = summary(name, run, steps, ranks, ended, options)
    if corpus.items is not None and steps:
        computed = sum(int(count) for *_, count in ranks) if len(steps) == options.iterations else math.nan
        row |= rates(run, steps, batch, corpus.items, computed, figures, options.warm_up)
    return steps, row


def rates(
    run: Run,
    steps: list[dict[str, float]],
    batch: int,
    items: Items,
    computed: float,
    figures: Path,
    warm_up: int,
) -> dict[str, float]:
    """Of the steps after the warm-up, but for padding: of all. computed: tokens of all ranks' models."""

    def trained(first: int, end: int) -> tuple[int, int, int]:
        if run.code != "-":
            return items.sums(batch * first, batch * end, packed="--sft" in run.flags)
        rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()][first:end]
        return (*(sum(row[name] for row in rows) for name in ("tokens", "targets")), 0)

    seconds = sum(step["ms"] for step in steps[warm_up:]) / 1e3 or math.nan
    tokens, targets, _ = trained(warm_up, len(steps))
    every, _, conversations = trained(0, len(steps))
    # VarlenDataset leaves out each conversation's last token, which predicts nothing.
    needed = every - (conversations if "--use-varlen-dataset" in run.flags else 0)
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "targets_per_s": round(targets / seconds, 1),
        "padding": round(1 - needed / computed, 5),
    }


def summary(
    name: str,
    run: Run,
    steps: list[dict[str, float]],
    ranks: list[tuple[str, str, str]],
    ended: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """peak_mb: of a rank, the most; held_mb: what of it was there before the run."""
    nan, tokens = float("nan"), options.seq_length * options.windows
    timed = [step["ms"] for step in steps[options.warm_up :]]
    ms = timed or [nan]
    peak, held = max(((float(most), float(before)) for most, before, _ in ranks), default=(nan, nan))
    return {
        "run": name,
        "gpus": run.gpus,
        "window": options.seq_length,
        "windows": options.windows,
        "layers": options.layers,
        "steps": len(timed),
        "tokens_per_s": round(1e3 * tokens / np.mean(ms), 1),
        "median_ms": round(median(ms), 1),
        "peak_mb": peak,
        "held_mb": held,
        "ended": ended,
    }


def compare(name: str, losses: dict[str, list[float]]) -> dict[str, Any]:
    """loss_off: from the reference's of that layout, the most and the mean over the steps known of both; else nan."""
    named = "reference-cp2" if CP[0] in RUNS[name].flags else "reference"
    pairs = zip(losses[name], losses.get(named, []), strict=False)
    off = [gap for mine, theirs in pairs if not math.isnan(gap := abs(mine - theirs))] or [float("nan")]
    return {
        "loss_off_most": round(max(off), 5),
        "loss_off_mean": round(sum(off) / len(off), 5),
    }


def table(rows: list[dict[str, Any]]) -> None:
    columns = [
        "tokens_per_s",
        "targets_per_s",
        "padding",
        "median_ms",
        "peak_mb",
        "loss_off_most",
        "loss_off_mean",
    ]
    shown = [column for column in columns if any(column in row for row in rows)]
    print("\n" + f"{'run':15}" + "".join(f"{column:>15}" for column in shown))
    for row in rows:
        print(f"{row['run']:15}" + "".join(f"{row.get(column, ''):>15}" for column in shown))


if __name__ == "__main__":
    main()
