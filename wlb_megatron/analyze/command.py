"""`wlb-megatron analyze`: its flags, the model's shape, progress, and the pictures' folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from wlb_megatron.analyze.comparison import Analysis, analyze
from wlb_megatron.analyze.measure import Layout
from wlb_megatron.analyze.pictures import draw_all, need_matplotlib
from wlb_megatron.bounds import RANKS, SEED, check_heads, whole
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.inspect_plans import QUADRATIC_AT
from wlb_megatron.packing.blocks import Lengths
from wlb_megatron.workload.cost_model import layer_parameters, quadratic_at
from wlb_megatron.workload.profile import read_profile


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings. Model flags are named as Megatron's."""
    add = parser.add_argument
    add("--pp", default=1, type=whole(1, RANKS), help="pipeline-parallel size (default: 1)")
    add("--iterations", default=200, type=whole(1), help="global batches to plan (default: 200)")
    add(
        "--seed",
        default=1234,
        type=whole(-1, SEED),
        help="of the shuffle, as in training; -1: given order (default: 1234)",
    )
    add("--json", metavar="PATH", help="write JSON there, - for stdout, instead of a table")
    add("--out", metavar="DIR", help="write lengths.png, work.png, delay.png and timeline.png there")
    add("--profile", metavar="PATH", help="a profile, whose --quadratic-at and --document-cost are taken")
    model = parser.add_argument_group(
        "model shape", "gives --quadratic-at where that is not set"
    ).add_argument
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


def model_quadratic_at(args: argparse.Namespace) -> float:
    """From the model's shape, by Megatron's defaults; QUADRATIC_AT without one."""
    if args.hidden_size is None:
        return QUADRATIC_AT
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not heads:
        raise WlbError("--hidden-size needs --num-attention-heads; give both, or --quadratic-at")
    groups, channels = args.num_query_groups or heads, args.kv_channels or hidden // heads
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden)
    check_heads(heads, groups, hidden=None if args.kv_channels else hidden, tp=args.tp)
    parameters = layer_parameters(hidden, heads * channels, groups * channels, ffn, gated=args.swiglu)
    return quadratic_at(heads * channels, parameters)


def run_analyze(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> Analysis:
    """Analyse as the flags say, with progress on stderr, and draw the pictures if asked for."""
    if args.out is not None:
        need_matplotlib()
    if args.profile is not None:
        costs = read_profile(args.profile).costs
        if config.quadratic_at is None:
            config = replace(config, quadratic_at=costs.quadratic_at)
        if config.document_cost is None:
            config = replace(config, document_cost=costs.per_document)
    assumed = config.quadratic_at is None and args.hidden_size is None
    if config.quadratic_at is None:
        config = replace(config, quadratic_at=model_quadratic_at(args))
    layout = Layout(args.window, args.dp, args.cp, args.tp, args.pp)
    with _progress(2 * args.iterations) as advance:
        analysis = analyze(
            lengths,
            config,
            layout,
            micro_batches=args.micro_batches,
            iterations=args.iterations,
            seed=None if args.seed < 0 else args.seed,
            progress=advance,
        )
    if args.out is not None:
        folder = Path(args.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_all(folder, lengths, analysis.measured, layout, analysis.capacity)
        except OSError as error:
            raise WlbError(f"cannot write to {folder}: {error.strerror}; give another --out") from None
    return replace(analysis, assumed=assumed)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr where that is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=total)
        yield lambda: bar.advance(task)
