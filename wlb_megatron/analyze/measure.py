"""Figures of one packing and sharding over many iterations, from plans alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import documents_in_chunks
from wlb_megatron.plan import IterationPlan
from wlb_megatron.simulator.iteration import Orders, Simulated
from wlb_megatron.simulator.job import Job, Run
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN
from wlb_megatron.workload.model import Layout


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and largest of some figure."""

    mean: float
    max: float


def spread(values: npt.ArrayLike, weights: list[int] | None = None) -> Spread:
    """Spread of values, each counted `weights` times: values [0, 5], weights [96, 4] give 0.2 and 5."""
    v = np.asarray(values, dtype=np.float64)
    return Spread(float(np.average(v, weights=weights)), float(v.max())) if v.size else Spread(0.0, 0.0)


@dataclass
class Measured:
    """What a packing and sharding did, iteration by iteration.

    * simulated: times of the same iterations.
    * work: [iteration] float[micro-batch, dp], by the cost model (tokens of linear work).
    * delays: tokens by iterations of delay.
    * lengths: tokens of each micro-batch without padding.
    * totals: tokens of each iteration over all data-parallel ranks, without padding. long_tokens: those of documents
      (or pieces that train as one) above half a window.
    * chunked: [iteration][dp] the document of which each micro-batch has a chunk, or -1.
    * orders: [iteration][dp] sizes of the groups whose backwards run last first.
    """

    run: Run
    simulated: Simulated
    layout: Layout
    window: int
    work: list[npt.NDArray[np.float64]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    long_tokens: list[int] = field(default_factory=list)
    padding: int = 0
    delays: Counter[int] = field(default_factory=Counter)
    chunked: list[list[list[int]]] = field(default_factory=list)
    orders: Orders = ()

    @property
    def imbalance(self) -> Spread:
        """Work, max/mean over all micro-batches of all data-parallel ranks, over iterations."""
        return spread([float(grid.max() / grid.mean()) for grid in self.work])

    @property
    def token_delay(self) -> Spread:
        """Iterations from arrival to training, over tokens."""
        return spread(list(self.delays.keys()), list(self.delays.values()))

    @property
    def long_weight(self) -> float:
        """Weight in the gradient of a token of a document above half a window; 1 is that of a token in mean.

        A step's gradient is a mean over its tokens, so a token of a fuller step weighs less. Example: steps of 100 and
        300 tokens, 0 and 200 of them long, give (0 + 2/3) / 2 over 200/400: 0.67.
        """
        counts, totals = np.array(self.long_tokens), np.array(self.totals)
        return float((counts / totals).mean() / (counts.sum() / totals.sum())) if counts.any() else 1.0

    @property
    def batch_spread(self) -> tuple[float, float]:
        """Standard deviation of a step's tokens, and those of the fullest, over the mean's."""
        totals = np.array(self.totals)
        return float(totals.std() / totals.mean()), float(totals.max() / totals.mean())

    @property
    def documents_in_chunks(self) -> Spread:
        """Of all data-parallel ranks, over iterations."""
        return spread([sum(len({*documents} - {-1}) for documents in ranks) for ranks in self.chunked])

    @property
    def tokens(self) -> int:
        """Trained, without padding."""
        return sum(self.lengths)

    @property
    def steps(self) -> npt.NDArray[np.float64]:
        """Predicted time of each iteration (ms)."""
        return self.simulated.steps / 1e6

    @property
    def work_per_token(self) -> float:
        """Tokens of linear work for each trained token: less where documents are cut."""
        return sum(float(work.sum()) for work in self.work) / self.tokens


def waiting(simulated: Simulated, layout: Layout) -> dict[str, float]:
    """What a step spends besides its GPUs' computation, as shares of that, mean over iterations.

    They add up to step_over_ideal - 1. fill: filling and draining a pipeline of equal micro-batches.
    micro_batches: differences between micro-batches and stages, transfers, hosts. cp_ranks, dp_ranks: waiting for
    the slowest rank. after: gradients, optimizer, between steps.
    """
    ideal, paced = simulated.busy.mean(axis=(1, 2, 3)), simulated.paced.mean(axis=(1, 2))
    counts = np.array([len(times) for times in simulated.micro_batches])
    fill = paced * (layout.pipeline - 1) / layout.virtual / counts
    cp, dp = paced - ideal, simulated.paced.mean(axis=2).max(axis=1) - paced
    differences = simulated.pipeline - paced - fill - dp
    after = simulated.steps - simulated.pipeline
    shares = {"fill": fill, "micro_batches": differences, "cp_ranks": cp, "dp_ranks": dp, "after": after}
    return {name: float((ns / ideal).mean()) for name, ns in shares.items()}


def measure(job: Job, run: Run) -> Measured:
    """Gather the figures of a run's timed iterations."""
    unit = job.longest(run.config)  # tokens at which documents were split
    orders = () if run.shards is None else job.times(run.config).orders(run.timed_plans)
    record = Measured(run, run.simulated, job.model.layout, job.window, orders=orders)
    entered: dict[tuple[int, int, int], int] = {}
    for place, plan in enumerate(run.plans, -job.warm_up):
        for piece in plan.arrived:
            entered[piece.epoch, piece.document, piece.start // unit] = plan.iteration
        for piece in (piece for row in plan.micro_batches for m in row for piece in m.pieces):
            # A cut leaves the parts inside the piece that arrived, which began at a multiple of `unit`.
            arrival = entered[piece.epoch, piece.document, piece.start // unit]
            if place >= 0:
                record.delays[plan.iteration - arrival] += piece.tokens
        queue = {(p.epoch, p.document, p.start // unit): None for p in plan.waiting}
        entered = {key: entered[key] for key in queue}
        if place >= 0:
            _add(record, plan)
    record.padding = int(run.simulated.tokens.sum()) - record.tokens
    return record


def _add(record: Measured, plan: IterationPlan) -> None:
    grid = [micro_batch for row in plan.micro_batches for micro_batch in row]
    work = np.array([[m.work for m in row] for row in plan.micro_batches], dtype=np.float64)
    record.work.append(work / UNITS_PER_TOKEN)
    record.lengths += [micro_batch.tokens for micro_batch in grid]
    record.totals.append(sum(micro_batch.tokens for micro_batch in grid))
    counts: Counter[tuple[int, int, int]] = Counter()  # pieces of a document that train as one: its chunks
    for piece in (piece for micro_batch in grid for piece in micro_batch.pieces):
        counts[piece.epoch, piece.document, piece.start - piece.prefix] += piece.tokens
    record.long_tokens.append(sum(n for n in counts.values() if 2 * n > record.window))
    record.chunked.append(
        [documents_in_chunks([m.pieces for m in column]) for column in zip(*plan.micro_batches, strict=True)]
    )
