"""The flags that describe a job to analyze and simulate, and how they are read: with the figures of a cluster that are
assumed, and what a profile measured in their place.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from wlb_megatron.arguments import add_pipeline
from wlb_megatron.config import SEED, real, whole
from wlb_megatron.documents.corpus import Lengths, blocks
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.limits import Trainer
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.simulator.model_flags import (
    BALANCING,
    COUNT,
    SWITCH,
    add_experts,
    add_flags,
    add_model,
    check_divisible,
    read_model,
)
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.kernel_table import KernelTable, builtin, builtin_names
from wlb_megatron.workload.model import RECOMPUTE, Layout
from wlb_megatron.workload.profile import Profile, read_profile

ITERATIONS, FEWEST, WARM_UP = 100, 4, 16
"""Looked at, and planned before, where the user does not say how many."""

MOST_PLANNED = 200_000
"""Documents of all iterations that are looked at, about: of tiny ones a few iterations say as much as many."""


def add_job(parser: argparse.ArgumentParser) -> None:
    """The flags beyond layout and settings. Model flags are named as Megatron's."""
    add = parser.add_argument
    add_pipeline(parser)
    chunk_layers = "layers of a model chunk; instead of --vpp (default: none)"
    add_flags(add, COUNT, [("num-layers-per-virtual-pipeline-stage", chunk_layers)])
    add_flags(add, SWITCH, [("recompute-activations", "the same as --recompute selective (default: off)")])
    add_recompute(parser)
    iterations_help = (
        f"iterations to simulate (default: {ITERATIONS}, fewer if those hold over {MOST_PLANNED:,} documents)"
    )
    add("--iterations", type=whole(1), help=iterations_help)
    add(
        "--warm-up",
        type=whole(0),
        help=f"iterations to plan before those, so that queues fill (default: {WARM_UP}, or fewer with few iterations)",
    )
    add(
        "--seed",
        default=1234,
        type=whole(-1, SEED),
        help="seed of the shuffle, as --seed in training; -1: the given order (default: 1234)",
    )
    add(
        "--json",
        metavar="PATH",
        help="write all figures as JSON to this file, or to stdout for -, instead of a table",
    )
    add_model(parser)
    add_experts(parser)
    _add_trainer(parser)
    _add_run(parser)
    add_assumptions(parser, Assumptions())


def add_recompute(parser: argparse.ArgumentParser) -> None:
    """Megatron's flags of recomputation."""
    add = parser.add_argument
    add(
        "--recompute-granularity",
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="activations that are recomputed in backward (default: none)",
    )
    add(
        "--recompute-method",
        choices=("uniform", "block"),
        default="uniform",
        help="with --recompute-granularity full: uniform recomputes all layers, in units of --recompute-num-layers; "
        "block only so many of a model chunk (default: uniform)",
    )
    what = "layers of a unit (uniform), or of a model chunk that are recomputed (block; default: 1)"
    add("--recompute-num-layers", type=whole(1), default=1, help=what)


def _add_trainer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "trainer", "Megatron's flags that decide whether documents can train in chunks"
    ).add_argument
    further = "further tokens that multi-token prediction predicts, one layer each (default: 0)"
    add("--mtp-num-layers", type=whole(0), default=0, help=further)
    add(
        "--hybrid-layer-pattern",
        metavar="PATTERN",
        help='layers of a HybridModel, such as "*-*E|*-*E": a layer is counted for each *, with its share of the MLPs '
        "(-) and experts (E); each | begins a virtual stage, each / a further prediction",
    )
    sharded = "weights are sharded over data-parallel ranks"
    switches = (
        ("use-megatron-fsdp", f"Megatron's FSDP: {sharded}"),
        ("use-torch-fsdp2", f"torch's FSDP2: {sharded}"),
        ("fine-grained-activation-offloading", "keep single activations in host memory until backward"),
    )
    add_flags(add, SWITCH, switches)
    offloaded = "layers that keep all their activations in host memory until backward (default: 0)"
    add("--cpu-offloading-num-layers", type=whole(0), default=0, help=offloaded)


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Megatron's flags that a launch command has and that change memory or what follows from a step's time. Commands
    without a launch command assume the first five."""
    add = parser.add_argument_group("run", "further flags of a launch command").add_argument
    for flag, what in (
        ("sequence-parallel", "tensor-parallel ranks share activations"),
        ("use-distributed-optimizer", "ranks share the optimizer's state"),
        ("overlap-grad-reduce", "gradients are reduced during the backward"),
        ("overlap-param-gather", "parameters are gathered during the forward"),
        ("untie-embeddings-and-output-weights", "the output layer has weights of its own"),
    ):
        add(f"--{flag}", **SWITCH, help=f"{what} (assumed without a launch command)")
    add("--no-gradient-accumulation-fusion", **SWITCH, help="experts' gradients are made apart, for memory")
    dropped = "share of dropped activations (default: 0; of a launch command 0.1)"
    add("--hidden-dropout", type=real(0, 1), help=dropped)
    for flag, what in (("train-iters", "iterations"), ("train-samples", "windows")):
        add(f"--{flag}", type=whole(1, LARGEST_RUN), help=f"{what} of the run, for its days (default: none)")


LARGEST_RUN = 1 << 40


def read_trainer(args: argparse.Namespace) -> Trainer:
    """What decides about chunks."""
    return Trainer(
        stages=args.pp,
        tensor=args.tp,
        experts=args.num_experts or 0,
        expert=args.expert_model_parallel_size or 1,
        expert_tensor=args.expert_tensor_parallel_size,
        balancing=tuple(args.moe_router_load_balancing_type or BALANCING[:1]),
        shards_weights=args.use_megatron_fsdp or args.use_torch_fsdp2,
        offloads=args.fine_grained_activation_offloading,
        interleaves=args.vpp > 1,
        offloads_layers=args.cpu_offloading_num_layers > 0,
        delta_nets="G" in (args.hybrid_layer_pattern or ""),
    )


def usual_iterations(lengths: Lengths, tokens: int) -> tuple[int, int]:
    """Iterations to look at where no flag says how many, and documents of one of them. lengths: tokens of each
    document. tokens: size of a global batch. 2,000 tokens of documents of 2: 100 iterations of 1,000."""
    total = sum(int(block.sum()) for block in blocks(lengths))
    documents = tokens * sum(int((block > 0).sum()) for block in blocks(lengths)) // max(1, total)
    return max(FEWEST, min(ITERATIONS, MOST_PLANNED // max(1, documents))), documents


def read_job(args: argparse.Namespace, lengths: Lengths | None = None) -> Job:
    """The job that the flags describe, to look at documents of these lengths. WlbError on what cannot be."""
    iterations, warm_up = args.iterations or ITERATIONS, WARM_UP
    messages: tuple[str, ...] = tuple(args.notes)
    if args.iterations is None and lengths is not None:
        iterations, documents = usual_iterations(lengths, args.window * args.micro_batches * args.dp)
        if iterations < ITERATIONS:
            warm_up = min(warm_up, iterations)
            messages += (
                f"{iterations} iterations are looked at, not {ITERATIONS}: each takes some {documents:,} documents "
                "(--iterations)",
            )
    _complete_recompute(args)
    kind = " ".join(args.moe_router_load_balancing_type or ("none",))
    if args.cp_mode == "dynamic" and kind != "none":
        raise WlbError(
            f"--cp-mode dynamic cannot be combined with --moe-router-load-balancing-type {kind}: a router's loss "
            "would depend on the groups; use none, or --cp-mode fixed"
        )
    assumptions, table, profile = read_assumptions(args)
    if profile is not None:
        _refuse_measured(args)
    with explain_bad_values():
        shape = read_model(args, profile)
        layout = _layout(args)
        check_divisible(shape, layout)
        model = LayerModel(
            shape=shape,
            layout=layout,
            assumptions=assumptions,
            measured=table,
            costs=None if profile is None else profile.costs,
        )
    run_steps = args.train_iters
    if run_steps is None and args.train_samples is not None:
        run_steps = -(-args.train_samples // (args.micro_batches * args.dp))
    return Job(
        model=model,
        window=args.window,
        micro_batches=args.micro_batches,
        iterations=iterations,
        warm_up=warm_up if args.warm_up is None else args.warm_up,
        seed=None if args.seed < 0 else args.seed,
        profile=profile,
        trainer=read_trainer(args),
        gib=args.gpu_memory,
        margin=args.memory_margin,
        run_steps=run_steps,
        messages=messages,
        corpora=args.corpora,
        micro_batch_size=args.micro_batch_size,
    )


def _complete_recompute(args: argparse.Namespace) -> None:
    """Fills in what --recompute-activations says. WlbError for what changes nothing where no layers are recomputed in
    full."""
    if args.recompute_granularity == "full":
        if args.recompute_activations:
            raise WlbError(
                "--recompute-activations is selective recomputation, not full: drop one of the two"
            )
        return
    for flag, is_set in (
        ("--recompute-method block", args.recompute_method == "block"),
        (f"--recompute-num-layers {args.recompute_num_layers}", args.recompute_num_layers > 1),
        (f"--wlb-recompute {args.recompute}", args.recompute != "auto"),
    ):
        if is_set:
            raise WlbError(
                f"{flag} changes nothing without --recompute-granularity full: add that, or leave it out"
            )
    if args.recompute_activations:
        args.recompute_granularity = "selective"


def _layout(args: argparse.Namespace) -> Layout:
    """Sizes, and what shares a step's state; without a launch command Megatron's usual flags are assumed."""
    no_launch = not args.launched
    return Layout(
        tensor=args.tp,
        context=args.cp,
        pipeline=args.pp,
        data=args.dp,
        virtual=args.vpp,
        sequence=no_launch or args.sequence_parallel,
        distributed_optimizer=no_launch or args.use_distributed_optimizer,
        reduce_overlaps=no_launch or args.overlap_grad_reduce,
        gather_overlaps=no_launch or args.overlap_param_gather,
        fused=not args.no_gradient_accumulation_fusion,
        recompute=args.recompute_granularity,
        recompute_layers=args.recompute_num_layers,
        recompute_block=args.recompute_method == "block",
        keep_keys=not args.regather_keys,
    )


_MEASURED = (
    *("matmul_rate", "memory_rate", "activation_passes", "ffn_passes"),
    *("weight_traffic", "logit_traffic", "optimizer_bytes", "expert_passes", "expert_rows"),
)
"""Assumptions for which a profile has measured times."""


def _refuse_measured(args: argparse.Namespace) -> None:
    """WlbError for flags that a profile leaves without effect."""
    plain = Assumptions()
    changed = [name for name in _MEASURED if getattr(args, name) != getattr(plain, name)]
    if changed:
        raise WlbError(
            f"--{changed[0].replace('_', '-')} has no effect with --profile, which measured it: drop one of the two"
        )
    if args.model is not None:
        raise WlbError(
            "--model has no effect with --profile, which holds its own model: give --num-layers instead"
        )


def add_assumptions(parser: argparse.ArgumentParser, defaults: Assumptions) -> None:
    """One flag for each figure, and the kernel table."""
    group = parser.add_argument_group(
        "assumptions",
        "figures of the cluster that are assumed, not measured; with --profile some are measured",
    )
    for assumption in fields(Assumptions):
        kind = whole(1) if assumption.name == "node" else real(0)
        value = getattr(defaults, assumption.name)
        group.add_argument(
            f"--{assumption.name.replace('_', '-')}",
            type=kind,
            default=None if assumption.name == "network_rate" else value,  # --network-gbps may say it
            help=f"{assumption.metadata['help']} (default: {value:g})",
        )
    parser.add_argument(
        "--network-gbps",
        type=real(0),
        help=f"the same as --network-rate in Gbit/s (default: {defaults.network_rate * 8e-9:g})",
    )
    parser.add_argument(
        "--kernel-table",
        metavar="NAME|PATH",
        help=f"attention times: a built-in table ({', '.join(builtin_names())}), or a JSON file of another GPU's "
        "(default: h100)",
    )
    parser.add_argument(
        *("--wlb-profile", "--profile"),
        dest="profile",
        metavar="PATH",
        help="file of wlb-megatron profile; what it measured replaces the kernel table and the assumptions about it "
        "(default: none)",
    )


def read_assumptions(args: argparse.Namespace) -> tuple[Assumptions, KernelTable, Profile | None]:
    """Figures as the flags say, attention of a kernel table, and the profile that they are of, if one is given."""
    with explain_bad_values():
        rates = {field.name: getattr(args, field.name) for field in fields(Assumptions)}
        if args.network_gbps is not None:
            if args.network_rate is not None:
                raise WlbError("--network-gbps and --network-rate say the same: give one")
            if not args.network_gbps:
                raise WlbError("--network-gbps 0 is no rate: give the Gbit/s of a GPU's network card")
            rates["network_rate"] = args.network_gbps * 1e9 / 8
        figures = Assumptions(**{name: rate for name, rate in rates.items() if rate is not None})
        if args.profile is not None:
            if args.kernel_table is not None:
                raise WlbError("--profile brings its own kernel table: drop --kernel-table")
            profile, plain = read_profile(args.profile), Assumptions()
            given = {name: rate for name, rate in rates.items() if rate not in (None, getattr(plain, name))}
            return replace(figures.with_links(profile.costs), **given), profile.costs.table, profile
        source = args.kernel_table or "h100"
        if source not in builtin_names() and not Path(source).exists():
            raise WlbError(f"no kernel table {source}: give {', '.join(builtin_names())} or a JSON file")
        return figures, builtin(source) if source in builtin_names() else KernelTable.from_json(source), None
