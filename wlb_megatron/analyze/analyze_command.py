"""`wlb-megatron analyze`: its flags, progress, and the pictures' folder."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from wlb_megatron.analyze.comparison import Analysis, analyze, planned
from wlb_megatron.analyze.pictures import draw_all, need_matplotlib
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blocks import Lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.report.progress import progress
from wlb_megatron.settings_flags import add_setting
from wlb_megatron.simulator.job_flags import add_job, read_job


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings: simulate's, and pictures."""
    add_job(parser)
    add_setting(parser, "token_weights")  # plans do not depend on it, a token's weight in the gradient does
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="leave out the gain of each part, which takes most of the time",
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
    config = replace(config, token_weights=args.token_weights)
    job = read_job(args, lengths)
    model_known = args.model is not None or args.hidden_size is not None or job.profile is not None
    settings = 2 if args.no_split else planned(config, job)
    with progress(settings * (job.warm_up + job.iterations)) as tick:
        analysis = analyze(lengths, config, job, lambda: tick("planning"), split=not args.no_split)
    if args.pictures is not None:
        folder = Path(args.pictures)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw_all(folder, analysis)
        except OSError as error:
            raise WlbError(f"cannot write to {folder}: {error.strerror}; give another --pictures") from None
    return replace(analysis, assumed=not model_known)
