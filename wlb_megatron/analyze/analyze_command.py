"""`wlb-megatron analyze`: its flags, and its picture, which needs matplotlib."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from wlb_megatron.analyze.comparison import Analysis, analyze
from wlb_megatron.arguments import add_layout, add_setting, add_settings
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.errors import WlbError, install
from wlb_megatron.report.timeline import Drawn, draw_timelines
from wlb_megatron.simulator.iteration import recomputed_by_flags
from wlb_megatron.simulator.job_flags import add_job, read_job

SEARCH = "schedule"
"""What is searched, if no flag says."""

NO_TRACE = (
    "note: --trace does nothing from this release on, and will be refused from the next: --pictures draws a step, and "
    "--wlb-trace writes one of training"
)

_MOST_EVENTS = 512


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
        help="write a picture of one step before and after here, timeline.png",
    )


def run_analyze(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> Analysis:
    """Analyze as the flags say, and draw the picture if asked for."""
    if args.pictures is not None:
        need_matplotlib()
    if args.trace is not None:
        print(NO_TRACE, file=sys.stderr)
    config = replace(config, token_weights=args.token_weights)
    job = read_job(args, lengths)
    model_known = args.model is not None or args.hidden_size is not None or job.profile is not None
    analysis = analyze(lengths, config, job, split=not args.no_split, kind=args.search)
    if args.pictures is not None:
        folder = Path(args.pictures)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _draw_step(folder / "timeline.png", analysis)
        except OSError as error:
            raise WlbError(f"cannot write to {folder}: {error.strerror}; give another --pictures") from None
    return replace(analysis, assumed=not model_known)


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WlbError(f"drawing needs matplotlib: {install('report')}, or leave --pictures out") from None


def _draw_step(path: Path, analysis: Analysis) -> None:
    """Arrival order's most usual iteration and the same one as set, each on its slowest data-parallel rank, by
    simulated times."""
    steps = analysis.before.steps
    iteration = int(np.abs(steps - steps.mean()).argmin())  # the other's has arrived with it
    model, stages = analysis.job.model, analysis.job.model.layout.pipeline
    limit = max(1, _MOST_EVENTS // (2 * stages))
    plans = []
    for name, figures in analysis.measured:
        times = figures.simulated.micro_batches[iteration]
        slowest = int((times.sum(axis=0) + (stages - 1) * times.max(axis=0)).argmax())
        title = name + (f", first {limit} micro-batches" if len(times) > limit else "")
        # A step that is drawn in part is drawn without its groups, which may reach beyond that part.
        fits = len(times) <= limit and bool(figures.orders)
        groups = figures.orders[iteration][slowest] if fits else None
        chunked = figures.chunked[iteration][slowest][:limit] if figures.orders else ()
        numbers = recomputed_by_flags(times[None].astype(np.int64), model)[0]
        if figures.run.recomputed is not None:
            numbers = figures.run.recomputed[iteration]
        repeats = numbers[slowest].sum(axis=1)[:, :limit] / model.stage_layers.sum(axis=1)[:, None]
        plans.append(Drawn(title, times[:limit, slowest].tolist(), groups, chunked, repeats.tolist()))
    draw_timelines(path, plans, stages)
