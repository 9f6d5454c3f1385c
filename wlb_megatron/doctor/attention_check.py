"""A plan and its attention on this machine's GPUs: forward and gradients against one document at a time.

`run(size)` starts `size` context-parallel ranks as processes that exchange keys as training does, over NCCL, and gives
the largest error. A few seconds, most of them torch's import. plugin/megatron_trial.py checks what runs on CPUs.
"""

from __future__ import annotations

import os
import sys

from wlb_megatron.child import run_ranks
from wlb_megatron.errors import WlbError

LENGTHS = [9, 1, 190, 24, 3, 77, 16, 64]
"""Documents (tokens) of the micro-batch: short ones, one of one token, and one that is cut over all ranks."""
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.125
SECONDS = 120
TOLERATED = 3e-2
"""Largest error relative to the largest entry, in bf16: see attention/kernels/before_training.py."""
DEVICE = "cuda"


def run(size: int) -> float:
    """Largest relative error of outputs and gradients over the ranks. WlbError if a rank fails or errs too much."""
    command = [sys.executable, "-m", "wlb_megatron.doctor.attention_check", str(size)]
    try:
        outputs = run_ranks(command, size, os.environ, SECONDS)
    except TimeoutError:
        raise WlbError(
            f"the self-test's ranks did not finish within {SECONDS} s: processes on this machine cannot reach each "
            "other (NCCL_DEBUG=INFO says more)"
        ) from None
    except WlbError as failure:
        raise WlbError(f"the self-test of attention failed: {failure}") from None
    errors = [float(out.split()[-1]) for out in outputs]
    for error in errors:
        if not error <= TOLERATED:  # nor is NaN
            raise WlbError(f"the self-test's attention is off by {error:.1e}, tolerated {TOLERATED:.0e}")
    return max(errors)


def rank_error(size: int, meeting: str, rank: int) -> float:
    """One rank's largest relative error, over hybrid and per-document sharding."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from wlb_megatron.attention.device_layout import device_layout
    from wlb_megatron.attention.kernels import kernel_choice
    from wlb_megatron.attention.kernels.before_training import worst_error
    from wlb_megatron.attention.sharded_attention import sharded_attention
    from wlb_megatron.sharding.attention_calls import attention_layout
    from wlb_megatron.sharding.cut import shard
    from wlb_megatron.sharding.slots import padded

    # The kernels that a job would run.
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    capability = torch.cuda.get_device_capability()
    name, _ = kernel_choice.chosen("auto", kernel_choice.Layer(DIM, DIM, True, capability=capability))
    if name == "cudnn":
        from wlb_megatron.attention.kernels.te_backend import refuse_unfit

        refuse_unfit(DIM, capability)
    kernels, dtype = kernel_choice.kernels(name), torch.bfloat16
    dist.init_process_group("nccl", init_method=f"file://{meeting}", world_size=size, rank=rank)
    # The right outputs and gradients, one document at a time in fp64.
    lengths = padded(LENGTHS, size).tolist()
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes)
    exact = _one_document_at_a_time(lengths, q, k, v, dout)
    # cuDNN's have several forms of call; FlashAttention-4's take seconds to compile for each, and one version serves.
    errors = [worst_error(kernels, dtype, DEVICE, DIM)] if name == "cudnn" else []
    # The same by shards of all ranks; this one compares the rows that it holds.
    for sharding in ("hybrid", "per-document"):
        plan = shard(np.array(lengths, dtype=np.int64), size, sharding)
        rows = plan.packed_index(rank)
        mine = [x[rows].to(DEVICE, dtype).requires_grad_() for x in (q, k, v)]
        layout = device_layout(attention_layout(plan, rank), DEVICE)
        query, key, value = mine
        out = sharded_attention(query, key, value, layout, None, kernels, SCALE)
        results = (out, *torch.autograd.grad(out, mine, dout[rows].to(DEVICE, dtype)))
        for result, expected in zip(results, exact, strict=True):
            error = (result.detach().cpu().double() - expected[rows]).abs().max() / expected.abs().max()
            errors.append(float(error))
    dist.destroy_process_group()
    return float(torch.tensor(errors).max())  # NaN if one is, unlike Python's max


def _one_document_at_a_time(lengths, q, k, v, dout):  # type: ignore[no-untyped-def]
    """fp64 output, dq, dk, dv by torch's own attention and autograd."""
    import torch

    x = [t.clone().requires_grad_() for t in (q, k, v)]
    outs = []
    for parts in zip(*(t.split(lengths) for t in x), strict=True):
        query, key, value = (part.transpose(0, 1) for part in parts)
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        outs.append(attend(query, key, value, is_causal=True, scale=SCALE).transpose(0, 1))
    out = torch.cat(outs)
    return (out.detach(), *torch.autograd.grad(out, x, dout))


if __name__ == "__main__":
    size, rank, meeting = sys.argv[1:]
    print(rank_error(int(size), meeting, int(rank)))
