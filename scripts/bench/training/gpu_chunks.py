"""Documents in chunks: losses beside one GPU's with whole documents, and a document of four windows trained whole.

python3 -m scripts.bench.training.gpu_chunks --lengths LENGTHS --out out/chunks

losses: one checkpoint, runs from it on the same documents, none delayed: --stages pipeline stages, each a GPU, with
chunks (of one and of two virtual stages) and with whole documents, and one GPU with one and with two micro-batches a
window. What the last two differ by is bf16's own noise. long: documents of four windows, as chunks (--wlb-overlong
chunk). whole: as a window of their own, which must not fit: 262,144 tokens and 128,256 words are 67 GB of logits in
bf16, 134 GB in fp32. The model has 8 layers of 2048, with full recompute; --vocabulary is the long document's. Logs and
losses.csv go to --out.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.training.gpu_train import ROOT, corpus, run
from wlb_megatron.report.files import write_csv

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WHOLE = ["--wlb-chunks", "off", "--wlb-max-delay", "0", "--wlb-micro-batches-per-window"]

VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]


def layouts(stages: int) -> dict[str, tuple[int, list[str]]]:
    """Name: (GPUs, flags). No documents wait, so an iteration has the same ones in each."""
    pipeline = pipelined(stages)
    return {
        f"pp{stages}-chunks": (stages, [*pipeline, "--wlb-chunks", "on"]),
        f"pp{stages}-vpp2-chunks": (stages, [*pipeline, *VIRTUAL, "--wlb-chunks", "on"]),
        **({f"pp{stages}-whole": (stages, [*pipeline, *WHOLE, "2"])} if stages > 1 else {}),
        "pp1-one": (1, [*WHOLE, "1"]),
        "pp1-two": (1, [*WHOLE, "2"]),
    }


def pipelined(stages: int) -> list[str]:
    return ["--pipeline-model-parallel-size", str(stages)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "chunks", help="folder of results")
    parser.add_argument("--lengths", type=Path, help=".npy of document lengths, below a window (for losses)")
    parser.add_argument("--sections", default="losses,long,whole", help="comma list (default: all three)")
    parser.add_argument("--runs", help="comma list for losses, pp1-one among them (default: all)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages and GPUs (default: 2)")
    parser.add_argument("--iterations", type=int, default=20, help="compared (default: 20)")
    parser.add_argument("--window", type=int, default=65536, help="tokens (default: 65536)")
    parser.add_argument(
        "--vocabulary", type=int, default=128256, help="of the long document (default: 128256)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for section in options.sections.split(","):
        {"losses": losses, "long": long_in_chunks, "whole": long_and_whole}[section](options)


def job(options: argparse.Namespace, **changed: Any) -> argparse.Namespace:
    """gpu_train.run's options, in warm processes."""
    usual = {
        "out": options.out,
        "script": None,
        "model": "2048",
        "extra": RECOMPUTE,
        "layers": 8,
        "seq_length": options.window,
        "global_batch_size": 2,
        "iterations": options.iterations,
        "warm_up": 3,
        "warm_ranks": True,
        "limit": 120.0,
    }
    return argparse.Namespace(**usual | changed)


def losses(options: argparse.Namespace) -> None:
    """Train each layout from one checkpoint; print by how much losses and gradient norms differ from pp1-one's."""
    prefix = corpus(options.out / "corpus", options.lengths)
    saved = options.out / "checkpoint"
    # A fifth of the usual rate: a model whose loss jumps would tell rounding apart by chaos.
    quiet = f"{RECOMPUTE} --lr 6e-5 --min-lr 6e-6 --ckpt-format torch_dist --no-save-optim"
    first = job(options, iterations=2, extra=f"{quiet} --save {saved} --save-interval 2 --lr-warmup-iters 0")
    if not run(
        "start-module", options.stages, [*pipelined(options.stages), "--wlb-chunks", "on"], prefix, first
    ):
        return
    later = job(options, extra=f"{quiet} --load {saved} --finetune")
    known = layouts(options.stages)
    rows = {
        name: run(f"{name}-module", *known[name], prefix, later)
        for name in (options.runs.split(",") if options.runs else known)
    }
    write_csv(options.out / "losses.csv", [row for run_rows in rows.values() for row in run_rows])
    base = {row["iteration"]: row for row in rows.get("pp1-one", [])}
    for name, run_rows in rows.items():
        same = [(row, base[row["iteration"]]) for row in run_rows if row["iteration"] in base]
        if not same:
            continue
        gaps = [abs(own["loss"] - other["loss"]) for own, other in same]
        norms = [abs(own["grad_norm"] / other["grad_norm"] - 1) for own, other in same]
        print(
            f"{name:12} against pp1-one over {len(same)} iterations: tokens "
            f"{'alike' if all(a['tokens'] == b['tokens'] for a, b in same) else 'DIFFER'}, "
            f"loss max {max(gaps):.5f} mean {sum(gaps) / len(gaps):.5f}, gradient norm max {max(norms):.2%}, "
            f"last loss {same[-1][0]['loss']:.5f}, peak {run_rows[-1]['peak_mb']:,.0f} MB",
            flush=True,
        )


def long_corpus(options: argparse.Namespace) -> Path:
    """Prefix of documents of which every third step has one of four windows."""
    lengths = options.out / "long.npy"
    rng = np.random.default_rng(5)
    short = np.maximum(rng.lognormal(np.log(1500), 1.0, 3000), 2).astype(np.int64)
    longest = np.arange(20, 3000, 300)
    np.save(lengths, np.insert(np.minimum(short, options.window // 2), longest, 4 * options.window))
    return corpus(options.out / "long", lengths)


def longest_whole(log: Path) -> str:
    """Tokens of the longest document that trains whole, by the line at start."""
    line = re.search(r"documents of up to ([0-9,]+) tokens", log.read_text(encoding="utf-8"))
    return line[1] if line else "unknown"


def words(options: argparse.Namespace) -> str:
    return f"{RECOMPUTE} --vocab-size {options.vocabulary} --tokenizer-type NullTokenizer"


def long_in_chunks(options: argparse.Namespace) -> None:
    """Train documents of four windows in chunks."""
    chunks = [*pipelined(options.stages), "--wlb-chunks", "on", "--wlb-overlong", "chunk"]
    # Else the document is split at twice the window.
    chunks += ["--max-position-embeddings", str(4 * options.window)]
    split = job(options, extra=words(options), global_batch_size=6, iterations=6)
    rows = run("long-chunks-module", options.stages, chunks, long_corpus(options), split)
    longest = longest_whole(options.out / "long-chunks-module.log")
    print(
        f"a document of {4 * options.window:,} tokens in chunks: {len(rows)} of 6 iterations; documents of up to "
        f"{longest} tokens train whole",
        flush=True,
    )
    for row in rows:
        print(
            f"  {row['tokens']:,} tokens, {row['micro_batches']} micro-batches, {row['ms']:,.0f} ms, loss {row['loss']}"
        )
    if rows:
        print(f"  peak {rows[-1]['peak_mb']:,.0f} MB")


def long_and_whole(options: argparse.Namespace) -> None:
    """Try the same with a window as long as the document, which must not fit."""
    whole = 4 * options.window
    extra = f"{words(options)} --lr-warmup-iters 0"
    options_whole = job(options, extra=extra, seq_length=whole, global_batch_size=2, iterations=2)
    rows = run(
        *("long-whole-module", options.stages, [*pipelined(options.stages), "--wlb-packing", "original"]),
        *(long_corpus(options), options_whole),
    )
    log = (options.out / "long-whole-module.log").read_text(encoding="utf-8")
    short = [line for line in log.splitlines() if "OutOfMemoryError" in line or "GiB are there" in line]
    end = (
        "it fits" if rows else f"it does not fit: {short[0]}" if short else "it failed otherwise, see the log"
    )
    print(f"the same whole, a window of {whole:,}: {end}", flush=True)


if __name__ == "__main__":
    main()
