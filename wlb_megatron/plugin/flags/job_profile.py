"""--wlb-profile: the profile that a job plans and predicts by, if it is of this model and layout."""

from __future__ import annotations

from wlb_megatron.plugin.flags.trained_model import TrainedModel
from wlb_megatron.workload.profile import Profile, read_profile


def profile_of(path: str | None, model: TrainedModel, tensor: int) -> Profile | None:
    """The job's profile, or None without a path. WlbError where it is of another model, or cannot be read.

    tensor: tensor-parallel size.
    """
    if path is None:
        return None
    profile = read_profile(path)
    profile.refuse_other(
        {
            "hidden": model.hidden,
            "ffn": model.ffn,
            "experts": model.experts and model.experts.memory,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "gated": model.gated,
            "tp": tensor,
        }
    )
    return profile
