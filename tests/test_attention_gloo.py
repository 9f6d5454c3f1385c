"""The exchange across real processes: gloo, fp32 and fp64, two and four ranks."""

import os
import socket
from dataclasses import replace

import torch
import torch.distributed as dist
from attention_oracle import SCALE, one_document_at_a_time, padded, random_tensors
from forked_ranks import spawn

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.attention.kernels.torch_backend import TorchKernels
from wlb_megatron.attention.sharded_attention import sharded_attention
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard

LENGTHS = [1, 37, 2, 15, 80, 3, 3, 9]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def compare(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    compare_in(pairs[rank // 2])
    compare_in(dist.group.WORLD)
    dist.destroy_process_group()


def compare_in(group):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    lengths = padded(LENGTHS, world)
    for dtype, tolerance in TOLERANCE.items():
        x = random_tensors(int(lengths.sum()), dtype=dtype)
        expected = one_document_at_a_time(lengths, random_tensors(int(lengths.sum())))
        for kind in SHARDINGS:
            plan = replace(shard(lengths, world, kind), one_call=dtype is torch.float32)
            index = torch.from_numpy(plan.packed_index(rank))
            for keep_keys in (True, False):
                layout = device_layout(attention_layout(plan, rank), "cpu")
                q, k, v = (t[index].requires_grad_() for t in (x.q, x.k, x.v))
                out = sharded_attention(q, k, v, layout, group, TorchKernels(), SCALE, keep_keys)
                got = out, *torch.autograd.grad(out, (q, k, v), x.dout[index])
                for a, b in zip(got, expected, strict=True):
                    error = (a.double() - b[index]).norm() / b[index].norm()
                    assert error < tolerance, (dtype, kind, keep_keys, float(error))


def test_two_and_four_real_processes_get_what_one_document_at_a_time_gives():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(compare, (port,), 4)
