#!/usr/bin/env python3
"""Fine-tune a small GPT through Megatron's own loop on this machine's CPUs: --sft on two processes, PP=2.

The conversations are questions about the Python standard library with docstrings as answers; a tenth is held out. The
model begins with random weights, so that its answers mean nothing; its held-out loss falls. Writes logs under --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.environment import ROOT, cpu_environment
from scripts.megatron_job import run_job
from scripts.sft_conversations import build
from scripts.warm_ranks import WarmRanks
from wlb_megatron.errors import fatal

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "sft_job", help="folder of results")
    parser.add_argument("--iterations", type=int, default=10, help="training steps")
    parser.add_argument("--seq-length", type=int, default=512, help="window (tokens)")
    parser.add_argument("--conversations", type=int, default=3000, help="at most, held-out ones among them")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ranks = WarmRanks(PROCESSES, {**cpu_environment(), "PYTHONUNBUFFERED": "1"})  # the bar reads their log
    try:
        ranks.start()  # they import while the data is made
        train, held_out, tokenizer = build(options.out / "data", options.conversations)
        log, figures = options.out / "train.log", options.out / "train.jsonl"
        figures.unlink(missing_ok=True)
        flags = [
            *("--pipeline-model-parallel-size", str(PROCESSES), "--global-batch-size", "8"),
            *(
                "--seq-length",
                str(options.seq_length),
                "--max-position-embeddings",
                str(4 * options.seq_length),
            ),
            *("--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(tokenizer)),
            *("--sft-tokenizer-prompt-format", "default", "--wlb-sft-assistant-only"),
            *("--train-data-path", str(train), "--valid-data-path", str(held_out)),
            *("--eval-iters", "2", "--eval-interval", str(options.iterations), "--wlb-log", str(figures)),
        ]
        losses = run_job("sft", flags, log, ranks=ranks, iterations=options.iterations)
    finally:
        ranks.close()
    rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    said = [
        line[2:] for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("> wlb_megatron")
    ]
    print("\n".join(line for line in said if "conversations" in line))
    tokens, targets = (sum(row[name] for row in rows) for name in ("tokens", "targets"))
    first, last = losses.training[1], losses.training[options.iterations]
    print(f"{tokens:,} tokens in {options.iterations} steps, {targets:,} of them trained: those of answers")
    print(f"loss of a target: {first:.3f} in the first step, {last:.3f} in the last")
    print(f"held-out conversations: {next(reversed(losses.validation.values())):.3f}")
    print(f"the whole log: {log}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # --out, most often
        raise SystemExit(fatal(str(error))) from None
