"""One iteration of 4D training from its shard plans, for all iterations of a run in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.schedule import Event, pipeline_ends, pipeline_events
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.simulator.launching import queued_ends
from wlb_megatron.simulator.model import LayerModel, Times

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Shards = Sequence[Sequence[Sequence[ShardPlan]]]
"""Plans [iteration][micro-batch][data-parallel rank]."""


@dataclass(frozen=True)
class Simulated:
    """Simulated iterations; n iterations, all times in nanoseconds.

    steps: float[n]. micro_batches: float[n, m, dp], forward + backward on a middle stage, the slowest context
    rank's. busy: float[n, dp, pp, cp], what each GPU computes in an iteration (waits left out; tensor ranks are
    alike). tokens: int[n], trained, with padding.
    """

    steps: FloatArray
    micro_batches: FloatArray
    busy: FloatArray
    tokens: npt.NDArray[np.int64]

    @property
    def ns_per_token(self) -> float:
        return float(self.steps.sum() / self.tokens.sum())

    @property
    def imbalance(self) -> float:
        """Micro-batch latency, max/mean in each iteration, mean over iterations."""
        times = self.micro_batches.reshape(len(self.steps), -1)
        return float((times.max(axis=1) / times.mean(axis=1)).mean())


def simulate(shards: Shards, model: LayerModel, *, blocking: bool = True) -> Simulated:
    """Simulate a run. A micro-batch takes as long in a layer as its slowest context rank, each way.

    blocking: transfers between stages as in Megatron's 1F1B (see pipeline_ends); no part in interleaved schedules.
    Raises ValueError where plans are not of the model's layout.
    """
    tokens, attention, cut = _measure(shards, model)
    return run_steps(tokens, attention, model, blocking=blocking, cut=cut)


def group_events(shards: Shards, model: LayerModel, *, blocking: bool = True) -> list[list[Event]]:
    """Events (nanoseconds) of the first iteration's pipelines, one list for each data-parallel rank."""
    tokens, attention, cut = _measure(shards[:1], model)
    slowest = _slowest(tokens, attention, cut, model)
    forward, backward = (
        _stage_times(t, ends, model) for t, ends in zip(slowest, _ends(tokens, model), strict=True)
    )
    layout, transfer = model.layout, _transfer(tokens, model)
    blocking = blocking and layout.chunks == 1
    return [
        pipeline_events(forward[rank], backward[rank], layout.pp, transfer=transfer, blocking=blocking)
        for rank in range(layout.dp)
    ]


def _measure(shards: Shards, model: LayerModel) -> tuple[npt.NDArray[np.int64], Times, BoolArray]:
    """Tokens int[n, m, dp], attention float[n, m, dp, cp] of the plans, and whether any rank sees earlier keys."""
    layout = model.layout
    n, m = len(shards), len(shards[0]) if shards else 0
    plans = [plan for iteration in shards for row in iteration for plan in row]
    if not plans or len(plans) != n * m * layout.dp or any(plan.cp_size != layout.cp for plan in plans):
        raise ValueError(
            f"plans are not {n} iterations of {m} micro-batches on dp {layout.dp}, cp {layout.cp}: "
            "plan for the layout that is simulated"
        )
    tokens = np.array([plan.tokens for plan in plans], dtype=np.int64).reshape(n, m, layout.dp)
    attention = Times(*(t.reshape(n, m, layout.dp, layout.cp) for t in model.attention(plans)))
    cut = np.array([any((rows[:, 1] > 0).any() for rows in plan.ranks) for plan in plans])
    return tokens, attention, cut.reshape(tokens.shape)


def _device(tokens: npt.NDArray[np.int64], attention: Times, model: LayerModel) -> Times:
    """float[n, m, dp]: a layer's time on each micro-batch's slowest context rank."""
    linear = model.linear(tokens / model.layout.cp)
    return Times(*(a.max(axis=-1) + rest for a, rest in zip(attention, linear, strict=True)))


def _slowest(tokens: npt.NDArray[np.int64], attention: Times, cut: BoolArray, model: LayerModel) -> Times:
    """The same, or the host's time to launch it, if that is longer."""
    device = _device(tokens, attention, model)
    return Times(*map(np.maximum, device, model.host(cut)))


def _transfer(tokens: npt.NDArray[np.int64], model: LayerModel) -> float:
    """The largest micro-batch's transfer stands for all: links are seldom what a stage waits for."""
    return model.transfer_ns(float(tokens.max()) / model.layout.cp)


def run_steps(
    tokens: npt.NDArray[np.int64],
    attention: Times,
    model: LayerModel,
    *,
    blocking: bool,
    cut: BoolArray | None = None,
) -> Simulated:
    """As `simulate`, from what the plans come to.

    tokens: int[n, m, dp] of each micro-batch. attention: float[n, m, dp, cp], nanoseconds of a layer. cut: bool[n, m,
    dp], whether any rank sees earlier keys; None: all do where there are context ranks.
    """
    n, _, dp = tokens.shape
    layout = model.layout
    cut = np.full(tokens.shape, layout.cp > 1) if cut is None else cut
    slowest = _slowest(tokens, attention, cut, model)
    whole = layout.pp == 1
    forward, backward = (
        _stage_times(t, ends, model)
        for t, ends in zip(
            _device(tokens, attention, model) if whole else slowest, _ends(tokens, model), strict=True
        )
    )
    if whole:
        done = queued_ends(forward[:, 0, 0], backward[:, 0, 0], model.launches(_by_rank(cut)))
    else:
        transfer = _transfer(tokens, model)
        done = pipeline_ends(forward, backward, transfer=transfer, blocking=blocking and layout.chunks == 1)
    done = done.reshape(n, dp, layout.pp).max(axis=1)
    linear = model.linear(tokens / layout.cp)
    both = (linear.forward + linear.backward)[..., None] + attention.forward + attention.backward
    own = both.sum(axis=1)
    layers = np.array([sum(model.layers_of(p, c) for c in range(layout.chunks)) for p in range(layout.pp)])
    busy = own[:, :, None, :] * layers[:, None]
    for times in _ends(tokens, model):
        busy[:, :, 0] += times[0].sum(axis=1)[..., None]
        busy[:, :, -1] += times[1].sum(axis=1)[..., None]
    return Simulated(
        (done + _after(forward, backward, model, n)).max(axis=1) + 1e9 * model.assumptions.step_overhead,
        (slowest[0] + slowest[1]) * int(layers.max()),
        busy,
        tokens.sum(axis=(1, 2)),
    )


def _by_rank(values: BoolArray) -> BoolArray:
    """[n, m, dp] as [n * dp, m]."""
    return values.swapaxes(1, 2).reshape(-1, values.shape[1])


def _ends(tokens: npt.NDArray[np.int64], model: LayerModel) -> list[tuple[FloatArray, FloatArray]]:
    """Forward and backward: embedding's and loss's times, float[n, m, dp] each."""
    embedding, loss = model.embedding(tokens / model.layout.cp), model.loss(tokens / model.layout.cp)
    return [(embedding.forward, loss.forward), (embedding.backward, loss.backward)]


def _stage_times(layer: FloatArray, ends: tuple[FloatArray, FloatArray], model: LayerModel) -> FloatArray:
    """float[n * dp, P, V, m] of a layer's time float[n, m, dp]."""
    layout = model.layout
    n, m, dp = layer.shape
    times = np.empty((n, dp, layout.pp, layout.chunks, m))
    for stage in range(layout.pp):
        for chunk in range(layout.chunks):
            times[:, :, stage, chunk] = (layer * model.layers_of(stage, chunk)).swapaxes(1, 2)
    times[:, :, 0, 0] += ends[0].swapaxes(1, 2)
    times[:, :, -1, -1] += ends[1].swapaxes(1, 2)
    return times.reshape(n * dp, layout.pp, layout.chunks, m)


def _after(forward: FloatArray, backward: FloatArray, model: LayerModel, n: int) -> FloatArray:
    """float[n, P]: gradient reduction, optimizer and parameter gather that a stage adds to its pipeline.

    Overlapped, the reduction runs beside the backward of the last micro-batch, the gather beside the next
    iteration's first forward, for which this one's first stands; the longer of the two in each pair is what shows.
    """
    layout, given = model.layout, model.assumptions
    after = np.empty((n, layout.pp))
    for stage in range(layout.pp):
        reduce, gather = model.gradient_sync_ns(stage)
        hides = (
            backward[:, stage, :, -1].sum(axis=1).reshape(n, -1).min(axis=1),
            forward[:, stage, :, 0].sum(axis=1).reshape(n, -1).min(axis=1),
        )
        exposed = sum(
            np.maximum(time - hidden, 0.0) + given.dp_exposed * np.minimum(time, hidden)
            for time, hidden in zip((reduce, gather), hides, strict=True)
        )
        after[:, stage] = exposed + model.optimizer_ns(stage)
    return after
