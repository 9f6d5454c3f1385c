"""A job as the commands describe it: its model, layout and settings, the plans that it would train, and their times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from wlb_megatron.bounds import RANKS, SEED, check_heads, whole
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.job import plan_job
from wlb_megatron.packing.lengths import sample_lengths
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import IterationPlan
from wlb_megatron.sharding.alignment import multiple
from wlb_megatron.sharding.cut import cut_plans, orders_of
from wlb_megatron.simulator.assumptions import Assumptions
from wlb_megatron.simulator.calibration import profiled_shape
from wlb_megatron.simulator.command import add_assumptions, read_assumptions
from wlb_megatron.simulator.iteration import Shards, Simulated, simulate
from wlb_megatron.simulator.model import LayerModel, Layout, ModelShape
from wlb_megatron.simulator.paper import SHAPES
from wlb_megatron.workload.cost_model import CostModel, document_cost, quadratic_at
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.memory import RECOMPUTE
from wlb_megatron.workload.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Job:
    """window: tokens. micro_batches: windows of a data-parallel rank and step. iterations: that are looked at, after
    `warm_up` planned ones in which queues fill. seed: of the shuffle, None for the given order."""

    model: LayerModel
    window: int
    micro_batches: int
    iterations: int
    warm_up: int
    seed: int | None
    profile: Profile | None = None

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

    def planner(self, lengths: Lengths, config: WlbConfig) -> Planner:
        """Raises WlbError on settings that cannot work."""
        layout = self.model.layout
        with explain_bad_values():
            rules = Rules(self.window, config.overlong, self.seed, endless=True)
            return plan_job(
                DocumentStream.of_lengths(lengths, rules, name="--lengths"),
                config,
                self.cost(config),
                window=self.window,
                micro_batches=self.micro_batches,
                dp=layout.dp,
                pp=layout.pp,
                vpp=layout.chunks,
                alignment=self.alignment,
                sample=sample_lengths(lengths, self.window, config.overlong),
            )

    def plans(self, planner: Planner) -> list[IterationPlan]:
        """All that are planned: the first `warm_up` ones are not to be looked at."""
        return list(islice(iter(planner.next_iteration, None), self.warm_up + self.iterations))

    def shards(self, plans: Sequence[IterationPlan], config: WlbConfig) -> Shards:
        return cut_plans(plans, self.model.layout.cp, self.alignment, config.sharding, self.model.table)

    def simulated(self, plans: Sequence[IterationPlan], shards: Shards) -> Simulated:
        with explain_bad_values():
            return simulate(shards, self.model, orders=orders_of(plans))


def add_job(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings. Model flags are named as Megatron's."""
    add = parser.add_argument
    add("--pp", default=1, type=whole(1, RANKS), help="pipeline-parallel size (default: 1)")
    add("--vpp", default=1, type=whole(1, RANKS), help="model chunks of a stage, interleaved (default: 1)")
    add(
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="activations made again in backward (default: none)",
    )
    add("--iterations", default=100, type=whole(1), help="to look at (default: 100)")
    add("--warm-up", default=16, type=whole(0), help="planned before them, so that queues fill (default: 16)")
    add(
        "--seed",
        default=1234,
        type=whole(-1, SEED),
        help="of the shuffle, as in training; -1: given order (default: 1234)",
    )
    add("--json", metavar="PATH", help="write JSON there, - for stdout, instead of a table")
    model = parser.add_argument_group(
        "model", "a known shape, or --hidden-size and the others, missing ones as Megatron's defaults"
    ).add_argument
    model("--model", choices=SHAPES, help="a known shape, of which the others change parts (default: 7B)")
    model("--num-layers", type=whole(1), help="default: the known shape's")
    model("--hidden-size", type=whole(1))
    model("--num-attention-heads", type=whole(1))
    model("--num-query-groups", type=whole(1), help="default: as many as heads")
    model("--kv-channels", type=whole(1), help="default: hidden size over heads")
    model(
        "--ffn-hidden-size",
        type=whole(1),
        help="default: 4 x hidden size; with --swiglu 8/3 of it, a multiple of 64",
    )
    model("--swiglu", action="store_true")
    model("--vocab-size", type=whole(1), help="default: the known shape's")
    add_assumptions(parser, Assumptions())


def read_job(args: argparse.Namespace) -> Job:
    """The job that the flags describe. WlbError on what cannot be."""
    if args.cp_mode != "fixed":
        raise WlbError("--wlb-cp-mode dynamic is planned in training alone; leave it out here")
    assumptions, measured, profile = read_assumptions(args)
    with explain_bad_values():
        layout = Layout(tp=args.tp, cp=args.cp, pp=args.pp, dp=args.dp, chunks=args.vpp)
        shape = read_shape(args, profile)
        check_heads(
            shape.heads, shape.kv_heads, hidden=None if shape.channels else shape.hidden, tp=layout.tp
        )
        if profile is not None:
            names = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated")
            profile.refuse_other({**{name: getattr(shape, name) for name in names}, "tp": layout.tp})
        model = LayerModel(
            shape=shape,
            layout=layout,
            assumptions=assumptions,
            measured=measured,
            costs=None if profile is None else profile.costs,
            recompute=args.recompute,
        )
    return Job(
        model=model,
        window=args.window,
        micro_batches=args.micro_batches,
        iterations=args.iterations,
        warm_up=args.warm_up,
        seed=None if args.seed < 0 else args.seed,
        profile=profile,
    )


def read_shape(args: argparse.Namespace, profile: Profile | None = None) -> ModelShape:
    """The profiled model, else a known one, of which flags change parts; else all by flags and Megatron's defaults."""
    known = SHAPES[args.model or "7B"]
    flags = {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "heads": args.num_attention_heads,
        "kv_heads": args.num_query_groups,
        "ffn": args.ffn_hidden_size,
        "vocab": args.vocab_size,
        "channels": args.kv_channels,
        "gated": args.swiglu or None,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if profile is not None:
        return replace(profiled_shape(profile, known.layers), **given)
    if args.model is not None or args.hidden_size is None:
        return replace(known, **given)
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not heads:
        raise WlbError("--hidden-size needs --num-attention-heads; give both, or --model")
    ffn = int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden
    plain = ModelShape(
        layers=known.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocab=known.vocab,
        gated=False,
    )
    return replace(plain, **given)
