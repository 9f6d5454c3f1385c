"""`wlb-megatron analyze`: its flags and progress, and pictures, which need matplotlib."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.analyze.comparison import Analysis, analyze, variants
from wlb_megatron.analyze.measure import Measured
from wlb_megatron.analyze.search import settings_tried
from wlb_megatron.arguments import add_layout, add_setting, add_settings
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths, blocks
from wlb_megatron.errors import WlbError, install
from wlb_megatron.report.terminal import progress
from wlb_megatron.report.timeline import Drawn, draw_timelines
from wlb_megatron.simulator.iteration import recomputed_by_flags
from wlb_megatron.simulator.job_flags import add_job, read_job
from wlb_megatron.whole_files import renamed_at_end

SEARCH = "schedule"
"""What is searched, if no flag says."""

NO_TRACE = (
    "note: --trace does nothing from this release on, and will be refused from the next: --pictures draws a step, and "
    "--wlb-trace writes one of training"
)

_MOST_EVENTS = 512
_COLORS = ("tab:gray", "tab:blue")


def add_analyze(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plans the same shuffled documents in arrival order and as set here, and compares balance, delay, padding and "
        "predicted step time. Prints what each part gains and the flags to train with (docs/analyze.md)."
    )
    add_layout(parser)
    add_settings(parser)
    add_job(parser)
    add_setting(parser, "token_weights")  # plans do not depend on it, a token's weight in the gradient does
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="leave out the gain of each part, which takes most of the time",
    )
    parser.add_argument(
        "--search",
        choices=("none", "schedule", "layout"),
        default=SEARCH,
        help="what else to try on the same model, documents and GPUs: none; schedule (virtual stages, recomputation, "
        "chunks, micro-batches a window); layout (also tensor, context and pipeline parallelism; default: schedule)",
    )
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    parser.add_argument(
        "--pictures",
        metavar="DIR",
        help="write pictures here: one step before and after, the documents' lengths, work and delay",
    )


def run_analyze(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> Analysis:
    """Analyze as the flags say, with progress on stderr, and draw the pictures if asked for."""
    if args.pictures is not None:
        need_matplotlib()
    if args.trace is not None:
        print(NO_TRACE, file=sys.stderr)
    config = replace(config, token_weights=args.token_weights)
    job = read_job(args, lengths)
    model_known = args.model is not None or args.hidden_size is not None or job.profile is not None
    steps = 2 * (job.warm_up + job.iterations) + (0 if args.no_split else 2 * len(variants(config, job)))
    looks = settings_tried(job, config, args.search)
    with progress(steps + looks, lines=args.search == "layout") as tick:
        analysis = analyze(lengths, config, job, tick, split=not args.no_split, kind=args.search)
    if args.pictures is not None:
        folder = Path(args.pictures)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_all(folder, analysis)
        except OSError as error:
            raise WlbError(f"cannot write to {folder}: {error.strerror}; give another --pictures") from None
    return replace(analysis, assumed=not model_known)


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WlbError(f"drawing needs matplotlib: {install('report')}, or leave --pictures out") from None


def draw_all(folder: Path, analysis: Analysis) -> None:
    """Draw timeline.png, lengths.png, work.png and delay.png; each appears whole or not at all."""
    records = analysis.measured
    pictures = {
        "lengths": lambda axes: _draw_lengths(axes, analysis.lengths, analysis.job.window, analysis.capacity),
        "work": lambda axes: _draw_work(axes, records),
        "delay": lambda axes: _draw_delay(axes, records),
    }
    steps = records[0][1].steps
    number = int(np.abs(steps - steps.mean()).argmin())  # of arrival order; the other's has arrived with it
    for name, draw in pictures.items():
        _save(folder / f"{name}.png", draw)
    _draw_timeline(folder / "timeline.png", analysis, number)


def _save(path: Path, draw: Callable[[Any], None]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120)
    pyplot.close(figure)


def _draw_lengths(axes: Any, lengths: Lengths, window: int, capacity: int) -> None:
    edges = np.geomspace(1, max(int(lengths.max()), window, capacity) + 1, 60)  # empty documents are below
    documents, tokens = np.zeros((2, len(edges) - 1))
    for block in blocks(lengths):
        documents += np.histogram(block, edges)[0]
        tokens += np.histogram(block, edges, weights=block)[0]
    for counts, label, color in ((documents, "documents", "tab:gray"), (tokens, "tokens", "tab:blue")):
        axes.stairs(
            100 * counts / counts.sum(),
            edges,
            label=label,
            color=color,
            fill=color == "tab:gray",
            alpha=0.8,
        )
    for place, label, style in ((window, "window", "-"), (capacity, "Lmax", "--")):
        axes.axvline(place, color="crimson", linestyle=style, linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("document length (tokens)")
    axes.set_ylabel("share of all (%)")
    axes.set_title(
        f"{int(documents.sum()):,} documents, {int(tokens.sum()):,} tokens", loc="left", fontsize=10
    )
    axes.legend(frameon=False)


def _draw_work(axes: Any, records: Sequence[tuple[str, Measured]]) -> None:
    relative = [np.concatenate([(grid / grid.mean()).ravel() for grid in m.work]) for _, m in records]
    edges = np.linspace(0, max(map(np.max, relative)) * 1.02, 80)
    for (name, figures), values, color in zip(records, relative, _COLORS, strict=True):
        axes.hist(
            values,
            edges,
            weights=np.full(len(values), 100 / len(values)),
            color=color,
            alpha=0.6,
            label=f"{name}: mean imbalance of work {figures.imbalance.mean:.3f}",
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("work of a micro-batch over the mean of its iteration")
    axes.set_ylabel("micro-batches (%)")
    axes.legend(frameon=False)


def _draw_delay(axes: Any, records: Sequence[tuple[str, Measured]]) -> None:
    last = max(max(m.delays, default=0) for _, m in records)
    for number, (name, figures) in enumerate(records):
        total = max(figures.delays.total(), 1)
        shares = [100 * figures.delays[delay] / total for delay in range(last + 1)]
        axes.bar(
            np.arange(last + 1) + 0.4 * (number - 0.5),
            shares,
            0.4,
            color=_COLORS[number],
            label=f"{name}: mean {figures.token_delay.mean:.2f} iterations",
        )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("delay (iterations from arrival to training)")
    axes.set_ylabel("tokens (%)")
    axes.legend(frameon=False)


def _draw_timeline(path: Path, analysis: Analysis, iteration: int) -> None:
    """Of each, the same iteration on its slowest data-parallel rank, by simulated times."""
    model, stages = analysis.job.model, range(analysis.job.model.layout.pipeline)
    limit = max(1, _MOST_EVENTS // (2 * len(stages)))
    plans = []
    for name, figures in analysis.measured:
        times = figures.simulated.micro_batches[iteration]
        slowest = int((times.sum(axis=0) + (len(stages) - 1) * times.max(axis=0)).argmax())
        title = name + (f", first {limit} micro-batches" if len(times) > limit else "")
        # A step that is drawn in part is drawn without its groups, which may reach beyond that part.
        fits = len(times) <= limit and bool(figures.orders)
        groups = figures.orders[iteration][slowest] if fits else None
        chunked = figures.chunked[iteration][slowest][:limit] if figures.orders else ()
        numbers = recomputed_by_flags(times[None].astype(np.int64), model)[0]
        if figures.run.recomputed is not None:
            numbers = figures.run.recomputed[iteration]
        layers = np.array([sum(model.layers_of(p, c) for c in range(model.layout.virtual)) for p in stages])
        repeats = numbers[slowest].sum(axis=1)[:, :limit] / layers[:, None]
        plans.append(Drawn(title, times[:limit, slowest].tolist(), groups, chunked, repeats.tolist()))
    draw_timelines(path, plans, len(stages))
