"""Predicted time of a training iteration: from its plan, the job (model and layout), and a profile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.dynamic.plan import GroupCost, StepPlan
from wlb_megatron.packing.baselines import cut_windows, freeze, price
from wlb_megatron.packing.limits import GpuMemory
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.arrange import in_given_order
from wlb_megatron.pipeline.kept_layers import recomputed_array
from wlb_megatron.plan import IterationPlan, Waiting
from wlb_megatron.plugin.flags.refusal_printing import never_fatal
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.micro_batches.planning import ShardSettings
from wlb_megatron.sharding.cut import cut, pad
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.simulator.iteration import cut_of, run_steps
from wlb_megatron.simulator.job import PlanTimes, simulate_groups
from wlb_megatron.simulator.model import LayerModel, Times
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import KernelTable, h100

PredictGroups = Callable[[StepPlan, Sequence[int]], float | None]
"""Milliseconds of an iteration from its groups and the tokens of its documents."""

PredictPlan = Callable[[IterationPlan], float | None]
"""Milliseconds of the documents of each of consecutive plans."""

Predict = Callable[[IterationPlan, Sequence[ShardPlan]], float | None]
"""Milliseconds of an iteration from its plan and the shard plans of this data-parallel rank's micro-batches."""


def predictor(
    job: TrainingJob, dp_rank: int, *, memory: GpuMemory | None = None, table: KernelTable | None = None
) -> Predict | None:
    """The prediction of this job: by its profile, or without one by built-in attention and assumed rates.

    memory: by which each step keeps layers; None: steps run the flags of recomputation. table: this GPU's kernel
    times, without a profile.

    None for a job that the simulator does not take (a schedule of another kind): it trains all the same.
    """
    times = _plan_times(job, memory, table)
    return None if times is None else UntilItFails(Prediction(times, dp_rank))


MOST_PLANNED = 64
"""Stages, of all data-parallel ranks, whose kept layers are planned for one prediction: each takes about a millisecond.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Milliseconds of an iteration, of whose micro-batches only those of data-parallel rank `dp_rank` are sharded."""

    times: PlanTimes
    dp_rank: int

    def __call__(self, plan: IterationPlan, shards: Sequence[ShardPlan]) -> float:
        """Takes the shard plans of this rank's micro-batches."""
        tokens, attention = self._loads(plan, shards)
        (orders,) = self.times.orders([plan])
        call_cuts = np.broadcast_to(
            cut_of(shards)[:, None], tokens.shape
        )  # of this rank's; others' are like them
        simulated = run_steps(
            *(tokens, attention, self.times.model),
            cuts=call_cuts,
            orders=orders,
            recomputed=self._recomputed(plan),
        )
        return float(simulated.steps[0]) / 1e6

    def _recomputed(self, plan: IterationPlan) -> npt.NDArray[np.int64] | None:
        """int[1, dp, P, V, m]: recomputed layers by the memory model; None where steps run the flags.

        Of many data-parallel ranks this one's is planned. The others are taken to keep as much, each micro-batch as the
        one in the same place.
        """
        layout = self.times.model.layout
        plans_one = layout.data * layout.pipeline > MOST_PLANNED and not self.times.in_step
        steps = self.times.kept_layers([plan], self.dp_rank if plans_one else None)
        if steps is None:
            return None
        layers = recomputed_array(steps[0])
        return np.broadcast_to(layers, (layout.data, *layers.shape[1:]))[None]

    def _loads(self, plan: IterationPlan, shards: Sequence[ShardPlan]) -> tuple[npt.NDArray[np.int64], Times]:
        """Tokens int[1, m, dp] and attention float[1, m, dp, 1] (the slowest context rank's) of all micro-batches.

        The other ranks' attention is what their documents would take whole, times what this rank's shards take of
        theirs: by pairs of tokens alone, a rank of short documents, which take more for a pair, would have another's
        long one take twice its time.
        """
        model, grid = self.times.model, plan.micro_batches
        tokens = np.array([[micro_batch.tokens for micro_batch in row] for row in grid], dtype=np.int64)
        tokens = -(-tokens // self.times.alignment) * self.times.alignment
        pieces = [[micro_batch.pieces for micro_batch in row] for row in grid]
        lengths = np.array(
            [p.end - p.start for row in pieces for micro_batch in row for p in micro_batch], dtype=np.int64
        )
        counts = np.array([len(micro_batch) for row in pieces for micro_batch in row])
        begins = np.concatenate(([0], np.cumsum(counts)[:-1]))
        whole_ns = np.append(model.table.diagonal_ns(lengths), 0)  # an empty micro-batch may come last
        sums = np.where(counts > 0, np.add.reduceat(whole_ns, begins), 0)
        prices = sums.reshape(tokens.shape) + model.table.call
        ways = []
        for times in model.attention(shards):
            slowest = times.max(axis=1)
            attention = prices * (slowest.sum() / prices[:, self.dp_rank].sum())
            attention[:, self.dp_rank] = slowest
            ways.append(attention[None, :, :, None])
        return tokens[None], Times(*ways)


def plan_times(job: TrainingJob, memory: GpuMemory | None) -> PlanTimes | None:
    """The law by which `auto` chooses between chunks and whole documents, as `analyze` does: alike on all ranks.

    None if it says nothing: a schedule that the simulator does not take, layers that see a window of earlier keys,
    CPUs without a profile.
    """
    unknown = (job.profile is None and not job.device.on_gpu) or job.model.window is not None
    return None if unknown else _plan_times(job, memory)


def _plan_times(
    job: TrainingJob, memory: GpuMemory | None, table: KernelTable | None = None
) -> PlanTimes | None:
    with never_fatal("no predicted times, the simulator failed"), contextlib.suppress(ValueError):
        return PlanTimes(
            model=layer_model(job, table),
            alignment=job.alignment,
            sharding=job.config.sharding,
            in_step=job.trainer.in_step,
            memory=memory,
        )
    return None


def group_predictor(job: TrainingJob, cost: GroupCost) -> PredictGroups | None:
    """The same with dynamic groups, every rank of a stage with micro-batches of its own.

    cost: the costs by which groups were planned. They tell the attention of a group without sharding it.
    """
    times = _plan_times(job, None)
    if times is None:
        return None
    model = times.model

    def predict(plan: StepPlan, tokens: Sequence[int]) -> float:
        return float(simulate_groups([plan], [tokens], model, cost).steps[0]) / 1e6

    return UntilItFails(predict)


class UntilItFails:
    """Predictions until the first error, which is printed: a figure of the log must not end training.

    An object, so that it can be sent to the process that plans.
    """

    def __init__(self, predict: Callable[..., float | None]) -> None:
        self._predict, self._failed = predict, False

    def __call__(self, *args: Any) -> float | None:
        if self._failed:
            return None
        with never_fatal("no more predicted times, the simulator failed"):
            return self._predict(*args)
        self._failed = True
        return None


def in_arrival_order(
    settings: ShardSettings, cost: CostModel, dp: int, planner: Planner
) -> PredictPlan | None:
    """What tells the milliseconds of each plan's documents in arrival order, until it fails; None if it fails now."""
    with never_fatal("no gain over arrival order, the simulator failed"):
        return UntilItFails(ArrivalOrder(settings, cost, dp, planner))
    return None


class ArrivalOrder:
    """The same documents as Megatron packs them, in windows of arrival order cut per sequence, with the same mask.

    Called with plan after plan, it tells the predicted milliseconds of each one's documents. A document that waits
    counts in the iteration that trains it, so sums over iterations compare the very documents trained. Example: windows
    of works 6, 6 take 10 ms each. If work 3 of the 12 waits, they count 20 * 9 / 12 = 15 ms so far.
    """

    def __init__(self, settings: ShardSettings, cost: CostModel, dp: int, planner: Planner) -> None:
        """planner: before its next plan; its counts are read after each. cost: prices documents. dp: data-parallel
        ranks."""
        self._settings, self._cost, self._dp, self._planner = settings, cost, dp, planner
        self._window = planner.global_tokens // planner.packer.bins
        self._samples = planner.samples
        self._before, self._arrived = price(planner.packer.waiting, cost), 0  # work
        self._left: list[Waiting] = []
        self._taken = self._told = 0.0  # milliseconds

    def __call__(self, plan: IterationPlan) -> float | None:
        windows, self._samples = self._planner.samples - self._samples, self._planner.samples
        self._arrived += price(plan.arrived, self._cost)
        items = [*self._left, *(Waiting(piece, plan.iteration) for piece in plan.arrived)]
        filled, self._left = cut_windows(items, self._window, windows, len(items))
        if filled:
            grid = in_given_order(freeze(filled, windows, self._cost), self._dp)
            predicted_ms = self._predict(IterationPlan(plan.iteration, (), grid, ()))
            if predicted_ms is None:
                return None
            self._taken += predicted_ms
        packed_work = self._arrived - price([item.piece for item in self._left], self._cost)
        trained_work = self._before + self._arrived - price(plan.waiting, self._cost)
        told_before, self._told = self._told, self._taken * trained_work / max(1, packed_work)
        return self._told - told_before

    def _predict(self, plan: IterationPlan) -> float | None:
        of = self._settings
        assert of.predict is not None
        padded = [pad(row[of.dp_rank].pieces, of.alignment) for row in plan.micro_batches]
        lengths = [np.array([piece.tokens for piece in pieces], dtype=np.int64) for pieces in padded]
        return of.predict(plan, cut(lengths, of.cp_size, "per-sequence", of.table))


def layer_model(job: TrainingJob, table: KernelTable | None = None) -> LayerModel:
    """The job as the simulator's model. Experts count as what they activate for a token.

    table: attention's kernel times; None: cuDNN's on an H100. Raises ValueError for a model or a schedule that the
    simulator does not take.
    """
    model, layout = job.model, job.sizes
    experts = model.shape.experts
    shape = replace(
        model.shape,
        ffn=model.active_ffn + (0 if experts is None else experts.shared),
        head_dim=(model.shape.head_dim + model.value_dim) // 2,
    )
    if layout.virtual > 1 and layout.micro_step_multiple != layout.pipeline:
        raise ValueError(
            f"an interleaved schedule by groups of {layout.group} micro-batches on {layout.pipeline} stages"
        )
    kernel_table = h100() if table is None else table
    return LayerModel(
        shape=shape,
        layout=replace(layout, recompute_layers=job.recompute_blocks or layout.recompute_layers),
        assumptions=Assumptions.of_gpu(kernel_table.device).with_links(job.costs),
        measured=kernel_table,
        costs=job.costs,
    )
