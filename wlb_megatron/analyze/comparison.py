"""The same documents packed as Megatron would and as set, both simulated and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from wlb_megatron.analyze.measure import Layout, Measured, measure
from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.packing.job import arrival_order
from wlb_megatron.packing.packer import Packer
from wlb_megatron.packing.varlen_packer import longest_micro_batch
from wlb_megatron.plan import IterationPlan
from wlb_megatron.simulator.job import Job


@dataclass(frozen=True)
class Analysis:
    """Before (arrival order, per-sequence sharding) and after (the given settings), with what was settled on.

    assumed: no model was told, so a known one's figures stand for the user's.
    """

    lengths: Lengths
    config: WlbConfig
    layout: Layout
    micro_batches: int
    quadratic_at: float
    capacity: int
    thresholds: list[int]
    before: Measured
    after: Measured
    assumed: bool = False

    @property
    def measured(self) -> list[tuple[str, Measured]]:
        name = f"{self.config.packing}, {self.config.sharding}"
        return [("original, per-sequence", self.before), (name, self.after)]

    @property
    def speedup(self) -> float:
        """Predicted time per trained token, before over after."""
        return self.before.simulated.ns_per_token / self.after.simulated.ns_per_token

    @property
    def equal_work_speedup(self) -> float:
        """The same per unit of the documents' work: arrival order cuts documents, and cut ones need less attention."""
        before, after = (sum(map(float, (w.sum() for w in m.work))) / m.tokens for _, m in self.measured)
        return self.speedup * after / before

    @property
    def flags(self) -> str:
        """What to copy to the training command; arrival order where the settings are predicted no faster."""
        config = self.config if self.speedup >= 1 else arrival_order(self.config)
        plain = WlbConfig()
        given: dict[str, object] = {"packing": config.packing, "sharding": config.sharding}
        names = ["quadratic_at", "document_cost", "micro_batch_cost", "overlong", "max_documents"]
        if config.packing == "varlen":
            given |= {"max-tokens": self.capacity, "thresholds": config.thresholds}
            names += ["max_delay", "micro_batches_per_window", "chunks", "release"]
        elif config.packing != "original":
            given["balance-batches"] = config.balance_batches
        for name in names:
            value = getattr(config, name)
            if value != getattr(plain, name):
                given[name.replace("_", "-")] = value
        regather = " --wlb-regather-keys" * config.regather_keys
        return " ".join(f"--wlb-{name} {value}" for name, value in given.items()) + regather


def analyze(
    lengths: Lengths, config: WlbConfig, job: Job, progress: Callable[[], None] | None = None
) -> Analysis:
    """Plan and simulate both ways over the same endless stream.

    lengths: integers[n], tokens of each document. progress: called after each planned iteration. WlbError on settings
    that cannot work.
    """
    layout = Layout.of(job)

    def run(chosen: WlbConfig) -> tuple[Measured, Packer]:
        planner = job.planner(lengths, chosen)
        plans = list(
            _told(islice(iter(planner.next_iteration, None), job.warm_up + job.iterations), progress)
        )
        looked = plans[job.warm_up :]
        shards = job.shards(looked, chosen)
        simulated = job.simulated(looked, shards)
        settings = job.cost(chosen), layout, job.longest(chosen), job.orders(looked)
        found = measure(plans, shards, simulated, *settings)
        return found, planner.packer

    after, packer = run(config)
    before, _ = run(arrival_order(config))
    capacity = layout.window
    if config.packing == "varlen":
        capacity = longest_micro_batch(config, layout.window, job.alignment)
    thresholds = packer.state()["settings"].get("thresholds", [])
    at = job.cost(config).quadratic_at
    return Analysis(lengths, config, layout, job.micro_batches, at, capacity, list(thresholds), before, after)


def _told(plans: Iterable[IterationPlan], progress: Callable[[], None] | None) -> Iterator[IterationPlan]:
    for plan in plans:
        yield plan
        if progress is not None:
            progress()
