"""The flags that describe a job to analyze and simulate, and how they are read."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from wlb_megatron.arguments import add_pipeline
from wlb_megatron.config import RANKS, SEED, WlbConfig, real, whole
from wlb_megatron.documents.corpus import Lengths, blocks
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.limits import Trainer
from wlb_megatron.refusals import unsupported
from wlb_megatron.simulator.calibration import add_assumptions, profiled_shape, read_assumptions
from wlb_megatron.simulator.divisible import check_divisible, check_heads
from wlb_megatron.simulator.job import Job, RunLength
from wlb_megatron.simulator.known_models import PRESETS, SHAPES
from wlb_megatron.simulator.model import LayerModel
from wlb_megatron.workload.assumptions import Assumptions
from wlb_megatron.workload.cost_model import latent_parameters
from wlb_megatron.workload.model import ONE_KERNEL, RECOMPUTE, DeltaNets, Experts, Layout, Model
from wlb_megatron.workload.profile import Profile, ProfiledModel

ITERATIONS, FEWEST, WARM_UP = 100, 4, 16
"""Looked at, and planned before, where the user does not say how many."""

MOST_PLANNED = 200_000
"""Documents of all iterations that are looked at, about: of tiny ones a few iterations say as much as many."""


Kind = dict[str, Any]
COUNT: Kind = {"type": whole(1)}
GROUP: Kind = {"type": whole(1, RANKS)}
SWITCH: Kind = {"action": "store_true"}
"""How flags are read: a number of at least 1, a number of ranks, on or off."""


def add_flags(add: Callable[..., Any], kind: Kind, rows: Sequence[tuple[str, str]]) -> None:
    """A flag of this kind for each (name, help)."""
    for name, what in rows:
        add(f"--{name}", **kind, help=what)


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


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model's shape, named as Megatron's flags."""
    model = parser.add_argument_group(
        "model",
        "a known shape, or your own: give --hidden-size and --num-attention-heads; the rest defaults as in Megatron",
    ).add_argument
    model_help = (
        "a known shape, or a model that people know; the other model flags override parts of it (default: 7B)"
    )
    model("--model", choices=[*SHAPES, *PRESETS], help=model_help)
    counts = (
        ("num-layers", "layers of the model (default: the known shape's)"),
        ("hidden-size", "channels of a token (default: the known shape's)"),
        ("num-attention-heads", "query heads (default: the known shape's)"),
        (
            "num-query-groups",
            "key-value heads (default: the known shape's; for your own as many as query heads)",
        ),
        ("q-lora-rank", "channels of a compressed query (default: not compressed)"),
        ("kv-channels", "channels of a head (default: hidden size over heads)"),
        (
            "ffn-hidden-size",
            "channels of the feed-forward layer (default: the known shape's; for your own 4 x hidden size, or with "
            "--swiglu 8/3 of it in multiples of 64)",
        ),
        ("vocab-size", "rows of the embedding (default: the known shape's)"),
    )
    add_flags(model, COUNT, counts)
    switches = (
        ("group-query-attention", "as Megatron needs with --num-query-groups (default: off)"),
        ("multi-latent-attention", "keys and values are compressed (default: off)"),
        ("swiglu", "gated feed-forward (default: the known shape's; for your own off)"),
        ("qk-layernorm", "queries and keys have norms, which count in memory (default: off)"),
    )
    add_flags(model, SWITCH, switches)
    for name, default, what in (
        ("kv-lora-rank", 32, "channels of compressed keys and values"),
        ("qk-head-dim", 128, "channels of a query's head without positions"),
        ("qk-pos-emb-head-dim", 64, "its channels with positions"),
        ("v-head-dim", 128, "channels of a value's head"),
        ("linear-num-key-heads", 16, "of gated delta nets: query and key heads"),
        ("linear-num-value-heads", 32, "of gated delta nets: value heads"),
        ("linear-key-head-dim", 128, "of gated delta nets: channels of a key head"),
        ("linear-value-head-dim", 128, "of gated delta nets: channels of a value head"),
        ("linear-conv-kernel-dim", 4, "of gated delta nets: tokens that the convolution sees"),
    ):
        model(f"--{name}", type=whole(1), default=default, help=f"{what} (default: {default})")


def add_experts(parser: argparse.ArgumentParser) -> None:
    """The model's experts, named as Megatron's flags."""
    add = parser.add_argument_group(
        "experts",
        "a layer takes what one of Qwen3-30B-A3B took on an H200, scaled, or what --profile measured",
    ).add_argument
    counts = (
        ("num-experts", "experts of a layer (default: none, a dense model)"),
        ("moe-router-topk", "experts that a token activates (default: 2)"),
        ("moe-ffn-hidden-size", "channels of an expert's feed-forward layer (default: --ffn-hidden-size)"),
        (
            "moe-shared-expert-intermediate-size",
            "channels of the shared experts, which every token passes (default: none)",
        ),
    )
    add_flags(add, COUNT, counts)
    groups = (
        ("expert-model-parallel-size", "ranks that the experts are spread over (default: 1)"),
        ("expert-tensor-parallel-size", "ranks that share one expert (default: --tp)"),
    )
    add_flags(add, GROUP, groups)
    grouped = f"one call multiplies a rank's experts; with {ONE_KERNEL}=1 in the environment one kernel (default: off)"
    permuted = "one kernel each orders tokens by expert and back (default: off)"
    add_flags(add, SWITCH, [("moe-grouped-gemm", grouped), ("moe-permute-fusion", permuted)])
    parser.set_defaults(one_kernel=False)
    add(
        "--moe-router-load-balancing-type",
        nargs="+",
        choices=BALANCING,
        help="loss that balances the experts (default: aux_loss)",
    )
    add(
        "--moe-layer-freq",
        default="1",
        help="which layers have experts; counted in the sum of parameters, else all have (default: 1)",
    )
    imbalance = "tokens of the fullest rank's experts over the mean, for memory (factor; default: 1.5)"
    add("--expert-imbalance", type=real(1, 1e6), help=imbalance)


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

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Megatron's kinds of routers' losses that training takes."""

_EXPERTS = (
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_load_balancing_type",
    "expert_imbalance",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def read_trainer(args: argparse.Namespace) -> Trainer:
    """What decides about chunks. WlbError for experts' flags without experts."""
    _refuse_idle_experts(args)
    return Trainer(
        stages=args.pp,
        tensor=args.tp,
        experts=args.num_experts or 0,
        expert=args.expert_model_parallel_size or 1,
        expert_tensor=args.expert_tensor_parallel_size,
        balancing=tuple(args.moe_router_load_balancing_type or BALANCING[:1]),
        shards_weights=args.use_megatron_fsdp or args.use_torch_fsdp2,
        mtp=args.mtp_num_layers,
        offloads=args.fine_grained_activation_offloading,
        interleaves=args.vpp > 1,
        offloads_layers=args.cpu_offloading_num_layers > 0,
        delta_nets="G" in (args.hybrid_layer_pattern or ""),
    )


def _refuse_idle_experts(args: argparse.Namespace) -> None:
    for name in _EXPERTS if args.num_experts is None else ():
        if getattr(args, name) is not None:
            raise WlbError(f"--{name.replace('_', '-')} needs --num-experts; give both or neither")


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
    _refuse_idle_recompute(args)
    kind = " ".join(args.moe_router_load_balancing_type or ("none",))
    if args.cp_mode == "dynamic" and kind != "none":
        raise WlbError(
            f"--cp-mode dynamic cannot be combined with --moe-router-load-balancing-type {kind}: a router's loss "
            "would depend on the groups; use none, or --cp-mode fixed"
        )
    assumptions, table, profile = read_assumptions(args)
    if profile is not None:
        _refuse_measured(args)
        _complete_experts(args, profile)
    _complete_model(args)
    with explain_bad_values():
        layout = _layout(args)
        dense = read_shape(args, profile)
        check_divisible(dense, args)
        shape = replace(
            activated(dense, args),
            experts=read_experts(dense, args),
            tied=args.launched and not args.untie_embeddings_and_output_weights,
            dropout=args.launched and args.hidden_dropout != 0,
        )
        if profile is not None:
            names = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated")
            sizes = {name: getattr(shape, name) for name in names}
            profile.refuse_other({**sizes, "tp": layout.tensor, "experts": shape.experts})
        model = LayerModel(
            shape=shape,
            layout=layout,
            assumptions=assumptions,
            measured=table,
            costs=None if profile is None else profile.costs,
            recompute=args.recompute_granularity,
            recompute_layers=args.recompute_num_layers if args.recompute_method == "uniform" else 1,
            recompute_blocks=args.recompute_num_layers if args.recompute_method == "block" else None,
            regather=args.regather_keys,
        )
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
        length=RunLength(args.train_iters, args.train_samples),
        messages=messages,
        corpora=args.corpora,
        micro_batch_size=args.micro_batch_size,
    )


def _refuse_idle_recompute(args: argparse.Namespace) -> None:
    """WlbError for what changes nothing where no layers are recomputed in full."""
    if args.recompute_granularity == "full":
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
    )


def _complete_model(args: argparse.Namespace) -> None:
    """Fills in what other flags of Megatron's say. WlbError where they do not fit together."""
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise WlbError(
                "--recompute-activations is selective recomputation, not full: drop one of the two"
            )
        args.recompute_granularity = "selective"
    if args.hybrid_layer_pattern is not None:
        _complete_pattern(args)
    layers = args.num_layers_per_virtual_pipeline_stage
    if layers is not None:
        if args.vpp > 1 or args.num_layers is None or args.num_layers % (args.pp * layers):
            raise WlbError(
                f"--num-layers-per-virtual-pipeline-stage {layers} must divide --num-layers over {args.pp} stages, and "
                "stands in place of --num-virtual-stages-per-pipeline-rank"
            )
        args.vpp = args.num_layers // args.pp // layers
    if args.launched and not args.group_query_attention:
        args.num_query_groups = None  # Megatron ignores it then
    if args.multi_latent_attention:
        args.num_query_groups = None
        args.kv_channels = (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim) // 2


def _complete_pattern(args: argparse.Namespace) -> None:
    """Fills in layers, stages and predictions of a HybridModel's pattern. `*-*--|*-*--/*-` on two stages: 4 layers, an
    MLP of 3/2 of the width, one further prediction."""
    main, *further = args.hybrid_layer_pattern.split("/")
    attention, dense, routed, nets = (main.count(symbol) for symbol in "*-EG")
    stages = main.split("|")
    if not attention or not dense + routed or {*main} - {*"*-EG|"}:
        raise WlbError(
            f"--hybrid-layer-pattern {main} is not predicted: give attention (*) with MLPs (-) or experts (E), and "
            "gated delta nets (G) if there are any"
        )
    if len(stages) > 1 and len(stages) % args.pp:
        raise WlbError(
            f"--hybrid-layer-pattern {main} has {len(stages)} parts, no multiple of --pp {args.pp}"
        )
    if lines := unsupported(args, WlbConfig()):
        raise WlbError(lines[0])
    number = args.recompute_num_layers * attention // (attention + dense + routed + nets)
    args.num_layers, args.mtp_num_layers, args.recompute_num_layers = attention, len(further), max(1, number)
    args.vpp = max(1, len(stages) // args.pp)
    if nets and (args.profile is not None or args.model in SHAPES or args.hidden_size is None):
        raise WlbError(
            "--hybrid-layer-pattern with G needs --hidden-size, without --profile or --model: neither has gated delta "
            "nets"
        )
    ffn = args.ffn_hidden_size or (None if args.profile is not None else read_shape(args).ffn)
    if ffn is not None and not routed:
        args.ffn_hidden_size = ffn * dense // attention
    if routed and args.moe_layer_freq == "1":
        args.moe_layer_freq = f"[1]*{min(routed, attention)}+[0]*{max(0, attention - routed)}"


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


def read_shape(args: argparse.Namespace, profile: Profile | None = None) -> Model:
    """The profiled model, else a known one, of which flags change parts; else all by flags and Megatron's defaults."""
    base = SHAPES.get(args.model or "7B", SHAPES["7B"])
    flags = {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "heads": args.num_attention_heads,
        "kv_heads": args.num_query_groups,
        "ffn": args.ffn_hidden_size,
        "vocab": args.vocab_size,
        "head_dim": args.kv_channels,
        "gated": args.swiglu or None,
        "qk_norm": args.qk_layernorm or None,
    }
    flags_set = {name: value for name, value in flags.items() if value is not None}
    if profile is not None:
        return replace(profiled_shape(profile, int(base.layers)), **flags_set)
    if args.model in SHAPES or args.hidden_size is None:
        return replace(base, **{"head_dim": 0, **flags_set})
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not heads:
        raise WlbError("--hidden-size needs --num-attention-heads; give both, or --model")
    ffn = int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden
    sizes = (args.linear_num_key_heads, args.linear_num_value_heads)
    dims = (args.linear_key_head_dim, args.linear_value_head_dim, args.linear_conv_kernel_dim)
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""  # profile, of one layer, has no such flag
    nets = pattern.split("/")[0].count("G")
    plain = Model(
        layers=base.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocab=base.vocab,
        gated=False,
        **_latent(args),
        delta_nets=DeltaNets(nets, *sizes, *dims) if nets else None,
    )
    return replace(plain, **flags_set)


def _latent(args: argparse.Namespace) -> dict[str, Any]:
    """What a Model knows of multi-latent attention."""
    if not args.multi_latent_attention:
        return {}
    ranks, dims = (args.q_lora_rank or 0, args.kv_lora_rank), (args.qk_head_dim, args.qk_pos_emb_head_dim)
    weights = latent_parameters(args.hidden_size, args.num_attention_heads, *ranks, (*dims, args.v_head_dim))
    return {"projections": weights, "compressed": sum(ranks) + dims[1]}


def _complete_experts(args: argparse.Namespace, profile: Profile) -> None:
    """Fills in the profile's experts where no flag gives others."""
    experts = profile.model.experts
    if experts is None:
        return
    for name, value in (
        ("num_experts", experts.count),
        ("moe_router_topk", experts.chosen),
        ("moe_ffn_hidden_size", experts.ffn),
        ("moe_shared_expert_intermediate_size", experts.shared),
        ("expert_model_parallel_size", experts.parallel),
        ("expert_tensor_parallel_size", experts.tensor),
    ):
        if getattr(args, name) is None:
            setattr(args, name, value)


def profiled_model(args: argparse.Namespace) -> ProfiledModel:
    """The model that flags tell `profile` to measure. WlbError where it cannot be."""
    if args.multi_latent_attention:
        raise WlbError(
            "multi-latent attention is not measured: approximate it by --kv-channels, the mean channels of a query and "
            "a value, with as many --num-query-groups as heads"
        )
    _refuse_idle_experts(args)
    if args.launched and not args.group_query_attention:
        args.num_query_groups = None  # Megatron ignores it then
    dense = read_shape(args)
    check_heads(dense.heads, dense.kv_heads, hidden=None if args.kv_channels else dense.hidden, tp=args.tp)
    spread = {"tp": args.tp, "cp": args.cp, "fused": args.gradient_accumulation_fusion}
    sizes = asdict(activated(dense, args)) | {"layers": 1, "experts": read_experts(dense, args)}
    return ProfiledModel(**sizes, **spread)


def read_experts(dense: Model, args: argparse.Namespace) -> Experts | None:
    if args.num_experts is None:
        return None
    ffn = args.moe_ffn_hidden_size or dense.ffn
    parallel, tensor = args.expert_model_parallel_size or 1, args.expert_tensor_parallel_size or args.tp
    return Experts(
        args.num_experts,
        ffn,
        parallel,
        tensor,
        args.moe_router_topk or 2,
        round(100 * (args.expert_imbalance or 1.5)),
        args.moe_shared_expert_intermediate_size or 0,
        _dense_layers(args.moe_layer_freq, int(dense.layers)),
        args.one_kernel,
        args.moe_permute_fusion,
    )


def _dense_layers(pattern: str, layers: int) -> int:
    """Layers without experts. pattern: "2" (every second layer has experts), or Megatron's list of Python, of one
    number a layer: "([0]*3+[1]*58)" has 3 of 61."""
    if pattern.isascii() and pattern.isdigit() and int(pattern):
        return layers - -(-layers // int(pattern))

    def listed(node: ast.expr) -> list[int]:
        """Sums and multiples of lists. ValueError for anything else, and for a list that is too long."""
        match node:
            case ast.List(elts=numbers):
                return [int(ast.literal_eval(number)) for number in numbers]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return listed(left) + listed(right)
            case ast.BinOp(left=numbers, op=ast.Mult(), right=ast.Constant(value=int(times))):
                pass
            case ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=numbers):
                pass
            case _:
                raise ValueError
        items = listed(numbers)
        if len(items) * times > layers:
            raise ValueError
        return items * times

    try:
        entries = listed(ast.parse(pattern.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        entries = []
    if len(entries) != layers or not {*entries} <= {0, 1}:
        raise WlbError(
            f"--moe-layer-freq {pattern!r} is neither a number nor a list of {layers} zeros and ones"
        )
    return entries.count(0)


def activated(shape: Model, args: argparse.Namespace) -> Model:
    """With experts, the shape of what a token passes, as training's plans count it."""
    if args.num_experts is None:
        return shape
    one, shared = args.moe_ffn_hidden_size or shape.ffn, args.moe_shared_expert_intermediate_size or 0
    return replace(shape, ffn=one * (args.moe_router_topk or 2) + shared)
