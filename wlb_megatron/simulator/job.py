"""A job as the commands describe it: model, layout and settings, the plans that it would train, and their times: cut
over context ranks, with the layers that each step keeps, and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Corpus, Lengths, Rules
from wlb_megatron.documents.lengths import longest_whole
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.dynamic.plan import GroupCost, Stage, StepPlan, fixed_groups, group_cost, token_ns
from wlb_megatron.dynamic.plan_step import plan_step
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import nothing_predicted, plan_job, sample_lengths_of, too_small
from wlb_megatron.packing.limits import MARGIN, GpuMemory, Trainer, no_memory_for_chunks, with_lmax
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.pipeline.kept_layers import KeptLayers, loads_of, plan_step_layers, recomputed_array
from wlb_megatron.pipeline.step_law import StageRoom
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.cut import cut_plans, orders_of
from wlb_megatron.sharding.slots import multiple
from wlb_megatron.simulator.iteration import (
    Orders,
    Recomputed,
    Shards,
    Simulated,
    by_count,
    run_steps,
    simulate,
)
from wlb_megatron.simulator.model import LayerModel, Times
from wlb_megatron.workload.cost_model import CostModel, document_cost, quadratic_at
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.memory import GIB
from wlb_megatron.workload.model import WHOLE
from wlb_megatron.workload.profile import Profile

DEFAULT_GIB = 80.0
"""GPU memory for which `analyze` says what fits, if no flag gives one."""

Kept = Sequence[Sequence[Sequence[KeptLayers]]]
"""Kept layers [iteration][dp][stage]."""


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """The law by which commands predict steps, and by which training chooses between chunks and whole documents.

    alignment: a micro-batch's tokens are padded to a multiple of it. in_step: data-parallel ranks run the same groups
    of micro-batches. memory: by which each step keeps layers; None: steps run the flags of recomputation. quick: the
    kept layers of one data-parallel rank, that with most tokens, stand for all.
    """

    model: LayerModel
    alignment: int
    sharding: str
    in_step: bool = False
    memory: GpuMemory | None = None
    quick: bool = False

    def __call__(self, plans: Sequence[IterationPlan]) -> npt.NDArray[np.float64]:
        """float[n]: nanoseconds of each iteration. Its plans may be of fewer data-parallel ranks than the job has.

        What only a rank's environment says does not count, because all ranks must choose alike.
        """
        shape, dp = self.model.shape, len(plans[0].micro_batches[0])
        shape = replace(shape, experts=shape.experts and replace(shape.experts, one_kernel=False))
        model = replace(self.model, shape=shape, layout=replace(self.model.layout, data=dp))
        return replace(self, model=model, quick=True).simulated(plans)[0].steps

    def simulated(self, plans: Sequence[IterationPlan]) -> tuple[Simulated, Shards, Kept | None]:
        """The plans' times, how their micro-batches are cut, and the layers that they keep."""
        shards = cut_plans(plans, self.model.layout.context, self.alignment, self.sharding, self.model.table)
        layers = self.kept_layers(plans)
        repeats = None if layers is None else [recomputed_array(step) for step in layers]
        return simulate(shards, self.model, orders=self.orders(plans), recomputed=repeats), shards, layers

    def orders(self, plans: Sequence[IterationPlan]) -> Orders:
        return orders_of(plans, in_step=self.in_step)

    def kept_layers(self, plans: Sequence[IterationPlan], only_rank: int | None = None) -> Kept | None:
        """None where steps run the flags. only_rank: those of this data-parallel rank alone."""
        memory, layout = self.memory, self.model.layout
        if memory is None:
            return None
        layers = self.model.stage_layers.tolist()
        stages = [memory.stage(stage, layers[stage]) for stage in range(layout.pipeline)]
        available = [memory.available(stage) for stage in range(layout.pipeline)]
        steps = []
        for plan, groups in zip(plans, self.orders(plans), strict=True):
            columns = list(zip(*plan.micro_batches, strict=True))
            rank = only_rank
            if self.quick:
                rank = max(range(len(columns)), key=lambda rank: sum(m.tokens for m in columns[rank]))
            if rank is not None:
                columns, groups = columns[rank : rank + 1], groups[rank : rank + 1]
            loads = [loads_of(column, self.alignment, layout.context) for column in columns]
            ranks = plan_step_layers(loads, groups, stages, available, in_step=self.in_step)
            steps.append(ranks if only_rank is not None else ranks * (layout.data // len(ranks)))
        return steps


def simulate_groups(
    plans: Sequence[StepPlan], tokens: Sequence[Sequence[int]], model: LayerModel, cost: GroupCost
) -> Simulated:
    """Simulates iterations of dynamic groups.

    tokens: int[documents] for each iteration. cost: that by which the groups were planned. model: with fixed groups.
    In the result, `dp` counts all ranks of a stage, and `cp` is 1.
    """
    ranks = model.layout.data * model.layout.context
    apart = replace(model, layout=replace(model.layout, context=1, data=ranks))
    loads = [group_loads(plan, plan_tokens, cost) for plan, plan_tokens in zip(plans, tokens, strict=True)]

    def several(places: list[int]) -> Simulated:
        counts = np.stack([loads[place][0] for place in places])
        attention = np.stack([loads[place][1] for place in places])
        ways = Times(*(way[..., None] for way in apart.attention_ways(attention)))
        return run_steps(counts, ways, apart)

    return by_count([len(plan.micro_steps) for plan in plans], several)


def group_loads(
    plan: StepPlan, tokens: Sequence[int], cost: GroupCost
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Tokens and attention (nanoseconds) of each micro-step on each rank of a stage, [m, ranks] each."""
    lengths, prices = np.array(tokens, dtype=np.int64), cost.attention(tokens)
    counts = np.ones((len(plan.micro_steps), plan.ranks), dtype=np.int64)
    attention = np.full(counts.shape, cost.tables[0].call)
    for step, groups in enumerate(plan.micro_steps):
        for group in groups:
            documents, level = list(group.documents), cost.sizes.index(group.size)
            ranks = slice(group.start, group.start + group.size)
            counts[step, ranks] = -(-int(lengths[documents].sum()) // group.size)
            attention[step, ranks] += prices[level, documents].sum() + cost.opening()[level]
    return counts, attention


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that the commands plan and simulate.

    * window: tokens. micro_batches: windows of a data-parallel rank and step.
    * micro_batch_size: windows that a micro-batch joins, as training does: documents are split at one of them.
    * iterations: simulated, after `warm_up` planned ones in which queues fill.
    * seed: of the shuffle, None for the given order.
    * trainer: settings that decide about documents in chunks.
    * gib: memory of a GPU, by which Lmax is set; None: Lmax ignores memory. margin: share of it that is left free.
    * messages: lines to show the user.
    * corpora: of a blend, in the order and by the weights of training; (): one corpus, of the lengths alone.
    * run_steps: of the whole run, None if no flag says how many.
    * quick: plan without learning from a sample of the documents, and one data-parallel rank's kept layers for all.
    """

    model: LayerModel
    window: int
    micro_batches: int
    iterations: int
    warm_up: int
    seed: int | None
    profile: Profile | None = None
    trainer: Trainer = field(default_factory=Trainer)
    gib: float | None = None
    margin: float = MARGIN
    messages: tuple[str, ...] = ()
    corpora: tuple[Corpus, ...] = ()
    run_steps: int | None = None
    quick: bool = False
    micro_batch_size: int = 1

    @property
    def joined_window(self) -> int:
        """Tokens of a micro-batch of full windows."""
        return self.window * self.micro_batch_size

    @property
    def alignment(self) -> int:
        return multiple(self.model.layout.context, self.model.layout.tensor)

    def cost(self, config: WlbConfig) -> CostModel:
        """The cost model that packing balances by, as in training: from settings, else the profile, else the model's
        shape.
        """
        model, shape, costs = self.model, self.model.shape, self.model.costs
        if costs is not None:
            crossing, document = costs.quadratic_at, costs.per_document
        else:
            heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
            crossing = quadratic_at(shape.heads * shape.head_dim, shape.layer_parameters)
            document = document_cost(h100().scaled(**heads).segment, shape.layer_parameters)
        return replace(
            model.cost().with_micro_batch_cost(config.micro_batch_cost),
            quadratic_at=crossing if config.quadratic_at is None else config.quadratic_at,
            per_document=document if config.document_cost is None else config.document_cost,
        )

    def longest(self, config: WlbConfig) -> int:
        """Tokens of the longest document that is not split, ignoring memory."""
        return longest_whole(config.overlong, self.window, self.micro_batches)[0]

    def planner(
        self, lengths: Lengths, config: WlbConfig, say: Callable[[str], None] = lambda _: None
    ) -> Planner:
        """Raises WlbError on settings that cannot work."""
        layout = self.model.layout
        with explain_bad_values():
            config = self.with_lmax(config)
            longest = self.longest(config)
            rules = Rules(longest, config.overlong, self.seed, endless=True)
            corpora = self.corpora or (Corpus("--lengths", np.asarray(lengths)),)
            stream = DocumentStream(corpora, rules)
            step = self.window * self.micro_batches * layout.data
            if problem := nothing_predicted(lengths, rules) or too_small(lengths, step):
                raise WlbError(problem)
            if self.gib is not None and self.trainer.experts:
                say(
                    "WARNING: --gpu-memory sets no Lmax, because the number of tokens per expert is unknown: it only "
                    "checks that the weights fit"
                )
            elif self.gib is not None and config.fixed_windows:
                say(
                    "WARNING: --gpu-memory sets no Lmax: windows of fixed length have none; use --packing varlen"
                )
            packing = PackingJob(
                config=config,
                cost=self.cost(config),
                window=self.joined_window,
                micro_batches=self.micro_batches // self.micro_batch_size,
                dp=layout.data,
                pp=layout.pipeline,
                vpp=layout.virtual,
                alignment=self.alignment,
                sample=None if self.quick else sample_lengths_of(stream, len(lengths)),
                rooms=self.rooms(config),
                no_chunks=self.trainer.chunks_refused(config.chunks),
                longest=stream.longest,
                times=self.times(config),
                say=say,
            )
            return plan_job(stream, packing, memory=self.memory)

    def with_lmax(self, config: WlbConfig) -> WlbConfig:
        """The settings with the Lmax that memory allows, if memory is given. WlbError if nothing fits."""
        if self.gib is not None and (problem := self.weights_problem()):
            raise WlbError(problem)
        if self.gib is None or self.memory is None or config.fixed_windows:
            return config
        return with_lmax(config, self.memory, self.joined_window, self.trainer.chunks_refused(config.chunks))

    def no_chunks(self, config: WlbConfig) -> list[tuple[str, str]]:
        """(flag, cure) of each setting that cannot be combined with chunks. config: with Lmax."""
        return [
            *self.trainer.chunks_refused(config.chunks),
            *no_memory_for_chunks(self.with_lmax(config), self.memory),
        ]

    @property
    def memory(self) -> GpuMemory | None:
        """By which plans are made. None with experts, as in training: how many tokens they get is assumed (`gpu`)."""
        return None if self.trainer.experts else self.gpu

    def fullest(self, run: Run) -> tuple[int, int] | None:
        """Bytes of the fullest GPU, and of its weights, gradients and optimizer state.

        What the steps of a run hold where they keep what fits, else what the longest micro-batches may need. None with
        dynamic groups, for which it is not estimated.
        """
        if run.config.cp_mode == "dynamic":
            return None
        memory = self.gpu
        if run.kept is not None:
            stages = [(stage, kept) for step in run.kept for rank in step for stage, kept in enumerate(rank)]
            return max((memory.weights(stage) + kept.peak, memory.weights(stage)) for stage, kept in stages)
        packer = run.planner.packer
        chunked, whole = memory.needed(replace(run.config, max_tokens=packer.max_tokens), self.joined_window)
        weights = max(memory.weights(stage) for stage in range(self.model.layout.pipeline))
        return (chunked if isinstance(packer, ChunkPacker) else max(whole, chunked * (not whole))), weights

    def weights_problem(self) -> str | None:
        """A line with the figure and the cure, if weights, gradients and optimizer state alone do not fit a GPU."""
        problem = self.gpu.weights_problem()
        assumed = (
            f" ({DEFAULT_GIB:g} GiB a GPU is assumed; --gpu-memory changes it)" if self.gib is None else ""
        )
        return problem and f"will not run: {problem}{assumed}"

    @cached_property
    def gpu(self) -> GpuMemory:
        """A GPU's memory as training counts it, of the size given or assumed."""
        model, layout, further = self.model, self.model.layout, self.model.shape.losses - 1
        stages = tuple(map(tuple, model.stage_layers.tolist()))
        counted: dict[str, Any] = {"layers": stages, "depths": further}
        fullest: int | str = -(-model.layers // layout.pipeline) + further
        if nets := model.shape.delta_nets:
            kinds = [
                [WHOLE * count + "G" * -(-count * nets.layers // model.layers) for count in stage]
                for stage in stages
            ]
            counted = {"layers": tuple(map(tuple, kinds)), "depths": WHOLE * further}
            fullest = "|".join(max(kinds, key=lambda stage: len("".join(stage)))) + WHOLE * further
        kept = replace(
            layout,
            micro_batches=self.micro_batches // self.micro_batch_size,
            fully_sharded=self.trainer.shards_weights,
            losses_in_forward=self.trainer.shards_weights,
        )
        return GpuMemory(
            *(
                int((self.gib or DEFAULT_GIB) * GIB),
                replace(model.shape, layers=fullest),
                kept,
            ),
            *(self.joined_window, self.alignment, self.margin),
            **counted,
        )

    def run(self, lengths: Lengths, config: WlbConfig, progress: Callable[[], None] = lambda: None) -> Run:
        """Plan and time the job. progress: called after each planned iteration. WlbError on settings that cannot
        work."""
        messages = list(self.messages)
        planner = self.planner(lengths, config, messages.append)
        plans = []
        for plan in islice(iter(planner.next_iteration, None), self.warm_up + self.iterations):
            plans.append(plan)
            progress()
        with explain_bad_values():
            timed = plans[self.warm_up :]
            if config.cp_mode == "dynamic":
                simulated, _ = self.groups(timed, planner, config)
                return Run(config, plans, planner, tuple(messages), simulated)
            return Run(config, plans, planner, tuple(messages), *self.times(config).simulated(timed))

    def cut(self, run: Run, config: WlbConfig) -> Run:
        """The same plans, sharded by these settings and timed."""
        simulated, shards, kept = self.times(config).simulated(run.timed_plans)
        return replace(run, config=config, simulated=simulated, shards=shards, kept=kept)

    def times(self, config: WlbConfig) -> PlanTimes:
        """The law of this job's steps."""
        return PlanTimes(
            model=self.model,
            alignment=self.alignment,
            sharding=config.sharding,
            in_step=self.trainer.in_step,
            memory=self.gpu if self.plans_recomputation(config) else None,
            quick=self.quick,
        )

    def plans_recomputation(self, config: WlbConfig) -> bool:
        """Whether each step recomputes only the layers that it cannot keep."""
        planned = (config.recompute, self.model.layout.recompute, config.cp_mode) == ("auto", "full", "fixed")
        return planned and self.trainer.keeping_changes(config.chunks) is None

    def rooms(self, config: WlbConfig) -> tuple[StageRoom, StageRoom] | None:
        """What the first and the last stage can keep of a step, None where steps run the flags."""
        return self.gpu.rooms() if self.plans_recomputation(config) else None

    def groups(
        self, plans: Sequence[IterationPlan], planner: Planner, config: WlbConfig
    ) -> tuple[Simulated, list[StepPlan]]:
        """Dynamic groups of each iteration as rank 0 plans them in training, and their times."""
        model, layout, shape = self.model, self.model.layout, self.model.shape
        lmax = planner.packer.max_tokens // self.alignment * self.alignment
        stage = Stage.of(layout.context, layout.data, lmax)
        table = (model.measured if model.costs is None else model.costs.table).scaled(
            heads=shape.heads // layout.tensor,
            kv_heads=max(1, shape.kv_heads // layout.tensor),
            head_dim=shape.head_dim,
        )
        cost = group_cost(
            *(table, token_ns(table, self.cost(config).quadratic_at), stage.sizes),
            tensor=layout.tensor,
            assumptions=model.assumptions,
            sharding=config.sharding,
        )
        steps, tokens = [], []
        for plan in plans:
            rows = plan.micro_batches
            documents = [piece.tokens for row in rows for micro_batch in row for piece in micro_batch.pieces]
            outcome = plan_step(
                documents,
                stage,
                cost,
                fixed=fixed_groups(plan, layout.context),
                pipeline=layout.pipeline,
                multiple=layout.micro_step_multiple,
            )
            steps.append(outcome.plan)
            tokens.append(documents)
        return simulate_groups(steps, tokens, model, cost), steps


@dataclass(frozen=True)
class Run:
    """A job's plans and the times of all but the first `warm_up` of them.

    `messages` say whether documents train in chunks, and why. `shards` are the timed plans'; None with dynamic groups.
    kept: [iteration][dp][stage], None where steps run the flags of recomputation.
    """

    config: WlbConfig
    plans: Sequence[IterationPlan]
    planner: Planner
    messages: tuple[str, ...]
    simulated: Simulated
    shards: Shards | None = None
    kept: Kept | None = None

    @property
    def timed_plans(self) -> Sequence[IterationPlan]:
        return self.plans[-len(self.simulated.steps) :]

    @property
    def recomputed(self) -> Recomputed | None:
        """Layers that micro-batches recompute, None where steps run the flags."""
        return None if self.kept is None else [recomputed_array(step) for step in self.kept]
