"""--wlb-profile: the profile that a job plans and predicts by, if it is of this model and layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from wlb_megatron.attention.kernels.kernel_choice import NAMES
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags.model_shape import attention_shape
from wlb_megatron.plugin.model.kernels import kernels_of
from wlb_megatron.workload.profile import Profile, read_profile


def profile_of(args: Any) -> Profile | None:
    """The job's profile, or None. WlbError where it is not of the model that is trained, or cannot be read."""
    if getattr(args, "wlb_profile", None) is None:
        return None
    if args.num_experts:
        raise WlbError("--wlb-profile does not know experts: leave it out for a mixture of experts")
    heads, groups, channels = attention_shape(args)
    profile = _read(args.wlb_profile)
    profile.refuse_other(
        {
            "hidden": args.hidden_size,
            "ffn": args.ffn_hidden_size,
            "heads": heads,
            "kv_heads": groups,
            "head_dim": channels,
            "gated": args.swiglu,
            "tp": args.tensor_model_parallel_size,
        }
    )
    return profile


def told(profile: Profile, args: Any) -> str:
    """What the job's log says of its profile: what it is of, and what of this job is unlike it."""
    line = f"planning and predicting with {profile.told()}"
    if args.distributed_backend == "nccl":
        here = torch.cuda.get_device_name(args.local_rank)
        if here != profile.device:
            line += f"; this GPU is another ({here}): its times are taken to be in proportion"
    kernels, _ = kernels_of(args)
    if kernels in ("cudnn", "fa4") and profile.costs.table.backend != kernels:
        theirs = NAMES[profile.costs.table.backend]
        line += f"; its attention is by {theirs}'s kernels, this job's by {NAMES[kernels]}'s"
    vocabulary = args.padded_vocab_size
    if vocabulary and vocabulary != profile.model.vocab:
        line += f"; its vocabulary is {profile.model.vocab:,}, not {vocabulary:,}: output and loss are predicted wrong"
    return line


@lru_cache(maxsize=1)
def _read(path: str) -> Profile:
    return read_profile(path)
