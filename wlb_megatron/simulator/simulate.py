"""`wlb-megatron simulate`: iterations of one's own job, as Megatron packs and as set, with a trace of one of them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.bounds import RANKS, SEED, check_heads, whole
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import explain_bad_values
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.lengths import sample_lengths
from wlb_megatron.packing.packer import make_packer
from wlb_megatron.report.files import whole_file
from wlb_megatron.report.table import print_table
from wlb_megatron.report.trace import chrome_trace
from wlb_megatron.simulator.assumptions import Assumptions
from wlb_megatron.simulator.calibration import profiled_shape
from wlb_megatron.simulator.command import add_assumptions, progress, read_assumptions
from wlb_megatron.simulator.iteration import Shards, group_events, simulate
from wlb_megatron.simulator.model import LayerModel, Layout, ModelShape
from wlb_megatron.simulator.paper import SHAPES
from wlb_megatron.simulator.schemes import perfectly_balanced, run_packer, shard_run
from wlb_megatron.workload.memory import RECOMPUTE
from wlb_megatron.workload.profile import Profile


def add_simulate(parser: argparse.ArgumentParser) -> None:
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
    add("--iterations", default=100, type=whole(1), help="to simulate (default: 100)")
    add("--warm-up", default=16, type=whole(0), help="planned before them, so that queues fill (default: 16)")
    add(
        "--seed",
        default=1234,
        type=whole(-1, SEED),
        help="of the shuffle, as in training; -1: given order (default: 1234)",
    )
    add("--json", metavar="PATH", help="write JSON there, - for stdout, instead of a table")
    add("--trace", metavar="PATH", help="write the slowest iteration, as set, as a trace for ui.perfetto.dev")
    model = parser.add_argument_group("model").add_argument
    model(
        "--model",
        choices=SHAPES,
        default="7B",
        help="a known shape, of which the others change parts (default: 7B)",
    )
    for name in (
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "ffn-hidden-size",
        "vocab-size",
    ):
        model(f"--{name}", type=whole(1))
    add_assumptions(parser, Assumptions())


def run_simulate(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> dict[str, Any]:
    """Simulate as the flags say, with progress on stderr; write the trace if asked for. JSON-able figures."""
    assumptions, measured, profile = read_assumptions(args)
    with explain_bad_values():
        layout = Layout(tp=args.tp, cp=args.cp, pp=args.pp, dp=args.dp, chunks=args.vpp)
        shape = _shape(args, profile)
        if profile is not None:
            _refuse_other(profile, shape, layout)
        model = LayerModel(
            shape=shape,
            layout=layout,
            assumptions=assumptions,
            measured=measured,
            costs=None if profile is None else profile.costs,
            recompute=args.recompute,
        )
    cost = model.cost()
    given = {
        "quadratic_at": config.quadratic_at,
        "per_document": config.document_cost,
        "per_micro_batch": config.micro_batch_cost,
    }
    cost = replace(cost, **{name: value for name, value in given.items() if value is not None})
    plain = replace(config, packing="original", sharding="per-sequence", micro_batches_per_window="1")
    rows: list[dict[str, Any]] = []
    bound = 0.0
    with progress(4) as tick:
        for name, chosen in (("plain", plain), ("as set", config)):
            tick(f"planning {name}")
            with explain_bad_values():
                packer = make_packer(
                    chosen,
                    cost,
                    window=args.window,
                    micro_batches=args.micro_batches,
                    dp=layout.dp,
                    pp=layout.pp,
                    vpp=layout.chunks,
                    alignment=layout.cp * layout.tp,
                    sample=sample_lengths(lengths, args.window, config.overlong),
                )
                rules = Rules(
                    args.window, config.overlong, None if args.seed < 0 else args.seed, endless=True
                )
                tokens = args.micro_batches * layout.dp * args.window
                plans = run_packer(
                    packer, lengths, rules, tokens, iterations=args.iterations, warm_up=args.warm_up
                )
                tick(f"simulating {name}")
                shards = shard_run(plans, chosen.sharding, model)
                simulated = simulate(shards, model)
            bound = perfectly_balanced(plans, model).ns_per_token
            rows.append(
                {
                    "scheme": name,
                    "packing": chosen.packing,
                    "sharding": chosen.sharding,
                    "step_ms": float(simulated.steps.mean() / 1e6),
                    "step_ms_p95": float(np.percentile(simulated.steps, 95) / 1e6),
                    "tokens_per_second": 1e9 / simulated.ns_per_token,
                    "micro_batches": simulated.micro_batch_count,
                    "imbalance": simulated.imbalance,
                    "step_over_ideal": simulated.step_over_ideal,
                }
            )
    if args.trace is not None:
        _write_trace(Path(args.trace), [shards[int(simulated.steps.argmax())]], model)
    before, after = (row["tokens_per_second"] for row in rows)
    return {
        "simulated": True,
        "gpus": layout.gpus,
        "layout": asdict(layout),
        "model": asdict(model.shape),
        "quadratic_at": cost.quadratic_at,
        "kernel_table": measured.device,
        "profile": None if profile is None else profile.told(),
        "assumptions": asdict(assumptions),
        "iterations": args.iterations,
        "schemes": rows,
        "speedup": after / before,
        "bound": 1e9 / bound / before,
    }


def print_simulation(told: dict[str, Any]) -> None:
    header = (
        "",
        "packing",
        "sharding",
        "step ms",
        "p95",
        "tokens/s",
        "micro-batches",
        "imbalance",
        "over ideal",
    )
    rows = [
        [
            *(r["scheme"], r["packing"], r["sharding"], f"{r['step_ms']:,.1f}", f"{r['step_ms_p95']:,.1f}"),
            *(f"{r['tokens_per_second']:,.0f}", f"{r['micro_batches']:.1f}", f"{r['imbalance']:.3f}"),
            f"{r['step_over_ideal']:.3f}",
        ]
        for r in told["schemes"]
    ]
    print_table(f"{told['gpus']} GPUs, {told['iterations']} iterations, simulated", header, rows)
    print(
        f"speed-up {told['speedup']:.3f}; of a perfectly balanced plan {told['bound']:.3f}. "
        + (
            f"Times of {told['profile']}; what it has not measured is assumed: see --json -"
            if told["profile"]
            else f"Kernel times of {told['kernel_table']}; rates and network are assumed: see --help or --json -"
        )
    )


def _refuse_other(profile: Profile, shape: ModelShape, layout: Layout) -> None:
    names = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated")
    profile.refuse_other({**{name: getattr(shape, name) for name in names}, "tp": layout.tp})


def _shape(args: argparse.Namespace, profile: Profile | None) -> ModelShape:
    """The profiled model, else a known one; flags change parts of it."""
    flags = {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "heads": args.num_attention_heads,
        "kv_heads": args.num_query_groups,
        "ffn": args.ffn_hidden_size,
        "vocab": args.vocab_size,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    known = SHAPES[args.model]
    shape = replace(known if profile is None else profiled_shape(profile, known.layers), **given)
    hidden = None if shape.channels else shape.hidden
    check_heads(shape.heads, shape.kv_heads, hidden=hidden, tp=args.tp)
    return shape


def _write_trace(path: Path, shards: Shards, model: LayerModel) -> None:
    with whole_file(path, "--trace") as scratch:
        scratch.write_text(json.dumps(chrome_trace(group_events(shards, model))) + "\n", encoding="utf-8")
