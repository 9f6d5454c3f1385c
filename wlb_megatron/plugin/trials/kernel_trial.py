"""A Transformer Engine that was not tried must compute attention right before a job trains with it."""

from __future__ import annotations

import torch

from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.flags.versions import TRIED_TRANSFORMER_ENGINE, untried_transformer_engine
from wlb_megatron.refusals import Refused


def try_transformer_engine(job: TrainingJob) -> None:
    """Tell of a Transformer Engine newer than those tried, and refuse it unless small calls of each kind come out
    right on this rank's GPU: the plugin calls entry points below its modules, which may change without a word."""
    version = untried_transformer_engine(job.model.implementation)
    if version is None or not job.device.on_gpu or job.given.kernels == "fa4":
        return
    cure = f"install a tried one (pip install 'transformer-engine[pytorch]{TRIED_TRANSFORMER_ENGINE}')"
    try:
        from wlb_megatron.attention.kernels.kernel_check import TOLERATED, worst_error
        from wlb_megatron.attention.kernels.te_backend import TransformerEngineKernels

        with torch.cuda.device(job.device.index):
            worst = worst_error(TransformerEngineKernels(), torch.bfloat16, "cuda")
    except Exception as error:
        raise Refused(
            f"wlb_megatron was not tried with Transformer Engine {version}, and its attention cannot be called "
            f"({error!r}): {cure}"
        ) from error
    if not worst <= TOLERATED:
        raise Refused(
            f"wlb_megatron was not tried with Transformer Engine {version}, and its attention is off by {worst:.1e} of "
            f"the largest value, {TOLERATED:.0e} is tolerated: {cure}"
        )
    if job.device.rank == 0:
        print(
            f"WARNING: wlb_megatron was not tried with Transformer Engine {version}; small calls of its attention come "
            f"out right (within {worst:.0e} of the largest value)",
            flush=True,
        )
