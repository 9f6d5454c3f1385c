"""Simulates iterations of 4D training from their shard plans, in one pass for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.schedule import Event, Launches, pipeline_ends, pipeline_events
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.simulator.model import LayerModel, Times

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Shards = Sequence[Sequence[Sequence[ShardPlan]]]
"""Plans [iteration][micro-batch][data-parallel rank]. Iterations may differ in their number of micro-batches."""
Orders = Sequence[Sequence[tuple[int, ...] | None]]
"""Group sizes [iteration][data-parallel rank], see pipeline.groups; None: Megatron's own order."""


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

    @property
    def micro_batch_count(self) -> float:
        """Micro-batches of a data-parallel rank, mean over iterations."""
        return float(np.mean([len(times) for times in self.micro_batches]))


Recomputed = Sequence[IntArray]
"""int[dp, P, V, m] of each iteration: layers that each micro-batch recomputes in each model chunk of each stage."""


def simulate(
    shards: Shards,
    model: LayerModel,
    *,
    blocking: bool = True,
    orders: Orders | None = None,
    recomputed: Recomputed | None = None,
) -> Simulated:
    """Simulates a run. In a layer a micro-batch takes as long as its slowest context rank, in forward and in
    backward.

    Iterations with equally many micro-batches are simulated in one pass. blocking: transfers between stages as in
    Megatron's 1F1B (see pipeline_ends); ignored by interleaved schedules. orders: given if documents are in chunks.
    recomputed: None: as the model's flags say. Raises ValueError if the plans do not match the model's layout.
    """

    def several(chosen: list[int]) -> Simulated:
        tokens, attention, cut = _measure([shards[at] for at in chosen], model)
        own = None if orders is None else [sizes for at in chosen for sizes in orders[at]]
        again = None if recomputed is None else np.stack([recomputed[at] for at in chosen])
        return run_steps(tokens, attention, model, blocking=blocking, cut=cut, orders=own, recomputed=again)

    return by_count([len(iteration) for iteration in shards], several)


def by_count(counts: Sequence[int], several: Callable[[list[int]], Simulated]) -> Simulated:
    """All iterations, in order, from one pass for each number of micro-batches.

    counts: micro-batches of each iteration. several: simulates the iterations at the given positions.
    """
    if not counts:
        raise ValueError("no iteration to simulate")
    alike: dict[int, list[int]] = {}
    for at, count in enumerate(counts):
        alike.setdefault(count, []).append(at)
    parts = [several(chosen) for chosen in alike.values()]
    back = np.argsort([at for chosen in alike.values() for at in chosen])
    micro_batches = [times for part in parts for times in part.micro_batches]
    return Simulated(
        np.concatenate([part.steps for part in parts])[back],
        [micro_batches[at] for at in back],
        np.concatenate([part.busy for part in parts])[back],
        np.concatenate([part.tokens for part in parts])[back],
        np.concatenate([part.paced for part in parts])[back],
        np.concatenate([part.pipeline for part in parts])[back],
    )


def group_events(
    shards: Shards,
    model: LayerModel,
    *,
    blocking: bool = True,
    orders: Orders | None = None,
    recomputed: Recomputed | None = None,
) -> list[list[Event]]:
    """Events (nanoseconds) of the first iteration's pipelines, one list for each data-parallel rank."""
    tokens, attention, cut = _measure(shards[:1], model)
    grouped = _grouped(tokens, None if orders is None else orders[0])
    again = recomputed_by_flags(tokens, model) if recomputed is None else recomputed[0][None]
    forward, backward = _stages(
        _device(tokens, attention, model), _ends(tokens, model, grouped), again, model
    )
    launches = _launches(cut, grouped, again, model)
    layout, transfer = model.layout, _transfer(tokens, model)
    blocking = blocking and layout.virtual == 1
    return [
        pipeline_events(
            forward[rank],
            backward[rank],
            layout.pipeline,
            transfer=float(transfer[0]),
            blocking=blocking,
            groups=None if orders is None else orders[0][rank],
            launches=Launches(launches.forward[rank], launches.backward[rank]),
        )
        for rank in range(layout.data)
    ]


def _measure(shards: Shards, model: LayerModel) -> tuple[npt.NDArray[np.int64], Times, BoolArray]:
    """Tokens int[n, m, dp] and attention float[n, m, dp, cp] of the plans; whether any rank attends to earlier keys."""
    layout = model.layout
    n, m = len(shards), len(shards[0])
    plans = [plan for iteration in shards for row in iteration for plan in row]
    if (
        not plans
        or len(plans) != n * m * layout.data
        or any(plan.cp_size != layout.context for plan in plans)
    ):
        raise ValueError(
            f"plans are not {n} iterations of {m} micro-batches on dp {layout.data}, cp {layout.context}: "
            "plan for the layout that is simulated"
        )
    tokens = np.array([plan.tokens for plan in plans], dtype=np.int64).reshape(n, m, layout.data)
    attention = Times(*(t.reshape(n, m, layout.data, layout.context) for t in model.attention(plans)))
    return tokens, attention, cut_of(plans).reshape(tokens.shape)


def cut_of(plans: Sequence[ShardPlan]) -> BoolArray:
    """bool[n]: whether any rank's queries attend to earlier keys, which takes another kernel call."""
    return np.array([any((rows[:, 1] > 0).any() for rows in plan.ranks) for plan in plans], dtype=np.bool_)


def _device(tokens: npt.NDArray[np.int64], attention: Times, model: LayerModel) -> Times:
    """float[n, m, dp]: a layer's time on the slowest context rank of each micro-batch."""
    linear = model.linear(tokens / model.layout.context)
    return Times(*(a.max(axis=-1) + other for a, other in zip(attention, linear, strict=True)))


def recomputed_by_flags(tokens: IntArray, model: LayerModel) -> IntArray:
    """int[n, dp, P, V, m]: layers that the model's flags recompute, for tokens int[n, m, dp]."""
    n, m, dp = tokens.shape
    layout = model.layout
    layers = [[model.recomputed_layers(p, c) for c in range(layout.virtual)] for p in range(layout.pipeline)]
    by_chunk = np.array(layers, dtype=np.int64)[:, :, None]
    return np.broadcast_to(by_chunk, (n, dp, *by_chunk.shape[:2], m))


def _launches(cut: BoolArray, grouped: BoolArray, recomputed: IntArray, model: LayerModel) -> Launches:
    """float[n * dp, P, V, m]: the host's launches of each forward and backward."""
    host = model.host(cut)
    layer = Times(*(np.broadcast_to(way, cut.shape) for way in host))
    embedding, loss = (Times(*(np.full(cut.shape, way) for way in end)) for end in model.host_ends())
    loss = _deferred(loss, grouped)
    ends = [(embedding.forward, loss.forward), (embedding.backward, loss.backward)]
    again = Times(np.broadcast_to(model.host_again(cut), cut.shape), layer.backward)
    return Launches(*_stages(layer, ends, recomputed, model, again.forward))


def _stages(
    layer: Times,
    ends: Sequence[tuple[FloatArray, FloatArray]],
    recomputed: IntArray,
    model: LayerModel,
    again: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """float[n * dp, P, V, m] of each way: the layers of a stage, with what the first and the last have besides.

    recomputed: int[n, dp, P, V, m], layers whose forward the backward repeats; again: its time for a layer, float[n, m,
    dp], None: as in the forward.
    """
    forward, backward = (_stage_times(way, more, model) for way, more in zip(layer, ends, strict=True))
    repeated = (layer.forward if again is None else again).swapaxes(1, 2)[:, :, None, None]
    return forward, backward + (recomputed * repeated).reshape(backward.shape)


def _transfer(tokens: npt.NDArray[np.int64], model: LayerModel) -> FloatArray:
    """float[n]: the transfer of an iteration's largest micro-batch, used for all, because stages seldom wait for
    links.
    """
    longest = tokens.max(axis=(1, 2)) / model.layout.context
    return np.array([model.transfer_ns(float(size)) for size in longest])


def run_steps(
    tokens: npt.NDArray[np.int64],
    attention: Times,
    model: LayerModel,
    *,
    blocking: bool,
    cut: BoolArray | None = None,
    orders: Sequence[tuple[int, ...] | None] | None = None,
    recomputed: IntArray | None = None,
) -> Simulated:
    """As `simulate`, from the plans' figures.

    tokens: int[n, m, dp] of each micro-batch. attention: float[n, m, dp, cp], nanoseconds of a layer. cut: bool[n, m,
    dp], whether any rank attends to earlier keys; None: all do if there are context ranks. orders: group sizes of
    each iteration's ranks, [n * dp]. recomputed: int[n, dp, P, V, m], layers that a backward recomputes; None: as the
    model's flags say.
    """
    n, _, dp = tokens.shape
    layout = model.layout
    cut = np.full(tokens.shape, layout.context > 1) if cut is None else cut
    recomputed = recomputed_by_flags(tokens, model) if recomputed is None else recomputed
    grouped = _grouped(tokens, orders)
    device, host = _device(tokens, attention, model), model.host(cut)
    ends = _ends(tokens, model, grouped)
    forward, backward = _stages(device, ends, recomputed, model)
    done = _ends_by_order(
        *(forward, backward, _launches(cut, grouped, recomputed, model)),
        orders or [None] * (n * dp),
        np.repeat(_transfer(tokens, model), dp),
        blocking and layout.virtual == 1,
    )
    done = done.reshape(n, dp, layout.pipeline).max(axis=1)
    paced = (forward + backward).sum(axis=(2, 3)).reshape(n, dp, layout.pipeline)
    linear = model.linear(tokens / layout.context)
    both = (linear.forward + linear.backward)[..., None] + attention.forward + attention.backward
    own = both.sum(axis=1)
    layers = np.array(
        [sum(model.layers_of(p, c) for c in range(layout.virtual)) for p in range(layout.pipeline)]
    )
    again = recomputed.sum(axis=3)  # [n, dp, P, m]
    once_more = linear.forward[..., None] + attention.forward
    busy = own[:, :, None, :] * layers[:, None] + np.einsum("ndpm,nmdc->ndpc", again, once_more)
    fullest = int(layers.argmax())
    share = again[:, :, fullest].swapaxes(1, 2) / layers[fullest]
    slowest = np.maximum(
        device.forward * (1 + share) + device.backward,
        host.forward + host.backward + share * model.host_again(cut),
    )
    for times in ends:
        busy[:, :, 0] += times[0].sum(axis=1)[..., None]
        busy[:, :, -1] += times[1].sum(axis=1)[..., None]
    return Simulated(
        (done + _after(forward, backward, model, n)).max(axis=1) + 1e9 * model.assumptions.step_overhead,
        list(slowest * int(layers.max())),
        busy,
        tokens.sum(axis=(1, 2)),
        paced,
        done.max(axis=1),
    )


def _ends_by_order(
    forward: FloatArray,
    backward: FloatArray,
    launches: Launches,
    orders: Sequence[tuple[int, ...] | None],
    transfer: FloatArray,
    blocking: bool,
) -> FloatArray:
    """float[n * dp, P]: `pipeline_ends`, in one pass for all pipelines of one order."""
    done = np.empty(forward.shape[:2])
    alike: dict[tuple[int, ...] | None, list[int]] = {}
    for at, sizes in enumerate(orders):
        alike.setdefault(None if sizes is None or max(sizes) == 1 else sizes, []).append(at)
    for sizes, rows in alike.items():
        done[rows] = pipeline_ends(
            forward[rows],
            backward[rows],
            transfer=transfer[rows],
            blocking=blocking,
            groups=sizes,
            launches=Launches(launches.forward[rows], launches.backward[rows]),
        )
    return done


def _grouped(tokens: npt.NDArray[np.int64], orders: Sequence[tuple[int, ...] | None] | None) -> BoolArray:
    """bool[n, 1, dp]: whether an iteration of a rank runs in groups of micro-batches."""
    n, _, dp = tokens.shape
    return np.array([sizes is not None for sizes in orders or [None] * (n * dp)]).reshape(n, 1, dp)


def _deferred(loss: Times, grouped: BoolArray) -> Times:
    """The loss's times, all in the backward where steps run in groups (plugin/step/deferred_losses.py)."""
    return Times(np.where(grouped, 0, loss.forward), loss.backward + np.where(grouped, loss.forward, 0))


def _ends(
    tokens: npt.NDArray[np.int64], model: LayerModel, grouped: BoolArray
) -> list[tuple[FloatArray, FloatArray]]:
    """Times of embedding and loss in forward and backward, float[n, m, dp] each."""
    embedding = model.embedding(tokens / model.layout.context)
    loss = _deferred(model.loss(tokens / model.layout.context), grouped)
    return [(embedding.forward, loss.forward), (embedding.backward, loss.backward)]


def _stage_times(layer: FloatArray, ends: tuple[FloatArray, FloatArray], model: LayerModel) -> FloatArray:
    """float[n * dp, P, V, m] of a layer's time float[n, m, dp]."""
    layout = model.layout
    n, m, dp = layer.shape
    times = np.empty((n, dp, layout.pipeline, layout.virtual, m))
    for stage in range(layout.pipeline):
        for chunk in range(layout.virtual):
            times[:, :, stage, chunk] = (layer * model.layers_of(stage, chunk)).swapaxes(1, 2)
    times[:, :, 0, 0] += ends[0].swapaxes(1, 2)
    times[:, :, -1, -1] += ends[1].swapaxes(1, 2)
    return times.reshape(n * dp, layout.pipeline, layout.virtual, m)


def _after(forward: FloatArray, backward: FloatArray, model: LayerModel, n: int) -> FloatArray:
    """float[n, P]: gradient reduction, optimizer and parameter gather that a stage adds to its pipeline.

    Overlapped, as flags say, the reduction runs beside the backward of the last micro-batch, the gather beside the next
    iteration's first forward, for which this one's first stands; the longer of the two in each pair is what shows.
    """
    layout = model.layout
    shown = [
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
            for time, hidden, share in zip((reduce, gather), hides, shown, strict=True)
        )
        after[:, stage] = exposed + model.optimizer_ns(stage)
    return after
