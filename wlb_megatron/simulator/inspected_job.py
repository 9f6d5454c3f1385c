"""The flags by which `inspect` knows a model and a GPU's memory, so that it shows which layers each step keeps."""

from __future__ import annotations

import argparse

from wlb_megatron.errors import WlbError
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.job_flags import add_job, add_model, add_recompute, read_job

_OF_MEMORY = ("recompute", "memory_margin", "gpu_memory")
"""Settings that change nothing without a model."""


def add_inspected_job(parser: argparse.ArgumentParser) -> None:
    """The model's flags; what else describes a job stays at its default, unless a launch command gives it."""
    settings = [action for action in parser._actions if action.dest in _OF_MEMORY]
    before = len(parser._actions)
    add_recompute(parser)
    add_model(parser)
    described = [*settings, *parser._actions[before:]]
    whole_job = argparse.ArgumentParser()
    add_job(whole_job)
    destinations = {action.dest for action in parser._actions}
    defaults = vars(whole_job.parse_args([])) | {"seed": -1, "warm_up": 0}
    parser.set_defaults(
        of_launch=whole_job._actions,
        of_job={action.dest: (action.option_strings[0], action.default) for action in described},
        **{name: value for name, value in defaults.items() if name not in destinations},
    )


def read_inspected_job(args: argparse.Namespace) -> Job | None:
    """None where no flag describes a model. WlbError where flags describe it or the memory alone, so that they would
    change nothing; of a launch command, Lmax without a memory ignores it."""
    described = args.model is not None or args.hidden_size is not None
    if described and (args.launched or args.gpu_memory is not None):
        return read_job(args)
    if args.launched:
        return None
    requirement = "--gpu-memory" if described else "a model (--model or --hidden-size)"
    for name, (flag, default) in args.of_job.items():
        if getattr(args, name) != default:
            raise WlbError(f"{flag} changes nothing without {requirement}: add that, or leave it out")
    return None
