"""`wlb-megatron analyze`: the user's documents and layout, packed as Megatron would and as this project does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.analyze.measure import Layout, Measured, measure, spread
from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.inspect_plans import QUADRATIC_AT
from wlb_megatron.packing.corpus import Rules
from wlb_megatron.packing.documents import DocumentStream
from wlb_megatron.packing.lengths import sample_lengths
from wlb_megatron.packing.packer import Packer, make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen_packer import longest_micro_batch
from wlb_megatron.plan import IterationPlan
from wlb_megatron.workload.cost_model import CostModel, quadratic_at


@dataclass(frozen=True)
class Analysis:
    """Before (arrival order, per-sequence sharding) and after (the given settings), with what was settled on."""

    lengths: npt.NDArray[np.int64]
    config: WlbConfig
    layout: Layout
    micro_batches: int
    capacity: int
    thresholds: list[int]
    before: Measured
    after: Measured

    @property
    def measured(self) -> list[tuple[str, Measured]]:
        name = f"{self.config.packing}, {self.config.sharding}"
        return [("original, per-sequence", self.before), (name, self.after)]

    @property
    def speedup(self) -> float:
        """Predicted time per trained token, before over after."""
        before, after = (m.steps(self.layout.pp).sum() / sum(m.lengths) for _, m in self.measured)
        return float(before / after)

    @property
    def flags(self) -> str:
        """What to copy to the training command."""
        thresholds = ",".join(map(str, self.thresholds)) or "none"
        config = self.config
        given: dict[str, object] = {
            "packing": config.packing,
            "sharding": config.sharding,
            "quadratic-at": f"{config.quadratic_at:.0f}",
        }
        if config.packing == "varlen":
            given |= {"max-tokens": self.capacity, "thresholds": thresholds, "max-delay": config.max_delay}
        elif config.packing != "original":
            given["balance-batches"] = config.balance_batches
        return " ".join(f"--wlb-{name} {value}" for name, value in given.items())


def analyze(
    lengths: npt.NDArray[np.int64],
    config: WlbConfig,
    layout: Layout,
    *,
    micro_batches: int,
    iterations: int,
    seed: int | None,
    progress: Callable[[], None] | None = None,
) -> Analysis:
    """Plan `iterations` global batches both ways over the same endless stream.

    lengths: int64[n], tokens of each document. micro_batches: of one data-parallel rank. seed: of the shuffle,
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
            cost = CostModel(chosen.quadratic_at, chosen.document_cost)
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


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings. Model flags are named as Megatron's."""
    add = parser.add_argument
    add("--pp", default=1, type=int, help="pipeline-parallel size (default: 1)")
    add("--iterations", default=200, type=int, help="global batches to plan (default: 200)")
    add(
        "--seed",
        default=1234,
        type=int,
        help="of the shuffle, as in training; -1: given order (default: 1234)",
    )
    add("--json", metavar="PATH", help="write JSON there, - for stdout, instead of a table")
    add("--out", metavar="DIR", help="write lengths.png, work.png, delay.png and timeline.png there")
    model = parser.add_argument_group(
        "model shape", "gives --quadratic-at where that is not set"
    ).add_argument
    model("--hidden-size", type=int)
    model("--num-attention-heads", type=int)
    model("--num-query-groups", type=int, help="default: as many as heads")
    model("--kv-channels", type=int, help="default: hidden size over heads")
    model(
        "--ffn-hidden-size",
        type=int,
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
    if min(hidden, heads, groups, channels, ffn) < 1:
        raise WlbError("--hidden-size and the other sizes of the model must be positive; correct them")
    return quadratic_at(hidden, heads * channels, groups * channels, ffn, gated=args.swiglu)


def run_analyze(args: argparse.Namespace, lengths: npt.NDArray[np.int64], config: WlbConfig) -> Analysis:
    """Analyse as the flags say, with progress on stderr, and draw the pictures if asked for."""
    from wlb_megatron.analyze.pictures import draw_all, need_matplotlib

    if args.out is not None:
        need_matplotlib()
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
    return analysis


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


def as_json(analysis: Analysis) -> dict[str, Any]:
    lengths, layout = analysis.lengths, analysis.layout
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "empty_documents": int((lengths == 0).sum()),
        "overlong_documents": int((lengths > layout.window).sum()),
        "layout": asdict(layout) | {"micro_batches": analysis.micro_batches},
        "quadratic_at": analysis.config.quadratic_at,
        "max_tokens": analysis.capacity,
        "thresholds": analysis.thresholds,
        "results": {
            key: {"packing": name, **figures(measured, layout.pp)}
            for key, (name, measured) in zip(("before", "after"), analysis.measured, strict=True)
        },
        "predicted_speedup": analysis.speedup,
        "flags": analysis.flags,
    }


def figures(measured: Measured, pp: int) -> dict[str, Any]:
    """All that is told of one packing."""
    tokens = sum(measured.lengths)
    return {
        "iterations": len(measured.work),
        "tokens": tokens,
        "imbalance": asdict(measured.imbalance),
        "cp_imbalance": asdict(spread(measured.cp_imbalance)),
        "token_delay": asdict(measured.token_delay),
        "step_work": asdict(spread(measured.steps(pp))),
        "micro_batch_tokens": asdict(spread(measured.lengths)),
        "micro_batch_documents": asdict(spread(measured.documents)),
        "padding_share": measured.padding / (tokens + measured.padding),
    }


def print_analysis(analysis: Analysis) -> None:
    from wlb_megatron.report.table import print_table

    told = as_json(analysis)
    (before, old), (after, new) = ((r["packing"], r) for r in told["results"].values())
    rows = []
    for key, name, form in (
        ("imbalance", "imbalance of micro-batches (max/mean work)", "{:.3f}"),
        ("cp_imbalance", "imbalance of CP ranks (max/mean work)", "{:.3f}"),
        ("step_work", "step (tokens of linear work, predicted)", "{:,.0f}"),
        ("token_delay", "token delay (iterations)", "{:.2f}"),
        ("micro_batch_tokens", "tokens of a micro-batch", "{:,.0f}"),
        ("micro_batch_documents", "documents of a micro-batch", "{:,.0f}"),
    ):
        cells = [form.format(result[key][which]) for result in (old, new) for which in ("mean", "p95", "max")]
        rows.append([name, *cells])
    rows.append(["padding", *(c for r in (old, new) for c in (f"{100 * r['padding_share']:.3f}%", "", ""))])
    print(
        f"{told['documents']:,} documents, {told['tokens']:,} tokens; {told['empty_documents']:,} empty (left out), "
        f"{told['overlong_documents']:,} above the window ({analysis.config.overlong})"
    )
    print_table(
        f"{old['iterations']} iterations: {before}   |   {after}",
        ["", "mean", "p95", "max", "mean", "p95", "max"],
        rows,
    )
    thresholds = ", ".join(f"{t:,}" for t in analysis.thresholds) or "none"
    print(
        f"Lmax {analysis.capacity:,} tokens, thresholds {thresholds}; work = d + d*d/{told['quadratic_at']:,.0f}"
    )
    print(f"predicted speed-up per token: {analysis.speedup:.3f}")
    print(f"flags: {analysis.flags}")
