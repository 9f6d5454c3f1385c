"""The flags of a model and how they are read: known shapes, models that people know, experts, and what must divide."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from wlb_megatron.config import RANKS, WlbConfig, real, whole
from wlb_megatron.errors import WlbError
from wlb_megatron.refusals import unsupported
from wlb_megatron.workload.cost_model import latent_parameters
from wlb_megatron.workload.model import ONE_KERNEL, DeltaNets, Experts, Layout, Model
from wlb_megatron.workload.profile import Profile, ProfiledModel

SHAPES = {
    "550M": Model(layers=24, hidden=1024, heads=16, kv_heads=8, ffn=2816),
    "7B": Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=11008),
    "30B": Model(layers=48, hidden=7168, heads=56, kv_heads=8, ffn=19200),
    "70B": Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    "405B": Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248),
}
"""LLaMA-like, of the sizes in WLB-LLM's paper, which does not give them: all with 8 key-value heads as Llama 3."""

_COMMON = "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights"


def _dense(layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> str:
    return (
        f"{_COMMON} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
        f"--group-query-attention --num-query-groups 8 --kv-channels 128 --vocab-size {vocab}"
    )


def _experts(count: int, top_k: int, ffn: int) -> str:
    return f"--num-experts {count} --moe-router-topk {top_k} --moe-ffn-hidden-size {ffn} --moe-grouped-gemm"


_LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128"
)

PRESETS = {
    "llama3-8b": _dense(32, 4096, 14336, 32, 128256),
    "llama3-70b": _dense(80, 8192, 28672, 64, 128256),
    "llama3-405b": _dense(126, 16384, 53248, 128, 128256),
    "qwen3-8b": f"{_dense(36, 4096, 12288, 32, 151936)} --qk-layernorm",
    "qwen3-30b-a3b": _dense(48, 2048, 6144, 32, 151936).replace("groups 8", "groups 4")
    + f" --qk-layernorm {_experts(128, 8, 768)}",
    "qwen3-235b-a22b": _dense(94, 4096, 12288, 64, 151936).replace("groups 8", "groups 4")
    + f" --qk-layernorm {_experts(128, 8, 1536)}",
    "deepseek-v3": f"{_COMMON} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    f"--vocab-size 129280 {_LATENT} {_experts(256, 8, 2048)} --moe-shared-expert-intermediate-size 2048 "
    "--moe-layer-freq ([0]*3+[1]*58)",
    "mixtral-8x7b": f"{_dense(32, 4096, 14336, 32, 32000)} {_experts(8, 2, 14336)}",
    "mixtral-8x22b": f"{_dense(56, 6144, 16384, 48, 32768)} {_experts(8, 2, 16384)}",
}
"""From published configurations. DeepSeek-V3's first three layers are as wide as what a token passes of the others, so
that they take the same time. Its multi-token prediction is left out."""

Kind = dict[str, Any]

COUNT: Kind = {"type": whole(1)}

GROUP: Kind = {"type": whole(1, RANKS)}

SWITCH: Kind = {"action": "store_true"}
"""How flags are read: a number of at least 1, a number of ranks, on or off."""


def add_flags(add: Callable[..., Any], kind: Kind, rows: Sequence[tuple[str, str]]) -> None:
    """A flag of this kind for each (name, help)."""
    for name, what in rows:
        add(f"--{name}", **kind, help=what)


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


BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Megatron's kinds of routers' losses that training takes."""

_EXPERTS = {
    "num_experts": "count",
    "moe_router_topk": "chosen",
    "moe_ffn_hidden_size": "ffn",
    "moe_shared_expert_intermediate_size": "shared",
    "expert_model_parallel_size": "parallel",
    "expert_tensor_parallel_size": "tensor",
}
"""Settings of the experts by what Experts calls them."""


def _refuse_idle_experts(args: argparse.Namespace) -> None:
    others = ("moe_router_load_balancing_type", "expert_imbalance")
    for name in (*_EXPERTS, *others) if args.num_experts is None else ():
        if getattr(args, name) is not None:
            raise WlbError(f"--{name.replace('_', '-')} needs --num-experts; give both or neither")


def read_model(args: argparse.Namespace, profile: Profile | None) -> Model:
    """The model that the flags describe, as wide as what a token passes of it. WlbError where they do not fit together,
    or the profile is of another model."""
    if profile is not None:
        _complete_experts(args, profile)
    _refuse_idle_experts(args)
    _complete_model(args)
    dense = read_shape(args, profile)
    shape = replace(
        _activated(dense, args),
        experts=_read_experts(dense, args),
        losses=1 + args.mtp_num_layers,
        tied=args.launched and not args.untie_embeddings_and_output_weights,
        dropout=args.launched and args.hidden_dropout != 0,
    )
    if profile is not None:
        profile.refuse_other(shape, args.tp)
    return shape


def _complete_model(args: argparse.Namespace) -> None:
    """Fills in what other flags of Megatron's say. WlbError where they do not fit together."""
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


def read_shape(args: argparse.Namespace, profile: Profile | None = None) -> Model:
    """The profiled model, else a known one, of which flags change parts; else all by flags and Megatron's defaults."""
    base = SHAPES.get(args.model or "7B", SHAPES["7B"])
    flags = {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "heads": args.num_attention_heads,
        # Megatron ignores it without the other flag.
        "kv_heads": args.num_query_groups if args.group_query_attention or not args.launched else None,
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


def profiled_shape(profile: Profile, layers: int) -> Model:
    """The profiled model with this many layers."""
    sizes = {part.name: getattr(profile.model, part.name) for part in fields(Model)}
    return Model(**sizes | {"layers": layers, "experts": None})


def _complete_experts(args: argparse.Namespace, profile: Profile) -> None:
    """Fills in the profile's experts where no flag gives others."""
    for name, size in _EXPERTS.items() if profile.model.experts else ():
        if getattr(args, name) is None:
            setattr(args, name, getattr(profile.model.experts, size))


def profiled_model(args: argparse.Namespace) -> ProfiledModel:
    """The model that flags tell `profile` to measure. WlbError where it cannot be."""
    if args.multi_latent_attention:
        raise WlbError(
            "multi-latent attention is not measured: approximate it by --kv-channels, the mean channels of a query and "
            "a value, with as many --num-query-groups as heads"
        )
    _refuse_idle_experts(args)
    dense = read_shape(args)
    spread = {"tp": args.tp, "cp": args.cp, "fused": args.gradient_accumulation_fusion}
    sizes = asdict(_activated(dense, args)) | {"layers": 1, "experts": _read_experts(dense, args)}
    model = ProfiledModel(**sizes, **spread)
    check_divisible(
        model, Layout(tensor=args.tp, data=1 if model.experts is None else model.experts.parallel)
    )
    return model


def _read_experts(dense: Model, args: argparse.Namespace) -> Experts | None:
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
            case (
                ast.BinOp(left=factor, op=ast.Mult(), right=ast.Constant(value=int(times)))
                | ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=factor)
            ):
                items = listed(factor)
                if len(items) * times <= layers:
                    return items * times
        raise ValueError

    try:
        entries = listed(ast.parse(pattern.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        entries = []
    if len(entries) != layers or not {*entries} <= {0, 1}:
        raise WlbError(
            f"--moe-layer-freq {pattern!r} is neither a number nor a list of {layers} zeros and ones"
        )
    return entries.count(0)


def _activated(shape: Model, args: argparse.Namespace) -> Model:
    """With experts, the shape of what a token passes, as training's plans count it."""
    if args.num_experts is None:
        return shape
    one, shared = args.moe_ffn_hidden_size or shape.ffn, args.moe_shared_expert_intermediate_size or 0
    return replace(shape, ffn=one * (args.moe_router_topk or 2) + shared)


def check_divisible(shape: Model, layout: Layout) -> None:
    """Raises WlbError with the flag and a value that works, where Megatron does not divide the model so."""
    pp, vpp, tp, experts = layout.pipeline, layout.virtual, layout.tensor, shape.experts
    layers, heads = int(shape.layers), shape.heads
    check_vpp(pp, vpp)
    # With --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split both count as layers.
    if layers % (pp * vpp) and (layers + 2) % (pp * vpp):
        flags = f"--pp {pp}" + (f" x --vpp {vpp}" if vpp > 1 else "")
        raise WlbError(
            f"--num-layers {layers} cannot be divided over {flags}: choose a divisor of {layers}, or of {layers + 2} "
            "(with the embedding and the loss counted as layers)"
        )
    if shape.hidden % heads and shape.head_dim == shape.hidden // heads:
        raise WlbError(
            f"--hidden-size {shape.hidden} is not a multiple of --num-attention-heads {heads}; give --kv-channels"
        )
    for size, what in ((shape.kv_heads, "--num-query-groups"), (tp, "the tensor-parallel size")):
        if heads % size:
            raise WlbError(f"--num-attention-heads {heads} is not a multiple of {what} {size}")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise WlbError(
            f"--num-query-groups {shape.kv_heads} is neither a multiple nor a divisor of --tp {tp}: change one"
        )
    if experts is None:
        _check_multiple("--ffn-hidden-size", shape.ffn, "--tp", tp)
        return
    _check_multiple("--num-experts", experts.count, "--expert-model-parallel-size", experts.parallel)
    _check_multiple("--moe-ffn-hidden-size", experts.ffn, "expert tensor size", experts.tensor)
    stage, sharing = tp * layout.context * layout.data, experts.parallel * experts.tensor
    if stage % sharing:
        raise WlbError(
            f"a stage's {stage} ranks (--tp x --cp x --dp) are not a multiple of the {sharing} that share experts: "
            "change --expert-model-parallel-size or --expert-tensor-parallel-size"
        )
    if experts.chosen > experts.count:
        raise WlbError(f"--moe-router-topk {experts.chosen} is above --num-experts {experts.count}")


def check_vpp(pp: int, vpp: int) -> None:
    """Raises WlbError for model chunks without a pipeline."""
    if vpp > 1 and pp == 1:
        raise WlbError(f"--vpp {vpp} changes nothing without --pp above 1: add that, or leave it out")


def _check_multiple(flag: str, value: int, by: str, size: int) -> None:
    if value % size:
        raise WlbError(f"{flag} {value} is not a multiple of {by} {size}: change one")
