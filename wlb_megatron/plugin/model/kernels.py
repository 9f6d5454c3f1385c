"""--wlb-kernels: whose kernels the model's attention runs, as its flags say it before the model is built."""

from __future__ import annotations

import torch

from wlb_megatron.attention.kernels.kernel_choice import Layer, chosen
from wlb_megatron.plugin.flags.training_job import TrainingJob


def kernels_of(job: TrainingJob) -> tuple[str, str]:
    """The name of the kernels (of registry.KERNELS, or "torch"), and a line on why not the preferred ones.

    Of layers of another shape (heterogeneous models) each decides for itself. WlbError if those
    of --wlb-kernels cannot be.
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
