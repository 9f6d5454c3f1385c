"""What a row of bench_packing.py is: a packer over lengths, and what is seen of its plans."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.lengths import sample_lengths
from wlb_megatron.documents.synthetic import cut_overlong
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import Packer, PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.delay_bound import Limits
from wlb_megatron.packing.varlen.thresholds import Repeated
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.workload.cost_model import CostModel

COST = CostModel(quadratic_at=24576)
WINDOW = 131072


@dataclass
class Timed:
    """A packer whose calls are timed: seconds of this process, without Python's garbage collector, whose passes
    take as long as the whole process has objects."""

    packer: Packer
    seconds: list[float] = field(default_factory=list)

    def pack(self, *args: Any) -> Any:
        gc.disable()
        start = time.process_time()
        packed = self.packer.pack(*args)
        self.seconds.append(time.process_time() - start)
        gc.enable()
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packer, name)


@dataclass
class Case:
    """One row: a packer over lengths. `packer`: makes it from a sample of the lengths."""

    section: str
    name: str
    lengths: np.ndarray
    packer: Callable[[Sequence[int]], Packer]
    window: int = WINDOW
    bins: int = 4
    iterations: int = 500
    labels: dict[str, Any] = field(default_factory=dict)

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        lengths = cut_overlong(self.lengths[self.lengths > 0], self.window)
        timed = Timed(self.packer(sample_lengths(lengths, self.window, "split")))
        planner = Planner(Repeated(lengths), timed, global_tokens=self.bins * self.window)
        seen, gaps = Seen(), []
        for _ in range(self.iterations):
            plan = planner.next_iteration()
            assert plan is not None
            seen.add(plan)
            gaps.append(getattr(timed.packer, "gap", None))
            tick()
        row = {"section": self.section, "packing": self.name, **self.labels, **seen.row(timed.seconds)}
        if self.section == "paper":
            row["gap"] = "" if gaps[0] is None else f"{100 * float(np.mean(gaps)):.1f} %"
        return row


class Seen:
    """Imbalance and delay over iterations."""

    def __init__(self) -> None:
        self.largest: list[int] = []
        self.mean: list[float] = []
        self.tokens: list[int] = []
        self.entry: dict[tuple[int, int, int], int] = {}
        self.tokens_of_delay: dict[int, int] = {}
        self.waiting: tuple[Piece, ...] = ()
        self.now = 0

    def add(self, plan: IterationPlan) -> None:
        work = [b.work for row in plan.micro_batches for b in row]
        self.largest.append(max(work))
        self.mean.append(sum(work) / len(work))
        self.tokens.append(sum(b.tokens for row in plan.micro_batches for b in row))
        self.now = plan.iteration
        self.arrive(plan)
        for row in plan.micro_batches:
            for micro_batch in row:
                self._count(micro_batch.pieces, plan.iteration)
        self.waiting = plan.waiting

    def arrive(self, plan: IterationPlan) -> None:
        for piece in plan.arrived:
            self.entry[piece.epoch, piece.document] = plan.iteration

    def _count(self, pieces: Sequence[Piece], iteration: int) -> None:
        for piece in pieces:
            delay = iteration - self.entry[piece.epoch, piece.document]
            self.tokens_of_delay[delay] = self.tokens_of_delay.get(delay, 0) + piece.end - piece.start

    def row(self, seconds: Sequence[float]) -> dict[str, Any]:
        latest = max(self.tokens_of_delay)
        self._count(self.waiting, self.now + 1)
        imbalance = np.array(self.largest) / np.array(self.mean)
        tokens = sum(self.tokens_of_delay.values())
        of_mean = np.array(self.tokens) / np.mean(self.tokens)
        return {
            "imbalance": f"{imbalance.mean():.3f}",
            "p95": f"{np.percentile(imbalance, 95):.3f}",
            "max": f"{imbalance.max():.3f}",
            "slowdown": f"{sum(self.largest) / sum(self.mean):.3f}",
            "delay": f"{sum(d * n for d, n in self.tokens_of_delay.items()) / tokens:.3f}",
            "tokens_std": f"{of_mean.std():.3f}",
            "tokens_least": f"{of_mean.min():.2f}",
            "tokens_most": f"{of_mean.max():.2f}",
            "latest": latest,
            "ms": f"{1e3 * float(np.mean(seconds[1:])):.2f}",
        }


def configured(window: int = WINDOW, bins: int = 4, **settings: Any) -> Callable[[Sequence[int]], Packer]:
    config = WlbConfig(**settings)
    return lambda sample: make_packer(
        PackingJob(config, COST, window=window, micro_batches=bins, sample=sample)
    )


def plain(
    thresholds: Sequence[int], delay: int, capacity: int, window: int = WINDOW
) -> Callable[..., Packer]:
    """The paper's algorithm as it stands: a level goes when it is full; with the bound on delay."""
    limits = Limits(bins=4, window=window, capacity=capacity, max_documents=4096, max_delay=delay)
    return lambda sample: VarlenPacker(COST, limits, thresholds, by_balance=False)
