"""A job as the commands describe it: its model, layout and settings, the plans that it would train, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import explain_bad_values
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.packing.chunk_limits import Trainer
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.job import plan_job, sample_lengths_of
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.whole_documents import longest_whole
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.alignment import multiple
from wlb_megatron.sharding.cut import cut_plans, orders_of
from wlb_megatron.simulator.iteration import Orders, Shards, Simulated, simulate
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.cost_model import CostModel, document_cost, quadratic_at
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Job:
    """window: tokens. micro_batches: windows of a data-parallel rank and step. iterations: that are looked at, after
    `warm_up` planned ones in which queues fill. seed: of the shuffle, None for the given order. trainer: what decides
    about documents in chunks."""

    model: LayerModel
    window: int
    micro_batches: int
    iterations: int
    warm_up: int
    seed: int | None
    profile: Profile | None = None
    trainer: Trainer = field(default_factory=Trainer)

    @property
    def alignment(self) -> int:
        return multiple(self.model.layout.cp, self.model.layout.tp)

    def cost(self, config: WlbConfig) -> CostModel:
        """What packing balances by, as in training: settings, else the profile, else the model's shape."""
        model, shape, costs = self.model, self.model.shape, self.model.costs
        own = model.cost()
        if costs is not None:
            at, document = costs.quadratic_at, costs.per_document
        else:
            heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
            at = quadratic_at(shape.heads * shape.head_dim, shape.layer_parameters)
            document = document_cost(h100().scaled(**heads).segment, shape.layer_parameters)
        return CostModel(
            at if config.quadratic_at is None else config.quadratic_at,
            document if config.document_cost is None else config.document_cost,
            own.per_micro_batch if config.micro_batch_cost is None else config.micro_batch_cost,
            own.least_micro_batch,
        )

    def longest(self, config: WlbConfig) -> int:
        """Tokens of the longest document that is not split; memory is not looked at."""
        return longest_whole(config.overlong, self.window, self.micro_batches)[0]

    def planner(self, lengths: Lengths, config: WlbConfig) -> Planner:
        """Raises WlbError on settings that cannot work."""
        layout = self.model.layout
        with explain_bad_values():
            longest = self.longest(config)
            rules = Rules(longest, config.overlong, self.seed, endless=True)
            stream = DocumentStream.of_lengths(lengths, rules, name="--lengths")
            return plan_job(
                stream,
                config,
                self.cost(config),
                window=self.window,
                micro_batches=self.micro_batches,
                dp=layout.dp,
                pp=layout.pp,
                vpp=layout.chunks,
                alignment=self.alignment,
                sample=sample_lengths_of(stream, len(lengths)),
                no_chunks=self.trainer.chunks_refused(),
                longest=stream.longest,
            )

    def plans(self, planner: Planner) -> list[IterationPlan]:
        """All that are planned: the first `warm_up` ones are not to be looked at."""
        return list(islice(iter(planner.next_iteration, None), self.warm_up + self.iterations))

    def shards(self, plans: Sequence[IterationPlan], config: WlbConfig) -> Shards:
        return cut_plans(plans, self.model.layout.cp, self.alignment, config.sharding, self.model.table)

    def orders(self, plans: Sequence[IterationPlan]) -> Orders:
        return orders_of(plans, in_step=self.trainer.in_step)

    def simulated(self, plans: Sequence[IterationPlan], shards: Shards) -> Simulated:
        with explain_bad_values():
            return simulate(shards, self.model, orders=self.orders(plans))
