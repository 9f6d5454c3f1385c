"""Refuses sizes that Megatron cannot divide over ranks, when a command describes a job."""

from __future__ import annotations

import argparse

from wlb_megatron.errors import WlbError
from wlb_megatron.workload.model import Model


def check_divisible(shape: Model, args: argparse.Namespace) -> None:
    """Raises WlbError with the flag and a value that works. shape: dense. args: parallel sizes and experts, as flags
    give them.
    """
    _check_layers(int(shape.layers), args.pp, args.vpp)
    hidden = shape.hidden if shape.head_dim == shape.hidden // shape.heads else None
    check_heads(shape.heads, shape.kv_heads, hidden=hidden, tp=args.tp)
    if shape.kv_heads % args.tp and args.tp % shape.kv_heads:
        raise WlbError(
            f"--num-query-groups {shape.kv_heads} is neither a multiple nor a divisor of --tp {args.tp}: change one"
        )
    if args.num_experts is None:
        _check_multiple("--ffn-hidden-size", shape.ffn, "--tp", args.tp)
    else:
        _check_experts(shape, args)


def _check_layers(layers: int, pp: int, vpp: int) -> None:
    """Raises WlbError if the layers do not divide over the stages, neither by themselves nor with 2 more.

    Megatron can count the embedding and the loss as layers, by --account-for-embedding-in-pipeline-split and
    --account-for-loss-in-pipeline-split.
    """
    check_vpp(pp, vpp)
    parts = pp * vpp
    if layers % parts and (layers + 2) % parts:
        flags = f"--pp {pp}" + (f" x --vpp {vpp}" if vpp > 1 else "")
        raise WlbError(
            f"--num-layers {layers} cannot be divided over {flags}: choose a divisor of {layers}, or of {layers + 2} "
            "(with the embedding and the loss counted as layers)"
        )


def check_vpp(pp: int, vpp: int) -> None:
    """Raises WlbError for model chunks without a pipeline."""
    if vpp > 1 and pp == 1:
        raise WlbError(f"--vpp {vpp} changes nothing without --pp above 1: add that, or leave it out")


def _check_experts(shape: Model, args: argparse.Namespace) -> None:
    expert_ranks, tensor_ranks = (
        args.expert_model_parallel_size or 1,
        args.expert_tensor_parallel_size or args.tp,
    )
    _check_multiple("--num-experts", args.num_experts, "--expert-model-parallel-size", expert_ranks)
    _check_multiple(
        "--moe-ffn-hidden-size", args.moe_ffn_hidden_size or shape.ffn, "expert tensor size", tensor_ranks
    )
    stage = args.tp * args.cp * args.dp
    if stage % (expert_ranks * tensor_ranks):
        raise WlbError(
            f"a stage's {stage} ranks (--tp x --cp x --dp) are not a multiple of the "
            f"{expert_ranks * tensor_ranks} that share "
            "experts: change --expert-model-parallel-size or --expert-tensor-parallel-size"
        )
    if (args.moe_router_topk or 1) > args.num_experts:
        raise WlbError(f"--moe-router-topk {args.moe_router_topk} is above --num-experts {args.num_experts}")


def _check_multiple(flag: str, value: int, by: str, size: int) -> None:
    if value % size:
        raise WlbError(f"{flag} {value} is not a multiple of {by} {size}: change one")


def check_heads(heads: int, groups: int | None, *, hidden: int | None = None, tp: int = 1) -> None:
    """Raises WlbError if attention heads do not divide as Megatron divides them.

    hidden: given if a head's channels are its share of hidden.
    """
    if (hidden or heads) % heads:
        raise WlbError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; give --kv-channels"
        )
    for size, what in ((groups or heads, "--num-query-groups"), (tp, "the tensor-parallel size")):
        if heads % size:
            raise WlbError(f"--num-attention-heads {heads} is not a multiple of {what} {size}")
