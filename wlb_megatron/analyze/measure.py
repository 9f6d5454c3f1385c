"""Figures of one packing and sharding over many iterations, from plans alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wlb_megatron.packing.packer import Ranks
from wlb_megatron.pipeline.step_law import StepLaw
from wlb_megatron.plan import IterationPlan, MicroBatch
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.chunks import links_of
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.select import shard_all
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, 95th percentile and largest of some figure."""

    mean: float
    p95: float
    max: float


def spread(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Spread:
    """Spread of values, each counted `weights` times: values [0, 5], weights [96, 4] give 0.2, 0, 5."""
    v = np.asarray(values, dtype=np.float64)
    w = np.ones_like(v) if weights is None else np.asarray(weights, dtype=np.float64)
    if not w.sum():
        return Spread(0.0, 0.0, 0.0)
    order = np.argsort(v, kind="stable")
    reached = np.cumsum(w[order])
    p95 = v[order][np.searchsorted(reached, 0.95 * reached[-1])]
    return Spread(float((v * w).sum() / w.sum()), float(p95), float(v[w > 0].max()))


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the window (tokens) from which over-long documents are split."""

    window: int
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1


@dataclass
class Measured:
    """What a packing and sharding did, iteration by iteration.

    law: what a step takes of the slowest context-parallel ranks' work; cp: how many share a micro-batch.
    work: [iteration] float[micro-batch, dp], by the cost model (tokens of linear work). times: that of the
    slowest context-parallel rank. cp_imbalance: max/mean over a micro-batch's ranks. delays: tokens by iterations
    of delay. lengths: tokens of each micro-batch without padding; documents: its pieces. totals: tokens of each
    iteration over all data-parallel ranks, without padding.
    """

    law: StepLaw = field(default_factory=StepLaw)
    cp: int = 1
    work: list[npt.NDArray[np.float64]] = field(default_factory=list)
    times: list[npt.NDArray[np.float64]] = field(default_factory=list)
    cp_imbalance: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    padding: int = 0
    delays: Counter[int] = field(default_factory=Counter)

    @property
    def imbalance(self) -> Spread:
        """Work, max/mean over all micro-batches of all data-parallel ranks, over iterations."""
        return spread([float(grid.max() / grid.mean()) for grid in self.work])

    @property
    def token_delay(self) -> Spread:
        """Iterations from arrival to training, over tokens."""
        return spread(list(self.delays.keys()), list(self.delays.values()))

    @property
    def steps(self) -> npt.NDArray[np.float64]:
        """Predicted time of each iteration: 1F1B of the slowest data-parallel rank (tokens of linear work)."""
        grids = (np.rint(times * UNITS_PER_TOKEN).astype(np.int64).T.tolist() for times in self.times)
        return np.array([self.law.step(grid) for grid in grids]) / UNITS_PER_TOKEN

    @property
    def step_over_ideal(self) -> Spread:
        """Predicted step over the same work spread evenly over all ranks with no bubble."""
        ideal = np.array([work.sum() / work.shape[1] / self.cp for work in self.work])
        return spread(self.steps / ideal)


def measure(plans: Iterable[IterationPlan], sharding: str, cost: CostModel, layout: Layout) -> Measured:
    """Go through the plans and gather their figures."""
    own = CostModel(1.0, 0.0, cost.per_micro_batch / layout.cp)  # each rank's own part
    measured = Measured(Ranks(layout.dp, layout.pp).law(own), layout.cp)
    entered: dict[tuple[int, int, int], int] = {}
    for plan in plans:
        for piece in plan.arrived:
            entered[piece.epoch, piece.document, piece.start // layout.window] = plan.iteration
        for piece in (piece for row in plan.micro_batches for m in row for piece in m.pieces):
            # A cut leaves the parts inside the piece that arrived, which began at a multiple of the window.
            arrival = entered[piece.epoch, piece.document, piece.start // layout.window]
            measured.delays[plan.iteration - arrival] += piece.tokens
        waiting = {(p.epoch, p.document, p.start // layout.window): None for p in plan.waiting}
        entered = {key: entered[key] for key in waiting}
        _add(measured, plan, sharding, cost, layout)
    return measured


def _add(measured: Measured, plan: IterationPlan, sharding: str, cost: CostModel, layout: Layout) -> None:
    grid = [micro_batch for row in plan.micro_batches for micro_batch in row]
    padded = [_padded_lengths(micro_batch, layout.cp * layout.tp) for micro_batch in grid]
    links = links_of([micro_batch.pieces for micro_batch in grid])
    shards = shard_all(padded, layout.cp, sharding, links=links)
    shares = np.array([rank_work(shard, cost) for shard in shards])
    work = np.array([[m.work for m in row] for row in plan.micro_batches], dtype=np.float64)
    measured.work.append(work / UNITS_PER_TOKEN)
    measured.times.append(shares.max(axis=1).reshape(-1, layout.dp))
    measured.cp_imbalance += (shares.max(axis=1) / shares.mean(axis=1)).tolist()
    measured.lengths += [micro_batch.tokens for micro_batch in grid]
    measured.totals.append(sum(micro_batch.tokens for micro_batch in grid))
    measured.documents += [len(micro_batch.pieces) for micro_batch in grid]
    measured.padding += sum(map(sum, padded)) - sum(micro_batch.tokens for micro_batch in grid)


def _padded_lengths(micro_batch: MicroBatch, alignment: int) -> list[int]:
    lengths = [piece.end - piece.start for piece in micro_batch.pieces]
    missing = padding(sum(lengths), alignment)
    return [*lengths, missing] if missing else lengths


def rank_work(plan: ShardPlan, cost: CostModel) -> list[float]:
    """Work of each context-parallel rank (tokens of linear work): its tokens, its queries' keys, its segments.

    Queries [s, e) of a document see (e*e - s*s)/2 keys, so a whole document of d tokens costs d + d*d/quadratic_at.
    """
    shares = []
    for rows in plan.ranks:
        start, end = rows[:, 1].astype(np.float64), rows[:, 2].astype(np.float64)
        attention = (end * end - start * start).sum() / cost.quadratic_at
        shares.append(float((end - start).sum() + attention + cost.per_document * len(rows)))
    return shares
