"""Answer torch.cuda calls as a machine would whose one GPU is its CPU.

Megatron's training loop asks for CUDA devices, streams, events and memory figures; here the device is the CPU,
streams and events do nothing, and gloo carries the collectives. Never used where there is a GPU.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import glob
import os
import sys
import types
from typing import Any

import torch
import torch._dynamo  # it lists torch.cuda's functions when first imported, so before they are replaced
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

if glob.glob("/dev/nvidia[0-9]*") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.exit(
        "wlb_megatron/cpu is for machines without a GPU: take it off PYTHONPATH, or set CUDA_VISIBLE_DEVICES=''"
    )

CPU = torch.device("cpu")


def _means_cuda(device: Any) -> bool:
    """Whether a device argument names a GPU: an index, "cuda..", or a cuda device. (bool is not an index.)"""
    if type(device) is int:
        return True
    return str(getattr(device, "type", device)).startswith("cuda")  # a tensor's type is a method


class CudaMeansCpu(TorchFunctionMode):
    """Torch functions with their CUDA devices replaced by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _means_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = args[:1] + tuple(CPU if _means_cuda(argument) else argument for argument in args[1:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron compares a tensor's type with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class NullStream(contextlib.AbstractContextManager):
    """A stream or event on which everything has already happened."""

    cuda_stream = stream_id = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"elapsed_time": 0.0, "query": True}
        return lambda *args, **kwargs: answers.get(name, self)


def _answer(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    bindings: Any = torch._C
    properties = types.SimpleNamespace(
        major=8, minor=0, name="CPU", multi_processor_count=1, total_memory=1 << 34
    )
    nothing = (
        "set_device synchronize empty_cache set_stream ipc_collect reset_peak_memory_stats "
        "reset_max_memory_allocated init _lazy_init manual_seed_all"
    )
    zero = (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used "
        "temperature power_draw utilization clock_rate current_device"
    )
    for name in nothing.split():
        setattr(cuda, name, _answer(None))
    for name in zero.split():
        setattr(cuda, name, _answer(0))
    cuda.is_available = _answer(True)
    cuda.device_count = _answer(1)
    cuda.get_device_capability = _answer((8, 0))
    cuda.get_device_name = _answer("CPU")
    cuda.get_device_properties = _answer(properties)
    cuda.mem_get_info = _answer((1 << 33, 1 << 34))
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    cuda.Stream = cuda.Event = cuda.ExternalStream = NullStream
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = NullStream
    cuda.is_current_stream_capturing = _answer(False)
    cuda.manual_seed = torch.manual_seed
    cuda.initial_seed = torch.initial_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = (torch.default_generator,)
    cuda.nvtx = types.SimpleNamespace(
        range_push=_answer(None),
        range_pop=_answer(None),
        mark=_answer(None),
        range=lambda *args, **kwargs: contextlib.nullcontext(),
    )
    for name in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    bindings._cuda_setRNGState = torch.set_rng_state  # what Megatron's random module asks first
    # Else the mode above is set aside while a backward runs, and what a recomputed forward makes is asked of a GPU.
    autograd: Any = torch.autograd
    autograd.has_torch_function = _answer(False)
    torch.accelerator.is_available = _answer(False)
    torch.accelerator.current_accelerator = _answer(None)


def _replace_distributed() -> None:
    """Leave out the arguments that gloo does not take."""
    replaced: Any = dist
    barrier, init, all_to_all = replaced.barrier, replaced.init_process_group, replaced.all_to_all_single

    def plain_init(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        return init("gloo", *args, **kwargs)

    def plain_all_to_all(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        # MoE hands split sizes over as tensors when they are not on a GPU.
        splits = [
            None if sizes is None else [int(s) for s in sizes]
            for sizes in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, input, *splits, **kwargs)

    meshed = replaced.DeviceMesh.from_group

    def mesh_of_cpus(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return meshed(group, "cpu", *args, **kwargs)

    replaced.DeviceMesh.from_group = staticmethod(mesh_of_cpus)
    replaced.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    replaced.init_process_group = plain_init
    replaced.all_to_all_single = plain_all_to_all
    # Else gloo's threads may abort the exit.
    atexit.register(lambda: dist.is_initialized() and replaced.destroy_process_group())


_replace_cuda()
_replace_distributed()
CudaMeansCpu().__enter__()
