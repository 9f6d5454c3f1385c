"""`wlb-megatron profile`: its flags, progress and file. Needs Megatron; on a GPU, Transformer Engine."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.arguments import add_sizes
from wlb_megatron.attention.kernels import kernel_choice
from wlb_megatron.config import SECONDS, real
from wlb_megatron.errors import WlbError, explain_bad_values, install
from wlb_megatron.registry import KERNELS, USUAL_KERNELS
from wlb_megatron.report.terminal import print_table, progress
from wlb_megatron.simulator.model_flags import add_experts, add_model, profiled_model
from wlb_megatron.workload.fit import Device, fit, leave_out
from wlb_megatron.workload.profile import ProfiledModel, write_profile


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures your model on this GPU: attention, the rest of a layer, embedding, loss and optimizer, in at most 3 "
        "minutes on an H100. Writes a JSON file for --wlb-profile and the other commands' --profile. To measure the "
        "network too, use several GPUs: torchrun --nproc-per-node N -m wlb_megatron.profiler <the same flags>. With "
        "experts the layer has those of one expert-parallel rank; their exchange is not measured."
    )
    add = parser.add_argument
    add(
        "--out",
        metavar="PATH",
        help="file to write (required)",
    )
    add("--refit", help=argparse.SUPPRESS)
    add_model(parser)
    add_experts(parser)
    add_sizes(parser)
    add(
        "--gradient-accumulation-fusion",
        action="store_true",
        help="add gradients inside the matrix products, as training does where apex is installed (default: off)",
    )
    add(
        "--grid",
        choices=("full", "reduced", "tiny"),
        default="full",
        help="how many points are measured; tiny is to try the command on a CPU (default: full)",
    )
    add(
        "--backend",
        choices=("auto", "te", *(name for name in KERNELS if name != USUAL_KERNELS), "torch"),
        default="auto",
        help="attention kernels: te (cuDNN's through Transformer Engine), fa4 (FlashAttention-4), torch (on the CPU), "
        "auto (those that --wlb-kernels auto trains with) (default: auto)",
    )
    add(
        "--budget",
        type=real(0, SECONDS),
        default=170,
        help="time after which no further point is measured (seconds; default: 170)",
    )
    parser.set_defaults(run=run_profile)


def run_profile(args: argparse.Namespace) -> None:
    if args.refit is not None:
        raise WlbError("--refit is gone: measure again, with --out PATH in its place")
    if args.out is None:
        raise WlbError("profile writes a file: give --out PATH")
    with explain_bad_values():
        model = profiled_model(args)
    for line in args.notes:
        _say(line)
    out = Path(args.out)
    if not out.parent.is_dir():
        raise WlbError(f"cannot write {out}: there is no folder {out.parent}; make it or give another --out")
    try:
        profiled = _measured(args, model)
    except ImportError as error:
        raise WlbError(
            f"profiling needs {error.name}, which does not import ({error}): {install('gpu')}"
        ) from None
    if profiled is not None:
        settings = profiled["settings"]
        device = Device(settings["gpu"], settings["processors"], settings["backend"])
        costs = fit(model, profiled["samples"], device)
        sizes = {
            part: np.abs(errors) for part, errors in leave_out(model, profiled["samples"], device).items()
        }
        errors = {
            part: {"mean": float(size.mean()), "p95": float(np.percentile(size, 95)), "points": len(size)}
            for part, size in sizes.items()
        }
        write_profile(out, {**profiled, "fit": asdict(costs), "leave_out": errors})
        rows = [[part, e["points"], f"{e['mean']:.1%}", f"{e['p95']:.1%}"] for part, e in errors.items()]
        print_table(
            "attention predicted without having seen it: relative error",
            ("part", "points", "mean", "p95"),
            rows,
        )
        print(
            f"{out}: {len(profiled['samples'])} points of {device.name} in {profiled['seconds']} s; attention costs "
            f"as much as the rest of a layer at {costs.quadratic_at:,.0f} tokens"
        )


def _measured(args: argparse.Namespace, model: ProfiledModel) -> dict[str, Any] | None:
    """The profile of rank 0, None on others. ImportError without torch or Megatron."""
    import torch

    backend = _backend(args.backend, model, torch)
    if args.backend == "auto" and backend == "torch" and args.grid != "tiny":
        raise WlbError(
            "no GPU was found: profile on one of the job's GPUs, or try the command with --grid tiny"
        )
    from wlb_megatron.profiler.layer import leave
    from wlb_megatron.profiler.run import count_points, profile

    rank, world = _join(torch, backend)
    reports = rank == 0
    with progress(count_points(args.grid, model, world) if reports else 0, lines=reports) as tick:
        profiled = profile(
            model,
            grid=args.grid,
            backend=backend,
            budget=args.budget,
            tick=tick,
            say=_say if reports else lambda _: None,
        )
    leave()
    return profiled if reports else None


def _backend(choice: str, model: ProfiledModel, torch: Any) -> str:
    """The kernels to measure: cudnn, fa4 or torch. WlbError if those asked for cannot run."""
    if choice == "torch" or (choice == "auto" and not torch.cuda.is_available()):
        return "torch"
    if not torch.cuda.is_available():
        raise WlbError(
            f"--backend {choice} needs a GPU: run it there, or give --backend torch to try it on the CPU"
        )
    import transformer_engine.pytorch  # noqa: F401

    if choice == "te":
        return USUAL_KERNELS
    layer = kernel_choice.Layer(
        dim=model.head_dim,
        v_dim=model.head_dim,
        grouped=model.kv_heads != model.heads,
        capability=torch.cuda.get_device_capability(),
    )
    if choice == "auto":
        return kernel_choice.chosen(choice, layer)[0]
    if lacks := kernel_choice.lacks(choice, layer):
        raise WlbError(f"--backend {choice} cannot be used: {lacks}; give --backend te")
    return choice


def _join(torch: Any, backend: str) -> tuple[int, int]:
    """Rank and number of processes; under torchrun, they are joined."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if backend != "torch":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        return 0, 1
    torch.distributed.init_process_group("gloo" if backend == "torch" else "nccl")
    return torch.distributed.get_rank(), world


def _say(text: str) -> None:
    print(f"> {text}", file=sys.stderr, flush=True)
