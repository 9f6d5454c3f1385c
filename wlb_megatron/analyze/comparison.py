"""The same documents packed as Megatron would and as set, and both measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice

from wlb_megatron.analyze.measure import Layout, Measured, measure
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.lengths import sample_lengths
from wlb_megatron.packing.packer import Packer, make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen_packer import longest_micro_batch
from wlb_megatron.plan import IterationPlan
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.micro_batch import MICRO_BATCH_TOKENS


@dataclass(frozen=True)
class Analysis:
    """Before (arrival order, per-sequence sharding) and after (the given settings), with what was settled on.

    assumed: no model was told, so `quadratic_at` is nobody's and not among the flags to copy.
    """

    lengths: Lengths
    config: WlbConfig
    layout: Layout
    micro_batches: int
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
        before, after = (m.steps.sum() / sum(m.lengths) for _, m in self.measured)
        return float(before / after)

    @property
    def flags(self) -> str:
        """What to copy to the training command."""
        thresholds = ",".join(map(str, self.thresholds)) or "none"
        config = self.config
        given: dict[str, object] = {
            "packing": config.packing,
            "sharding": config.sharding,
        }
        if not self.assumed:
            given["quadratic-at"] = f"{config.quadratic_at:.0f}"
        if config.packing == "varlen":
            given |= {"max-tokens": self.capacity, "thresholds": thresholds}
            if config.max_delay is not None:
                given["max-delay"] = config.max_delay
        elif config.packing != "original":
            given["balance-batches"] = config.balance_batches
        return " ".join(f"--wlb-{name} {value}" for name, value in given.items())


def analyze(
    lengths: Lengths,
    config: WlbConfig,
    layout: Layout,
    *,
    micro_batches: int,
    iterations: int,
    seed: int | None,
    progress: Callable[[], None] | None = None,
) -> Analysis:
    """Plan `iterations` global batches both ways over the same endless stream.

    lengths: integers[n], tokens of each document. micro_batches: of one data-parallel rank. seed: of the shuffle,
    None for the given order. progress: called after each planned iteration. WlbError on settings that cannot work.
    """
    sizes = asdict(layout) | {"micro-batches": micro_batches, "iterations": iterations}
    for name, value in sizes.items():
        if value < 1:
            raise WlbError(f"--{name} must be at least 1, got {value}")
    assert config.quadratic_at is not None
    sample = sample_lengths(lengths, layout.window, config.overlong)

    def run(chosen: WlbConfig) -> tuple[Measured, Packer]:
        with explain_bad_values():
            assert chosen.quadratic_at is not None
            own = chosen.micro_batch_cost
            own = MICRO_BATCH_TOKENS * layout.cp if own is None else own
            cost = CostModel(chosen.quadratic_at, chosen.document_cost or 0.0, own)
            rules = Rules(layout.window, chosen.overlong, seed, endless=True)
            packer = make_packer(
                chosen,
                cost,
                window=layout.window,
                micro_batches=micro_batches,
                dp=layout.dp,
                pp=layout.pp,
                alignment=layout.cp * layout.tp,
                sample=sample,
            )
            stream = DocumentStream.of_lengths(lengths, rules, name="--lengths")
        planner = Planner(stream, packer, global_tokens=micro_batches * layout.dp * layout.window)
        plans = islice(iter(planner.next_iteration, None), iterations)
        return measure(_told(plans, progress), chosen.sharding, cost, layout), packer

    after, packer = run(config)
    before, _ = run(replace(config, packing="original", sharding="per-sequence"))
    capacity = layout.window
    if config.packing == "varlen":
        capacity = longest_micro_batch(config, layout.window, layout.cp * layout.tp)
    thresholds = packer.state()["settings"].get("thresholds", [])
    return Analysis(lengths, config, layout, micro_batches, capacity, list(thresholds), before, after)


def _told(plans: Iterable[IterationPlan], progress: Callable[[], None] | None) -> Iterator[IterationPlan]:
    for plan in plans:
        yield plan
        if progress is not None:
            progress()
