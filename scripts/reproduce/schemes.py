"""The packing and sharding schemes that are compared: today's practice, WLB-LLM as its paper says, and this
project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from scripts.reproduce.paper import Setting
from scripts.reproduce.solver import BatchesPlanner, FixedGreedyPacker, FixedSolverPacker
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths, Rules
from wlb_megatron.documents.lengths import sample_lengths
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.factory import plan_job
from wlb_megatron.packing.packer import PackingJob, Ranks
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.items import Limits
from wlb_megatron.packing.varlen.release import ReleaseChoice, Situation
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker, lmax
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.cut import cut_plans, predict_all, shard_all
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.sharding.slots import multiple, padded
from wlb_megatron.simulator.iteration import Shards
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.cost_model import CostModel

QUEUES = {1: (1 / 2,), 2: (3 / 8, 11 / 16), 3: (3 / 8, 11 / 16, 7 / 8)}
"""Thresholds of WLB-LLM's outlier queues, as shares of the window. The paper does not give them; this rule is ours."""

UNBOUNDED = 1_000_000
"""The paper bounds no document's delay (iterations)."""

SOLVER_SECONDS = 0.05
"""Of the exact solver, for one plan, in its deterministic time."""


class PaperPacker(VarlenPacker):
    """WLB-LLM's algorithm: outliers train when their level is full. Here, a level of which a document is due gives
    what it has, too: alone it would stand out."""

    def _choose(self, must: ReleaseChoice, now: Situation) -> ReleaseChoice:
        bins, levels = self._limits.bins, self._queues.levels
        giving = [len(level) >= bins or count > 0 for level, count in zip(levels, must.counts, strict=True)]
        return self._release_levels(must, now, giving)


def plan_run(
    packing: str,
    lengths: Lengths,
    setting: Setting,
    cost: CostModel,
    *,
    iterations: int,
    warm_up: int,
    seed: int,
    per_window: str = "auto",
) -> list[IterationPlan]:
    """Plans of `iterations` global batches after `warm_up` ones, in which queues fill; one stream for all packings.

    packing: original, fixed-greedy[-K] or fixed-solver-K (over K global batches), varlen (of per_window micro-batches
    a window), varlen-K (of K), or paper-Q (WLB-LLM with Q queues).
    """
    rules = Rules(setting.window, "split", seed, endless=True)
    stream = DocumentStream.of_lengths(lengths, rules, name="--lengths")
    planner = _planner(packing, stream, lengths, setting, cost, per_window)
    return list(islice(iter(planner.next_iteration, None), warm_up, warm_up + iterations))


def _planner(
    packing: str,
    stream: DocumentStream,
    lengths: Lengths,
    setting: Setting,
    cost: CostModel,
    per_window: str,
) -> Planner:
    """The planner that would also train a job of these settings; only the paper's queues are not a setting."""
    layout, window = setting.layout, setting.window
    name, _, count = packing.rpartition("-") if packing[-1].isdigit() else (packing, "", "1")
    aligned = multiple(layout.context, layout.tensor)
    if name == "paper":
        limits = Limits(
            bins=setting.micro_batches * layout.data,
            window=window,
            capacity=lmax(WlbConfig(), window, aligned),
            max_documents=WlbConfig().max_documents,
            max_delay=UNBOUNDED,
        )
        thresholds = [int(share * window) for share in QUEUES[int(count)]]
        packer = PaperPacker(cost, limits, thresholds, Ranks(layout.data))
        return Planner(stream, packer, global_tokens=limits.bins * window)
    config = (
        WlbConfig(micro_batches_per_window=per_window)
        if packing == "varlen"
        else WlbConfig(micro_batches_per_window=count, chunks="off")
        if name == "varlen"
        else WlbConfig(packing="original")
    )
    packing_job = PackingJob(
        config=config,
        cost=cost,
        window=window,
        micro_batches=setting.micro_batches,
        dp=layout.data,
        pp=layout.pipeline,
        vpp=layout.virtual,
        alignment=aligned,
        sample=sample_lengths(lengths, window, "split"),
    )
    if not name.startswith("fixed"):
        return plan_job(stream, packing_job)
    batches, tokens = int(count), packing_job.bins * packing_job.window
    fixed_packer = (
        FixedSolverPacker(packing_job, batches, SOLVER_SECONDS)
        if name == "fixed-solver"
        else FixedGreedyPacker(packing_job, batches)
    )
    return BatchesPlanner(stream, fixed_packer, global_tokens=tokens, batches=batches)


def shard_run(plans: Sequence[IterationPlan], sharding: str, model: LayerModel) -> Shards:
    """Shard plans of a run. sharding: one of registry.SHARDINGS, or paper-adaptive: the faster, as predicted, of
    per-sequence and per-document."""
    layout = model.layout
    aligned = multiple(layout.context, layout.tensor)
    if sharding != "paper-adaptive":
        return cut_plans(plans, layout.context, aligned, sharding, model.table)
    lengths = [
        padded([piece.tokens for piece in micro_batch.pieces], aligned)
        for plan in plans
        for row in plan.micro_batches
        for micro_batch in row
    ]
    first, second = (shard_all(lengths, layout.context, kind) for kind in ("per-sequence", "per-document"))
    flat = iter(_faster(first, second, model))
    return [[[next(flat) for _ in row] for row in plan.micro_batches] for plan in plans]


def _faster(first: list[ShardPlan], second: list[ShardPlan], model: LayerModel) -> list[ShardPlan]:
    times = [predict_all(plans, model.table).max(axis=1).tolist() for plans in (first, second)]
    return [a if x <= y else b for a, b, x, y in zip(first, second, *times, strict=True)]
