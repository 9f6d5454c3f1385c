"""One training job of a small GPT through Megatron's own loop on this machine's CPUs, and what its log says."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.environment import cpu_environment

if TYPE_CHECKING:
    from scripts.warm_ranks import WarmRanks

MODEL = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
MACHINE = """--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
--no-persist-layer-norm"""
TRAINING = """--micro-batch-size 1 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2
--weight-decay 0.01 --clip-grad 1.0 --log-interval 1 --eval-iters 0 --seed 1234
--tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0"""

_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([0-9.Ee+-]+)")
_HELD_OUT = re.compile(
    r"validation loss at iteration (\d+)(?: on (validation|test) set)? \| lm loss value: ([0-9.Ee+-]+)"
)


@dataclass
class Losses:
    """Nats per token by iteration (from 1)."""

    training: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    test: dict[int, float] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Take up what a line of Megatron's log says."""
        if match := _HELD_OUT.search(line):
            held_out = self.test if match[2] == "test" else self.validation
            held_out[int(match[1])] = float(match[3])
        elif match := _LOSS.search(line):
            self.training[int(match[1])] = float(match[2])


def build_python_corpus(prefix: Path) -> None:
    """The Python standard library's sources as PREFIX.bin/.idx, byte by byte; nothing if they are there."""
    if not prefix.with_suffix(".idx").exists():
        command = [sys.executable, "-m", "scripts.corpus", str(prefix)]
        subprocess.run(command, env=cpu_environment(), check=True)


def arguments(flags: list[str], iterations: int) -> list[str]:
    """The small model's flags on the CPU, then `flags`, which override them."""
    return [*MODEL.split(), *MACHINE.split(), *TRAINING.split(), "--train-iters", str(iterations), *flags]


LIMIT = 3600
"""Seconds after which a job is given up."""


def run_job(name: str, flags: list[str], log: Path, *, ranks: WarmRanks, iterations: int) -> Losses:
    """Train with these flags, which come after the small model's and override them; shows a progress bar.

    log: file for the whole output. ranks: processes that have imported torch and Megatron once for all jobs.
    SystemExit with the log's tail if the job fails.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    losses = Losses()
    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, TextColumn("{task.fields[loss]}")) as progress,
        ThreadPoolExecutor(1) as pool,
    ):
        bar = progress.add_task(name, total=iterations, loss="starting")
        job = pool.submit(ranks.run, "train", arguments(flags, iterations), log, LIMIT)
        try:
            while True:
                ended = bool(wait([job], timeout=0.2).done)
                with suppress(FileNotFoundError):  # until the ranks have begun it
                    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                        losses.read(line)
                if losses.training:
                    at, loss = next(reversed(losses.training.items()))
                    progress.update(bar, completed=at, loss=f"loss {loss:.4f}")
                if ended:
                    break
        except BaseException:  # an interrupt: the pool would wait for the job
            ranks.close()
            raise
    if job.result():
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
        raise SystemExit(f"{tail}\nrun {name} failed; whole output: {log}")
    return losses
