"""--wlb-kernels: whose kernels the model's attention runs, as its flags say it before the model is built."""

from __future__ import annotations

from typing import Any

import torch

from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen
from wlb_megatron.plugin.flags.model_shape import attention_shape


def kernels_of(args: Any) -> tuple[str, str]:
    """ "fa4", "cudnn" or "torch", and why not FlashAttention-4, where that is to be told.

    args: Megatron's validated arguments. Of layers of another shape (heterogeneous models) each decides for itself.
    WlbError where --wlb-kernels fa4 cannot be.
    """
    if args.transformer_impl != "transformer_engine":
        return "torch", ""
    heads, groups, dim = attention_shape(args)
    latent = getattr(args, "multi_latent_attention", False)
    on_gpu = args.distributed_backend == "nccl"
    layer = Layer(
        dim=dim,
        v_dim=args.v_head_dim if latent else dim,
        grouped=groups != heads,
        dtype=str(args.params_dtype).removeprefix("torch."),
        capability=torch.cuda.get_device_capability(args.local_rank) if on_gpu else None,
    )
    return chosen(args.wlb_kernels, layer)
