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
from wlb_megatron.report.terminal import print_table, progress
from wlb_megatron.simulator.model_flags import add_experts, add_model, profiled_model
from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.fit import Device, fit, leave_out
from wlb_megatron.workload.profile import ProfiledModel, read_samples, write_profile


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
        help="file to write (required, unless --refit)",
    )
    add(
        "--refit",
        metavar="PATH",
        help="fit the measurements of this profile again, without measuring, and write it to --out, else back "
        "(default: measure)",
    )
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
        choices=("auto", *kernel_choice.BACKENDS),
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
        _fit_and_write(Path(args.out or args.refit), read_samples(args.refit))
        return
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
        _fit_and_write(out, profiled)
        print(
            f"{out}: {len(profiled['samples'])} points of {profiled['settings']['gpu']} in {profiled['seconds']} s"
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


def _fit_and_write(path: Path, profiled: dict[str, Any]) -> None:
    """Fits, writes, and shows the fit and its error on samples that it has not seen."""
    write_profile(path, profiled)  # what was measured is kept, whatever the fit says of it
    settings = profiled["settings"]
    model = ProfiledModel.from_dict(settings["model"])
    device = Device(settings["gpu"], settings["processors"], kernel_choice.kernels_name(settings["backend"]))
    costs = fit(model, profiled["samples"], device)
    sizes = {part: np.abs(errors) for part, errors in leave_out(model, profiled["samples"], device).items()}
    errors = {
        part: {"mean": float(size.mean()), "p95": float(np.percentile(size, 95)), "points": len(size)}
        for part, size in sizes.items()
    }
    write_profile(path, {**profiled, "fit": asdict(costs), "leave_out": errors})
    rows = [[part, e["points"], f"{e['mean']:.1%}", f"{e['p95']:.1%}"] for part, e in errors.items()]
    print_table(
        "attention predicted without having seen it: relative error", ("part", "points", "mean", "p95"), rows
    )
    print_table("fitted", ("cost", "forward", "backward"), fitted_rows(costs))


def fitted_rows(costs: Costs) -> list[list[str]]:
    """A line for each cost, forward and backward."""
    both = (costs.forward, costs.backward)
    tokens = int(costs.layer.tokens[-1])
    big = [int(costs.forward.queries[-1])]
    pair = 4 * costs.forward.heads * costs.forward.head_dim / 2
    flops = [factor * pair * big[0] * (big[0] + 128) for factor in (1, 2.5)]
    rates = [f / float(t.diagonal[-1]) / 1e3 for f, t in zip(flops, both, strict=True)]
    return [
        [f"attention of {big[0]} causal rows (TFLOP/s)", *(f"{rate:.0f}" for rate in rates)],
        ["an attention call (us)", *(f"{t.call / 1e3:.1f}" for t in both)],
        ["a segment (us)", *(f"{t.segment / 1e3:.2f}" for t in both)],
        ["a row of queries, of keys (ns)", *(f"{t.query_row:.2f}, {t.key_row:.2f}" for t in both)],
        ["a call on earlier keys, in all (us)", *(f"{t.earlier_call / 1e3:.1f}" for t in both)],
        ["a row moved for it: query, key (ns)", *(f"{t.moved_query:.2f}, {t.moved_key:.2f}" for t in both)],
        ["keys of a remote token (ns)", *(f"{t.exchange_row:.1f}" for t in both)],
        [f"the rest of a layer, a token of {tokens} (ns)", *(f"{ns:.1f}" for ns in costs.layer.slope())],
        ["attention costs as much as the rest at (tokens)", f"{costs.quadratic_at:.0f}", ""],
        ["a document, in tokens", f"{costs.per_document:.1f}", ""],
        ["embedding, a token (ns)", *(f"{ns:.1f}" for ns in costs.embedding.slope())],
        ["output and loss, a token (ns)", *(f"{ns:.1f}" for ns in costs.loss.slope())],
        ["host to launch a layer (us)", *(f"{ns / 1e3:.0f}" for ns in costs.host)],
        ["optimizer, a million parameters (us)", f"{costs.optimizer * 1e3:.2f}", ""],
        *(
            [f"{name}: latency (us), rate (GB/s)", f"{link.latency / 1e3:.1f}, {1 / link.per_byte:.0f}", ""]
            for name, link in (costs.links or {}).items()
        ),
    ]


def _backend(choice: str, model: ProfiledModel, torch: Any) -> str:
    """te, fa4 or torch. WlbError if the one asked for cannot run."""
    if choice == "torch" or (choice == "auto" and not torch.cuda.is_available()):
        return "torch"
    if not torch.cuda.is_available():
        raise WlbError(
            f"--backend {choice} needs a GPU: run it there, or give --backend torch to try it on the CPU"
        )
    import transformer_engine.pytorch  # noqa: F401

    if choice == "te":
        return "te"
    layer = kernel_choice.Layer(
        dim=model.head_dim,
        v_dim=model.head_dim,
        grouped=model.kv_heads != model.heads,
        capability=torch.cuda.get_device_capability(),
    )
    if choice == "auto":
        return kernel_choice.backend_of(kernel_choice.chosen(choice, layer)[0])
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
