"""`wlb-megatron analyze`: its flags, progress, and the pictures' folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from wlb_megatron.analyze.comparison import Analysis, analyze, variants
from wlb_megatron.analyze.pictures import draw_all, need_matplotlib
from wlb_megatron.analyze.search import settings_tried
from wlb_megatron.arguments import add_setting
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.pipeline.kept_layers import recomputed_array
from wlb_megatron.pipeline.orders import documents_in_chunks
from wlb_megatron.report.terminal import progress
from wlb_megatron.report.timeline import chrome_trace
from wlb_megatron.simulator.iteration import group_events
from wlb_megatron.simulator.job import Job, Run
from wlb_megatron.simulator.job_flags import add_job, read_job
from wlb_megatron.whole_files import write_whole

SEARCH = "schedule"
"""What is searched, if no flag says."""


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings."""
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
    parser.add_argument(
        "--trace", metavar="PATH", help="write the slowest iteration, as set, as a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--pictures",
        metavar="DIR",
        help="write pictures here: one step of these documents before and after, their lengths, work and delay",
    )


def run_analyze(args: argparse.Namespace, lengths: Lengths, config: WlbConfig) -> Analysis:
    """Analyze as the flags say, with progress on stderr, and draw the pictures if asked for."""
    if args.pictures is not None:
        need_matplotlib()
    if args.trace is not None and config.cp_mode == "dynamic":
        raise WlbError("--trace supports only fixed groups: leave out --trace or --cp-mode dynamic")
    config = replace(config, token_weights=args.token_weights)
    job = read_job(args, lengths)
    model_known = args.model is not None or args.hidden_size is not None or job.profile is not None
    steps = 2 * (job.warm_up + job.iterations) + (0 if args.no_split else 2 * len(variants(config, job)))
    looks = settings_tried(job, config, args.search)
    with progress(steps + looks, lines=args.search == "layout") as tick:
        analysis = analyze(lengths, config, job, tick, split=not args.no_split, kind=args.search)
    if args.trace is not None:
        _write_trace(Path(args.trace), analysis.runs[1], job)
    if args.pictures is not None:
        folder = Path(args.pictures)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_all(folder, analysis)
        except OSError as error:
            raise WlbError(f"cannot write to {folder}: {error.strerror}; give another --pictures") from None
    return replace(analysis, assumed=not model_known)


def _write_trace(path: Path, run: Run, job: Job) -> None:
    """Of the slowest iteration."""
    slowest = int(run.timed.steps.argmax())
    assert run.shards is not None
    plan = run.plans[job.warm_up + slowest]
    columns = zip(*plan.micro_batches, strict=True)
    documents = [documents_in_chunks([micro_batch.pieces for micro_batch in column]) for column in columns]
    recomputed = None if run.kept is None else [recomputed_array(run.kept[slowest])]
    orders = job.orders([plan])
    events = group_events([run.shards[slowest]], job.model, orders=orders, recomputed=recomputed)
    write_whole(path, json.dumps(chrome_trace(events, documents=documents)) + "\n", "--trace")
