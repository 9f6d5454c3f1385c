"""Simulates iterations of 4D training from their shard plans, in one pass for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.orders import backward_turns, waits_of
from wlb_megatron.pipeline.schedule import Launches, pipeline_ends
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.simulator.model import LayerModel, Times

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Shards = Sequence[Sequence[Sequence[ShardPlan]]]
"""Plans [iteration][micro-batch][data-parallel rank]. Iterations may differ in their number of micro-batches."""
Orders = Sequence[Sequence[tuple[int, ...] | None]]
"""Group sizes [iteration][data-parallel rank], see pipeline.orders; None: Megatron's own order."""


@dataclass(frozen=True)
class Simulated:
    """n simulated iterations; all times in nanoseconds.

    * steps: float[n].
    * micro_batches: float[m, dp] for each iteration, forward + backward on a middle stage, on the slowest context
      rank.
    * busy: float[n, dp, pp, cp], each GPU's computing time in an iteration, without waiting (tensor ranks are alike).
    * tokens: int[n], trained, with padding.
    * paced: float[n, dp, pp], a stage's micro-batches one after another, each at the pace of its slowest context
      rank.
    * pipeline: float[n], when the last pipeline is done. The rest of a step is gradients, the optimizer and the time
      between steps.
    """

    steps: FloatArray
    micro_batches: list[FloatArray]
    busy: FloatArray
    tokens: npt.NDArray[np.int64]
    paced: FloatArray
    pipeline: FloatArray

    def first(self, count: int) -> Simulated:
        """The first iterations alone."""
        return Simulated(*(getattr(self, each.name)[:count] for each in fields(self)))

    @property
    def ns_per_token(self) -> float:
        return float(self.steps.sum() / self.tokens.sum())

    @property
    def imbalance(self) -> float:
        """Max/mean time of an iteration's micro-batches over all data-parallel ranks, each on its slowest
        context-parallel rank; mean over iterations.
        """
        return float(np.mean([times.max() / times.mean() for times in self.micro_batches]))

    @property
    def step_over_ideal(self) -> float:
        """A step over its GPUs' computation spread evenly, without bubble or waiting; mean over iterations."""
        return float((self.steps / self.busy.mean(axis=(1, 2, 3))).mean())


Recomputed = Sequence[IntArray]
"""int[dp, P, V, m] of each iteration: layers that each micro-batch recomputes in each model chunk of each stage."""


def simulate(
    shards: Shards,
    model: LayerModel,
    *,
    orders: Orders | None = None,
    recomputed: Recomputed | None = None,
) -> Simulated:
    """Simulates a run. In a layer a micro-batch takes as long as its slowest context rank, in forward and in
    backward.

    Iterations with equally many micro-batches are simulated in one pass. orders: given if documents are in chunks.
    recomputed: None if the model's flags say it. The plans are of the model's layout.
    """

    def several(places: list[int]) -> Simulated:
        tokens, attention, cuts = _measure([shards[place] for place in places], model)
        steps = None if orders is None else [sizes for place in places for sizes in orders[place]]
        repeats = None if recomputed is None else np.stack([recomputed[place] for place in places])
        return run_steps(tokens, attention, model, cuts=cuts, orders=steps, recomputed=repeats)

    return by_count([len(iteration) for iteration in shards], several)


def by_count(counts: Sequence[int], several: Callable[[list[int]], Simulated]) -> Simulated:
    """All iterations, in order, from one pass for each number of micro-batches.

    counts: micro-batches of each iteration. several: simulates the iterations at the given positions.
    """
    if not counts:
        raise ValueError("no iteration to simulate")
    alike: dict[int, list[int]] = {}
    for place, count in enumerate(counts):
        alike.setdefault(count, []).append(place)
    parts = [several(places) for places in alike.values()]
    back = np.argsort([place for places in alike.values() for place in places])
    micro_batches = [times for part in parts for times in part.micro_batches]
    figures = {
        name: np.concatenate([getattr(part, name) for part in parts])[back]
        for name in ("steps", "busy", "tokens", "paced", "pipeline")
    }
    return Simulated(micro_batches=[micro_batches[place] for place in back], **figures)


def perfectly_balanced(
    plans: Sequence[IterationPlan], model: LayerModel, recomputed: Recomputed | None = None
) -> Simulated:
    """A bound: the documents of these plans, with their work spread evenly over all micro-batches and context ranks.

    Each iteration keeps its documents and its number of micro-batches. Each document takes the rate of a whole one on
    one rank, with one kernel call per direction and no exchange of keys. recomputed: layers of each micro-batch, see
    simulate.
    """
    layout = model.layout
    diagonal = model.table.diagonal_ns

    def even(plan: IterationPlan) -> tuple[int, float]:
        """Tokens of each micro-batch, and nanoseconds of its attention on each context rank."""
        grid = [one for row in plan.micro_batches for one in row]
        pieces = [(piece.prefix, piece.end - piece.start) for one in grid for piece in one.pieces]
        prefixes, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
        ns = diagonal(prefixes + lengths) - np.where(prefixes > 0, diagonal(prefixes), 0.0)
        return int(lengths.sum()) // len(grid), float(ns.sum()) / len(grid) / layout.context

    tokens, attention = map(np.array, zip(*map(even, plans), strict=True))

    def several(places: list[int]) -> Simulated:
        shape = len(places), len(plans[places[0]].micro_batches), layout.data
        each = (
            np.broadcast_to(attention[places, None, None, None], (*shape, layout.context)) + model.table.call
        )
        rank_tokens = np.broadcast_to(tokens[places, None, None], shape)
        repeats = None if recomputed is None else np.stack([recomputed[place] for place in places])
        return run_steps(rank_tokens, model.attention_ways(each), model, recomputed=repeats)

    return by_count([len(plan.micro_batches) for plan in plans], several)


def _measure(shards: Shards, model: LayerModel) -> tuple[npt.NDArray[np.int64], Times, BoolArray]:
    """Tokens int[n, m, dp] and attention float[n, m, dp, cp] of the plans; whether any rank attends to earlier keys."""
    layout = model.layout
    n, m = len(shards), len(shards[0])
    plans = [plan for iteration in shards for row in iteration for plan in row]
    tokens = np.array([plan.tokens for plan in plans], dtype=np.int64).reshape(n, m, layout.data)
    attention = Times(*(t.reshape(n, m, layout.data, layout.context) for t in model.attention(plans)))
    return tokens, attention, cut_of(plans).reshape(tokens.shape)


def cut_of(plans: Sequence[ShardPlan]) -> BoolArray:
    """bool[n]: whether any rank's queries attend to earlier keys, which takes another kernel call."""
    return np.array([any((rows[:, 1] > 0).any() for rows in plan.ranks) for plan in plans], dtype=np.bool_)


def _device(tokens: npt.NDArray[np.int64], attention: Times, model: LayerModel) -> Times:
    """float[n, m, dp]: a layer's time on the slowest context rank of each micro-batch."""
    linear = model.linear(tokens / model.layout.context)
    return Times(*(a.max(axis=-1) + base for a, base in zip(attention, linear, strict=True)))


def recomputed_by_flags(tokens: IntArray, model: LayerModel) -> IntArray:
    """int[n, dp, P, V, m]: layers that the model's flags recompute, for tokens int[n, m, dp]."""
    n, m, dp = tokens.shape
    layers = model.recomputed_layers
    return np.broadcast_to(layers[:, :, None], (n, dp, *layers.shape, m))


def _launches(cuts: BoolArray, grouped: BoolArray, recomputed: IntArray, model: LayerModel) -> Launches:
    """float[n * dp, P, V, m]: the host's launches of each forward and backward."""
    embedding, loss = (Times(*(np.full(cuts.shape, way) for way in end)) for end in model.host_ends())
    ends = _ends(embedding, loss, grouped)
    return Launches(*_stages(model.host(cuts), ends, recomputed, model, model.host_again(cuts)))


def _stages(
    layer: Times,
    ends: Sequence[tuple[FloatArray, FloatArray]],
    recomputed: IntArray,
    model: LayerModel,
    repeat: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """float[n * dp, P, V, m] of each way: the layers of a stage, with what the first and the last have besides.

    Args:
        recomputed: int[n, dp, P, V, m], layers whose forward the backward repeats.
        repeat: float[n, m, dp], that forward's time for a layer; None if it is the first one's.
    """
    forward, backward = (_stage_times(way, end, model) for way, end in zip(layer, ends, strict=True))
    repeated = (layer.forward if repeat is None else repeat).swapaxes(1, 2)[:, :, None, None]
    return forward, backward + (recomputed * repeated).reshape(backward.shape)


def _transfer(tokens: npt.NDArray[np.int64], model: LayerModel) -> FloatArray:
    """float[n]: the transfer of an iteration's largest micro-batch, used for all: stages seldom wait for links."""
    sizes = tokens.max(axis=(1, 2)) / model.layout.context
    return np.array([model.transfer_ns(float(size)) for size in sizes])


def run_steps(
    tokens: npt.NDArray[np.int64],
    attention: Times,
    model: LayerModel,
    *,
    cuts: BoolArray | None = None,
    orders: Sequence[tuple[int, ...] | None] | None = None,
    recomputed: IntArray | None = None,
) -> Simulated:
    """As `simulate`, from the plans' figures.

    Args:
        tokens: int[n, m, dp] of each micro-batch.
        attention: float[n, m, dp, cp], nanoseconds of a layer.
        cuts: bool[n, m, dp], whether any rank attends to earlier keys; None: all do if there are context ranks.
        orders: group sizes of each iteration's ranks, [n * dp].
        recomputed: int[n, dp, P, V, m], layers that a backward recomputes; None: those that the model's flags name.
    """
    n, _, dp = tokens.shape
    layout = model.layout
    cuts = np.full(tokens.shape, layout.context > 1) if cuts is None else cuts
    recomputed = recomputed_by_flags(tokens, model) if recomputed is None else recomputed
    grouped = _grouped(tokens, orders)
    device, host = _device(tokens, attention, model), model.host(cuts)
    rank_tokens = tokens / layout.context
    ends = _ends(model.embedding(rank_tokens), model.loss(rank_tokens), grouped)
    forward, backward = _stages(device, ends, recomputed, model)
    end_times = _ends_by_order(
        *(forward, backward, _launches(cuts, grouped, recomputed, model)),
        orders or [None] * (n * dp),
        np.repeat(_transfer(tokens, model), dp),
    )
    end_times = end_times.reshape(n, dp, layout.pipeline).max(axis=1)
    paced = (forward + backward).sum(axis=(2, 3)).reshape(n, dp, layout.pipeline)
    linear = model.linear(rank_tokens)
    both = (linear.forward + linear.backward)[..., None] + attention.forward + attention.backward
    layer_ns = both.sum(axis=1)
    layers = model.stage_layers.sum(axis=1)
    repeats = recomputed.sum(axis=3)  # [n, dp, P, m]
    once_more = linear.forward[..., None] + attention.forward
    compute = layer_ns[:, :, None, :] * layers[:, None] + np.einsum("ndpm,nmdc->ndpc", repeats, once_more)
    fullest = int(layers.argmax())
    share = repeats[:, :, fullest].swapaxes(1, 2) / layers[fullest]
    slowest = np.maximum(
        device.forward * (1 + share) + device.backward,
        host.forward + host.backward + share * model.host_again(cuts),
    )
    for times in ends:
        compute[:, :, 0] += times[0].sum(axis=1)[..., None]
        compute[:, :, -1] += times[1].sum(axis=1)[..., None]
    return Simulated(
        (end_times + _after(forward, backward, model, n)).max(axis=1) + 1e9 * model.assumptions.step_overhead,
        list(slowest * int(layers.max())),
        compute,
        tokens.sum(axis=(1, 2)),
        paced,
        end_times.max(axis=1),
    )


def _ends_by_order(
    forward: FloatArray,
    backward: FloatArray,
    launches: Launches,
    orders: Sequence[tuple[int, ...] | None],
    transfer: FloatArray,
) -> FloatArray:
    """float[n * dp, P]: `pipeline_ends`, in one pass for all pipelines whose steps wait for one another alike. They are
    then those of the first order, whose n-th backward takes the time of each one's own."""
    end_times = np.empty(forward.shape[:2])
    _, stages, chunks, count = forward.shape
    alike: dict[Any, list[int]] = {}
    sizes_of_rows = [None if sizes is None or max(sizes) == 1 else sizes for sizes in orders]
    for row, sizes in enumerate(sizes_of_rows):
        alike.setdefault(sizes and waits_of(stages, sizes, chunks), []).append(row)
    turns = np.array([backward_turns(sizes or (1,) * count) for sizes in sizes_of_rows])
    for rows in alike.values():
        places = np.empty((len(rows), 1, 1, count), dtype=np.int64)
        places[..., turns[rows[0]]] = turns[rows][:, None, None]
        backwards = (np.take_along_axis(way[rows], places, axis=3) for way in (backward, launches.backward))
        end_times[rows] = pipeline_ends(
            forward[rows],
            next(backwards),
            transfer=transfer[rows],
            blocking=chunks == 1,
            groups=sizes_of_rows[rows[0]],
            launches=Launches(launches.forward[rows], next(backwards)),
        )
    return end_times


def _grouped(tokens: npt.NDArray[np.int64], orders: Sequence[tuple[int, ...] | None] | None) -> BoolArray:
    """bool[n, 1, dp]: whether an iteration of a rank runs in groups of micro-batches."""
    n, _, dp = tokens.shape
    return np.array([sizes is not None for sizes in orders or [None] * (n * dp)]).reshape(n, 1, dp)


def _ends(embedding: Times, loss: Times, grouped: BoolArray) -> list[tuple[FloatArray, FloatArray]]:
    """Times of embedding and loss in forward and backward. The loss's are all in the backward where steps run in groups
    (plugin/step/losses.py)."""
    deferred = Times(np.where(grouped, 0, loss.forward), loss.backward + np.where(grouped, loss.forward, 0))
    return list(zip(embedding, deferred, strict=True))


def _stage_times(layer: FloatArray, ends: tuple[FloatArray, FloatArray], model: LayerModel) -> FloatArray:
    """float[n * dp, P, V, m] of a layer's time float[n, m, dp]."""
    layout = model.layout
    n, m, dp = layer.shape
    times = np.multiply(layer.swapaxes(1, 2)[:, :, None, None], model.stage_layers[:, :, None], order="C")
    times[:, :, 0, 0] += ends[0].swapaxes(1, 2)
    times[:, :, -1, -1] += ends[1].swapaxes(1, 2)
    return times.reshape(n * dp, layout.pipeline, layout.virtual, m)


def _after(forward: FloatArray, backward: FloatArray, model: LayerModel, n: int) -> FloatArray:
    """float[n, P]: gradient reduction, optimizer and parameter gather that a stage adds to its pipeline.

    Overlapped, as flags say, the reduction runs beside the backward of the last micro-batch, the gather beside the next
    iteration's first forward, for which this one's first stands; the longer of the two in each pair is what shows.
    """
    layout = model.layout
    shares = [
        model.assumptions.dp_exposed if overlaps else 1.0
        for overlaps in (layout.reduce_overlaps, layout.gather_overlaps)
    ]
    after = np.empty((n, layout.pipeline))
    for stage in range(layout.pipeline):
        reduce, gather = model.gradient_sync_ns(stage)
        hides = (
            backward[:, stage, :, -1].sum(axis=1).reshape(n, -1).min(axis=1),
            forward[:, stage, :, 0].sum(axis=1).reshape(n, -1).min(axis=1),
        )
        exposed = sum(
            np.maximum(time - hidden, 0.0) + share * np.minimum(time, hidden)
            for time, hidden, share in zip((reduce, gather), hides, shares, strict=True)
        )
        after[:, stage] = exposed + model.optimizer_ns(stage)
    return after
