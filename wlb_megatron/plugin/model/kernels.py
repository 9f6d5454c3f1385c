"""--wlb-kernels: whose kernels the model's attention runs, as its flags say it before the model is built."""

from __future__ import annotations

import torch

from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen
from wlb_megatron.plugin.flags.training_job import TrainingJob


def kernels_of(job: TrainingJob) -> tuple[str, str]:
    """ "fa4", "cudnn" or "torch", and why not FlashAttention-4, where that is to be printed.

    Of layers of another shape (heterogeneous models) each decides for itself. WlbError where --wlb-kernels fa4 cannot
    be.
    """
    model = job.model
    if model.implementation != "transformer_engine":
        return "torch", ""
    layer = Layer(
        dim=model.head_dim,
        v_dim=model.value_dim,
        grouped=model.kv_heads != model.heads,
        dtype=model.dtype,
        capability=torch.cuda.get_device_capability(job.device.index) if job.device.on_gpu else None,
    )
    return chosen(job.given.kernels, layer)
