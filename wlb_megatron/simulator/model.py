"""Times of a GPT's layers on one GPU of a 4D layout: from a profile, or attention from a kernel table and the rest by
assumed rates.

GPUs are numbered as Megatron does: tensor ranks side by side, then context, data and pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.sharding.cut import predict_all
from wlb_megatron.sharding.segments import ShardPlan
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import (
    EXPERT_NS,
    EXPERT_WAIT_NS,
    EXPERTS_EXCHANGE_NS,
    EXPERTS_NS,
    LAUNCH_NS,
    ONE_KERNEL_NS,
    CostModel,
    Costs,
    chunk_ns,
    micro_batch_cost,
    stage_launch_ns,
)
from wlb_megatron.workload.kernel_table import KernelTable, h100
from wlb_megatron.workload.model import Layout, Model, ffn_parameters

FloatArray = npt.NDArray[np.float64]
EXCHANGE_LAUNCH = 200_000.0
"""Nanoseconds of the host to launch the exchange of keys in one direction, on an H200's host
(docs/results/2x_h200/attention_host.csv)."""
EXPERTS_BACK = 1.7
"""How many times as long as in the forward rows are moved to and from experts in the backward."""
FORWARD_SHARE = 1 / 3.5
"""The forward's share of attention's forward + backward time: two products of seven."""


class Times(NamedTuple):
    """Nanoseconds of a forward and of a backward."""

    forward: FloatArray
    backward: FloatArray


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """The times of a model on a layout.

    * measured: attention of any shape of heads, rescaled to this one's.
    * costs: of a profile of exactly this shape and tensor-parallel size. They replace `measured` and the rates; their
      links replace the network within a node.
    * layout: "full" of its recompute repeats layers in their backward, "selective" their attention alone. With its
      distributed_optimizer gradients are reduced and scattered, parameters gathered, and each rank updates its share;
      without it gradients travel both ways, and each rank updates all.

    Raises ValueError if layers are fewer than model chunks.
    """

    shape: Model
    layout: Layout
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: KernelTable = field(default_factory=h100)
    costs: Costs | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.pipeline * layout.virtual > self.layers:
            raise ValueError(
                f"{self.layers} layers are fewer than {layout.pipeline} stages x {layout.virtual} model chunks"
            )

    @property
    def parameters(self) -> int:
        """Weights of the whole model, with all experts and routers."""
        shape, experts = self.shape, self.shape.experts
        passed = self.layers * shape.layer_parameters + 2 * shape.vocab * shape.hidden
        if experts is None:
            return passed
        idle = (experts.count - experts.chosen) * ffn_parameters(shape, experts.ffn)
        routers = experts.count * shape.hidden
        # A layer without experts is taken to be as wide as what a token passes of one with them.
        return passed + (self.layers - experts.dense_layers) * (idle + routers)

    @property
    def layers(self) -> int:
        return int(self.shape.layers)

    @cached_property
    def table(self) -> KernelTable:
        """The kernel table, forward + backward, of one tensor-parallel rank's heads, with the context-parallel ranks'
        links.

        If there are fewer KV heads than tensor-parallel ranks, each rank holds one.
        """
        return self._linked(self.measured if self.costs is None else self.costs.table, 2)

    @cached_property
    def _ways(self) -> tuple[KernelTable, KernelTable] | None:
        """The kernel tables of forward and backward separately, if they were measured."""
        if self.costs is None:
            return None
        return self._linked(self.costs.forward, 1), self._linked(self.costs.backward, 1)

    def _linked(self, table: KernelTable, ways: int) -> KernelTable:
        """The table scaled to this model.

        Its exchange (K and V there and, if `ways` is 2, their gradients back) is slowed from NVLink's rate to that
        between the context-parallel ranks.
        """
        shape, layout = self.shape, self.layout
        scaled = table.scaled(
            heads=shape.heads // layout.tensor,
            kv_heads=max(shape.kv_heads // layout.tensor, 1),
            head_dim=shape.head_dim,
        )
        return self.assumptions.linked(scaled, layout.context, layout.tensor, ways)

    def attention(self, plans: Sequence[ShardPlan]) -> Times:
        """float64[plans, cp]: nanoseconds of a layer's attention and exposed exchange on each context-parallel rank."""
        if self._ways is not None:
            forward, backward = (predict_all(plans, way).astype(np.float64) for way in self._ways)
        else:
            both = predict_all(plans, self.table).astype(np.float64)
            forward, backward = both * FORWARD_SHARE, both * (1 - FORWARD_SHARE)
        if not self.layout.keep_keys:
            # Half of the table's exchange is keys and values on their way there; these now travel twice.
            table = self.table
            twice = replace(table, exchange=1.5 * table.exchange, exchange_row=1.5 * table.exchange_row)
            backward = backward + predict_all(plans, twice) - predict_all(plans, table)
        times = self._recomputed(forward, backward)
        chunked = np.array([[plan.chunks is not None] for plan in plans])
        return Times(times.forward, times.backward + chunked * chunk_ns(self._width, self.layout.context))

    @property
    def _width(self) -> float:
        """Heads x channels of a tensor-parallel rank."""
        return self.shape.heads * self.shape.head_dim / self.layout.tensor

    def attention_ways(self, both: FloatArray) -> Times:
        """Attention's forward and backward from their sum (nanoseconds), if no shard plan separates them."""
        share = FORWARD_SHARE
        if self._ways is not None:
            forward, backward = (float(way.diagonal_ns(np.array([8192]))[0]) for way in self._ways)
            share = forward / (forward + backward)
        return self._recomputed(both * share, both * (1 - share))

    def _recomputed(self, forward: FloatArray, backward: FloatArray) -> Times:
        return Times(forward, backward + forward if self.layout.recompute == "selective" else backward)

    def host(self, cuts: npt.ArrayLike) -> Times:
        """Nanoseconds of the host to launch a layer; cuts: bool, of ranks that attend to earlier keys."""
        second = np.asarray(cuts, dtype=np.float64)
        exchange = EXCHANGE_LAUNCH if self.layout.context > 1 else 0.0
        (forward, backward), (extra, back) = self._launches
        rerun, pp = self.layout.recompute == "selective", self.layout.pipeline
        forward, backward = stage_launch_ns((forward, backward), rerun, self.layers / pp if pp > 1 else None)
        back += rerun * extra
        share = self.assumptions.host_launch
        return Times(
            share * (forward + second * (extra + exchange)), share * (backward + second * (back + exchange))
        )

    @property
    def _launches(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Nanoseconds of the host to launch a layer's forward and backward, and what a call on earlier keys adds."""
        if self.costs is not None:
            return self.costs.host, self.costs.host_second
        experts = self.shape.experts
        each = ONE_KERNEL_NS if experts is not None and experts.one_kernel else EXPERT_NS
        exchange = EXPERTS_EXCHANGE_NS if experts is not None and experts.parallel > 1 else 0.0
        forward, backward = (
            dense + self._routed_share * (layer + exchange + self._rank_experts * one)
            for dense, layer, one in zip(LAUNCH_NS, EXPERTS_NS, each, strict=True)
        )
        return (forward, backward), (0.0, 0.0)

    @property
    def _routed_share(self) -> float:
        """Layers with experts of all layers."""
        experts = self.shape.experts
        return 0.0 if experts is None else 1 - experts.dense_layers / self.layers

    @property
    def _rank_experts(self) -> float:
        """Experts of a layer on one GPU."""
        experts = self.shape.experts
        return 0.0 if experts is None else experts.count / experts.parallel

    def host_again(self, cuts: npt.ArrayLike) -> FloatArray:
        """Nanoseconds of the host to launch a layer's forward once more, in the backward of a recomputed layer."""
        (forward, _), (extra, _) = self._launches
        return self.assumptions.host_launch * (forward + np.asarray(cuts, dtype=np.float64) * extra)

    def host_ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Nanoseconds of the host to launch embedding and loss, forward and backward; 0 without a profile."""
        share = self.assumptions.host_launch
        if self.costs is None:
            return (0.0, 0.0), (0.0, 0.0)
        (there, back), (loss, loss_back) = self.costs.host_embedding, self.costs.host_loss
        return (share * there, share * back), (share * loss, share * loss_back)

    def linear(self, tokens: npt.ArrayLike) -> Times:
        """Nanoseconds of a layer without attention, for a context-parallel rank's tokens. A layer that is recomputed in
        full takes its forward once more; iteration.py adds that, as for attention and the host's launches."""
        shape, tp, rates = self.shape, self.layout.tensor, self.assumptions
        t = np.asarray(tokens, dtype=np.float64)
        # Sequence parallelism: two all-gathers and two reduce-scatters of the hidden rows; backward gathers the two
        # inputs of column-parallel products once more. Without it: two all-reduces each way, of two such passes each.
        # Experts that are not cut over tensor ranks run none of their own: 2 of 4 are then attention's, 3 of 6 back.
        experts = shape.experts
        whole_experts = experts is not None and experts.tensor == 1 and not experts.shared
        share = rates.tp_exposed * (1 - self._routed_share / 2 if whole_experts else 1)
        collective = share * (t * self._tp_row_ns() + self._tp_wait_ns())
        sent = 2 * self._expert_exchange_ns(t)  # to the experts and back
        back = 6 if self.layout.sequence else 4
        exchange, exchange_back = 4 * collective + sent, back * collective + sent
        if self.costs is not None:
            forward, backward = self.costs.layer.at(t)
            return Times(forward + exchange, backward + exchange_back)
        products = t * (2 * shape.layer_parameters / tp / rates.matmul_rate * 1e9)
        widths = rates.activation_passes * shape.hidden + rates.ffn_passes * shape.ffn
        elements = t * (2 * widths / tp / rates.memory_rate * 1e9)
        weights = rates.weight_traffic * shape.layer_parameters / tp / rates.memory_rate * 1e9
        moved, small, more_weights = self._routed_ns(t)
        waits = experts is not None and not experts.fused_permutation
        late = rates.host_launch * self._routed_share * self._rank_experts * waits
        return Times(
            products + elements + exchange + moved + small + late * EXPERT_WAIT_NS[0],
            2 * products
            + 2 * elements
            + weights
            + exchange_back
            + EXPERTS_BACK * moved
            + 2 * small
            + more_weights
            + late * EXPERT_WAIT_NS[1],
        )

    def _routed_ns(self, t: FloatArray) -> tuple[FloatArray, float, float]:
        """Nanoseconds that a layer with experts adds to a dense one as wide as what a token passes: moving rows and the
        slowness of small products, both in a forward, and traffic of idle experts' weights in a backward. Each rank
        gets as many rows as it sends."""
        shape, experts, tp, rates = self.shape, self.shape.experts, self.layout.tensor, self.assumptions
        if experts is None:
            return 0 * t, 0.0, 0.0
        one = ffn_parameters(shape, experts.ffn) / experts.tensor
        rows = t * experts.chosen * experts.tensor / tp
        moved = rates.expert_passes * rows * 2 * shape.hidden / rates.memory_rate * 1e9
        small = 2 * rates.expert_rows * self._rank_experts * one / rates.matmul_rate * 1e9
        idle = self._rank_experts * one - experts.chosen * one * experts.tensor / tp
        traffic = rates.weight_traffic * idle / rates.memory_rate * 1e9
        share = self._routed_share
        return share * moved, share * small, share * traffic

    def _expert_exchange_ns(self, t: FloatArray) -> FloatArray:
        """Nanoseconds of an all-to-all of the rows that a rank's tokens send to their experts.

        8 experts a token over 4 ranks: 6 of the 8 rows leave the GPU. Each rank gets as many rows as it sends.
        """
        experts, tp, rates = self.shape.experts, self.layout.tensor, self.assumptions
        if experts is None or experts.parallel == 1:
            return 0 * t
        group = experts.parallel, experts.tensor
        leaving = t * experts.chosen / tp * (group[0] - 1) / group[0]
        seconds = leaving * 2 * self.shape.hidden / rates.pair_rate(*group) + rates.latency(*group)
        return self._routed_share * 1e9 * seconds

    def embedding(self, tokens: npt.ArrayLike) -> Times:
        """Look-up on the first stage (ns): reads and writes rows; tensor ranks reduce-scatter them."""
        t = np.asarray(tokens, dtype=np.float64)
        rates = self.assumptions
        exchange = t * self._tp_row_ns() + self._tp_wait_ns()
        if self.costs is not None:
            forward, backward = self.costs.embedding.at(t)
            return Times(forward + exchange, backward + exchange)
        rows = t * (2 * 2 * self.shape.hidden / rates.memory_rate * 1e9)
        return Times(rows + exchange, rows + exchange)

    def loss(self, tokens: npt.ArrayLike) -> Times:
        """Output layer and cross entropy on the last stage (ns): fp32 logits, read and written several times."""
        shape, tp, rates = self.shape, self.layout.tensor, self.assumptions
        t = np.asarray(tokens, dtype=np.float64)
        gather = t * self._tp_row_ns() + self._tp_wait_ns()
        if self.costs is not None:
            forward, backward = self.costs.loss.at(t)
            return Times(forward + gather, backward + gather)
        product = t * (2 * shape.hidden * shape.vocab / tp / rates.matmul_rate * 1e9)
        logits = t * (rates.logit_traffic * shape.vocab / tp / rates.memory_rate * 1e9)
        return Times(product + logits + gather, 2 * product + logits / 2 + gather)

    @cached_property
    def stage_layers(self) -> npt.NDArray[np.int64]:
        """int64[P, V]: layers of each model chunk of each stage, spread evenly, with one more on earlier chunks. 126
        over 16 stages are 8 ... 8 7 7."""
        layout = self.layout
        position = np.arange(layout.virtual * layout.pipeline).reshape(layout.virtual, layout.pipeline).T
        return self.layers // position.size + (position < self.layers % position.size)

    @property
    def recomputed_layers(self) -> npt.NDArray[np.int64]:
        """int64[P, V]: those of them that a backward recomputes in full, by the flags."""
        if self.layout.recompute != "full":
            return 0 * self.stage_layers
        count = self.layout.recompute_layers if self.layout.recompute_block else self.layers
        return np.minimum(self.stage_layers, count)

    @property
    def recomputed_share(self) -> float:
        """Recomputed layers of all layers, by the flags."""
        return int(self.recomputed_layers.sum()) / self.layers

    def transfer_ns(self, tokens: float) -> float:
        """Nanoseconds to send one micro-batch's hidden rows to the next stage, divided over tensor ranks."""
        layout, rates = self.layout, self.assumptions
        if layout.pipeline == 1:
            return 0.0
        stride = layout.tensor * layout.context * layout.data
        volume = 2 * self.shape.hidden * tokens / layout.tensor
        link = ((self.costs and self.costs.links) or {}).get("p2p")
        if link is not None and 2 * stride <= rates.node:
            return link.latency + volume * link.per_byte
        return 1e9 * (volume / rates.pair_rate(2, stride) + rates.latency(2, stride))

    def gradient_sync_ns(self, stage: int) -> tuple[float, float]:
        """Nanoseconds of a stage's reduction of gradients and gather of parameters, over the ranks that hold the same
        ones: data and context ranks, and of experts fewer. Without the distributed optimizer the first is an
        all-reduce, and the second is 0.
        """
        rates, shared = self.assumptions, self.layout.distributed_optimizer
        reduce, gather = (
            sum(rates.ring_ns(size * count, copies, stride) for count, copies, stride in self._held(stage))
            for size in (rates.gradient_bytes * (1 if shared else 2), rates.parameter_bytes * shared)
        )
        return reduce, gather

    def optimizer_ns(self, stage: int) -> float:
        owned = sum(
            count / (copies if self.layout.distributed_optimizer else 1)
            for count, copies, _ in self._held(stage)
        )
        if self.costs is not None:
            return owned * self.costs.optimizer
        return 1e9 * owned * self.assumptions.optimizer_bytes / self.assumptions.memory_rate

    def cost(self) -> CostModel:
        """Packing's cost model on this layout: a layer's attention relative to the rest, and the fixed costs of
        documents and micro-batches.

        Attention of long documents is assumed even over context ranks (diagonals of 64K, which have no tile effects).
        """
        probe = np.array([65536], dtype=np.int64)
        table = replace(self.table, segment=0.0, query_row=0.0, key_row=0.0)
        pair = float(table.diagonal_ns(probe)[0]) / 65536**2
        line = self.linear(np.array([0.0, 65536.0]))
        rows = self.table.query_row + self.table.key_row
        layout, shape, repeats = self.layout, self.shape, self.recomputed_share
        token = float(((1 + repeats) * line.forward + line.backward) @ [-1, 1]) / 65536 + rows
        per_micro_batch = micro_batch_cost(
            self.costs,
            shape.layer_parameters / layout.tensor,
            self._width,
            layout.context,
            recompute=repeats,
            layers=max(1, self.layers // layout.pipeline) if layout.pipeline > 1 else None,
        )
        forward, backward = (self.assumptions.host_launch * way for way in per_micro_batch.least)
        return CostModel(
            quadratic_at=token / pair,
            per_document=self.table.segment / token,
            per_micro_batch=per_micro_batch.own,
            least_micro_batch=(forward, backward),
            per_chunk=per_micro_batch.chunk,
            backward=2 + repeats,
        )

    def _held(self, stage: int) -> list[tuple[float, int, int]]:
        """(parameters on one GPU of a stage, ranks that hold the same ones, GPUs from one to the next of these).

        8 experts of a layer over 4 ranks, one tensor rank each, on 16 GPUs of a stage: 2 of them on a GPU, 4 copies.
        """
        layout, shape, experts = self.layout, self.shape, self.shape.experts
        layers = int(self.stage_layers[stage].sum())
        ends = (stage == 0) + (stage == layout.pipeline - 1)
        parameters, copies = shape.layer_parameters, layout.data * layout.context
        parts = []
        if experts is not None:
            one = ffn_parameters(shape, experts.ffn)
            parameters -= experts.chosen * one
            expert_ranks = experts.parallel * experts.tensor
            count = layers * experts.count * one / expert_ranks
            parts.append((count, max(1, copies * layout.tensor // expert_ranks), expert_ranks))
        dense = (layers * parameters + ends * shape.vocab * shape.hidden) / layout.tensor
        return [(dense, copies, layout.tensor), *parts]

    def _tp_row_ns(self) -> float:
        tp, rates = self.layout.tensor, self.assumptions
        return 1e9 * 2 * self.shape.hidden * (tp - 1) / tp / rates.ring_rate(tp, 1)

    def _tp_wait_ns(self) -> float:
        return 1e9 * self.assumptions.latency(self.layout.tensor, 1) if self.layout.tensor > 1 else 0.0
