"""The model and layout of Megatron's arguments, as far as plans depend on them."""

from __future__ import annotations

from typing import Any

from wlb_megatron.sharding.alignment import multiple


def attention_shape(args: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and channels of a head of the whole model."""
    heads = args.num_attention_heads
    if getattr(args, "multi_latent_attention", False):
        return heads, heads, args.qk_head_dim + args.qk_pos_emb_head_dim
    groups = args.num_query_groups if args.group_query_attention else heads
    return heads, groups, args.kv_channels or args.hidden_size // heads


def token_alignment(args: Any) -> int:
    """A micro-batch's tokens are a multiple of this: equal shares for CP ranks, and for TP under sequence parallel.

    With FP8 each share is a multiple of the GEMMs' rows.
    """
    return multiple(args.context_parallel_size, args.tensor_model_parallel_size, _rows(args))


def _rows(args: Any) -> int:
    """Of which a rank's tokens are a multiple: 16 with FP8, 32 with MXFP8 (Megatron's get_fp8_align_size)."""
    return 1 if not getattr(args, "fp8", None) else 32 if args.fp8_recipe == "mxfp8" else 16


def window_misfit(args: Any) -> str | None:
    """Why a window cannot be padded as micro-batches are; None where it can."""
    wanted, window = token_alignment(args), args.seq_length
    if window % wanted == 0:
        return None
    rows = f" x {_rows(args)} rows, which FP8's matrix products need on each rank" if _rows(args) > 1 else ""
    return (
        f"{window} tokens are no multiple of {wanted}, to which micro-batches are padded (context-parallel size "
        f"{args.context_parallel_size} x tensor-parallel size {args.tensor_model_parallel_size}{rows}); set it to "
        f"{-(-window // wanted) * wanted}"
    )
