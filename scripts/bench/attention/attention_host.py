"""The host's share of packed 8B layers: kernel launches and time to enqueue, stock Megatron's beside the plugin's.

One GPU. Layers are few and tokens are few, so that the host is what takes time. Context parallelism has a process
group that sends nothing: its launches by NCCL and their time are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record

from scripts.bench.attention.attention_bench import machine
from scripts.bench.attention.attention_steps import Mixes, planned
from wlb_megatron.attention.core_attention import packed_seq_params
from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.model.spec import prepare_model, with_wlb_attention
from wlb_megatron.profiler.layer import keep_gradients
from wlb_megatron.report.table import write_csv

HEADS, KV_HEADS, DIM, HIDDEN, FFN = 32, 8, 128, 4096, 14336
LAYERS, REPEATS = 4, 30
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemset", "cuMemset", "cudaMemcpy", "cuMemcpy", "cudaGraphLaunch")
PARTS = {
    "self_attention.linear_qkv": "norm and qkv",
    "self_attention.core_attention": "attention",
    "self_attention.linear_proj": "projection",
    "mlp.linear_fc1": "norm and fc1",
    "mlp.linear_fc2": "fc2",
}
"""Modules of a layer whose forwards are regions. Rotation is another, and the rest is "other"."""


@dataclass(frozen=True)
class Layers:
    """Layers with what their forward takes beside hidden states, as one micro-batch gives it to all of them."""

    model: nn.Module
    inputs: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:  # type: ignore[union-attr]
            out = layer(hidden_states=x, attention_mask=None, **self.inputs)
            x = out[0] if isinstance(out, tuple) else out
        return x


def host(mixes: Mixes, args: argparse.Namespace) -> None:
    """Each mix's documents, whose sum should be a few thousand tokens at most."""
    _start()
    rows: list[dict[str, Any]] = []
    for mix, documents in mixes.items():
        for name, layers in _cases(np.array(documents), args.kernels):
            rows += [{"mix": mix, "case": name} | row | machine() for row in _measured(name, layers)]
            write_csv(args.out / f"host_{args.kernels}.csv", rows)
            del layers


def _start() -> None:
    """A group of two ranks, of which this process is one, that pretends to communicate."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)


def _cases(documents: np.ndarray, kernels: str) -> Iterator[tuple[str, Layers]]:
    """Stock Megatron's layers, the plugin's on whole documents, and on documents cut over two ranks."""
    bounds = torch.from_numpy(np.concatenate(([0], np.cumsum(documents)))).to("cuda", torch.int32)
    longest = int(documents.max())
    if kernels == "cudnn":
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        model = _model(plugin=False)
        angles = model.rotary_pos_emb(longest, packed_seq=True)  # type: ignore[operator]
        yield "stock", Layers(model, {"packed_seq_params": packed, "rotary_pos_emb": angles})
        del model
    model = prepare_model([_model(plugin=True)], replace(WlbConfig(), kernels=kernels))[0]
    for name, cp, kind in (
        ("one call", 1, "per-document"),
        ("one call, exchange", 2, "per-document, one call"),
        ("two calls, exchange", 2, "per-document"),
    ):
        params = packed_seq_params(planned(documents * cp, cp, kind), 0)
        rotary: Any = model.rotary_pos_emb
        angles = rotary(rotary.get_rotary_seq_len(packed_seq_params=params))
        yield name, Layers(model, {"packed_seq_params": params, "rotary_pos_emb": angles})


def _model(*, plugin: bool) -> nn.Module:
    """Layers of the 8B shape and rotary positions, as a GPTModel has them; gradients are added to fp32 ones."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection.use_mpu_process_groups()
    if not plugin:
        groups.cp = dist.new_group([0])
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=DIM,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    if plugin:
        spec = with_wlb_attention(spec)
    model: Any = nn.Module()
    model.config = config
    model.layers = nn.ModuleList(
        build_module(spec, config=config, layer_number=number + 1, pg_collection=groups)
        for number in range(LAYERS)
    )
    model.rotary_pos_emb = RotaryEmbedding(DIM, rotary_percent=1.0, rotary_base=500000, cp_group=groups.cp)
    return keep_gradients(model.cuda())


def _measured(name: str, layers: Layers) -> list[dict[str, Any]]:
    """Rows of a case, figures of one layer: launches and us by region, medians of enqueueing without a profiler."""
    params = layers.inputs["packed_seq_params"]
    tokens = params.layout.tokens if hasattr(params, "layout") else int(params.cu_seqlens_q[-1])
    x = torch.randn(tokens, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    rows: list[dict[str, Any]] = []
    print(f"\n{name}, {tokens} tokens: us to enqueue a layer; launches and us under the profiler by region")
    attention = _attention(layers, tokens)
    for what, forward, leaf, pull in (("layer", layers.forward, x, grad), ("attention", *attention)):
        ahead, back = _enqueued(forward, leaf, pull)
        rows += [
            {"what": what, "direction": "forward", "region": "all", "us": ahead},
            {"what": what, "direction": "backward", "region": "all", "us": back},
        ]
        print(f"  {what:10} forward {ahead:6.0f}  backward {back:6.0f}  both {ahead + back:6.0f}")
    for direction, regions in _profiled(layers, x, grad).items():
        launches = sum(count for count, _ in regions.values())
        print(f"  {direction}: {launches:.1f} launches a layer")
        for region, (count, us) in sorted(regions.items(), key=lambda item: -item[1][1]):
            print(f"    {region[:60]:60} {count:5.1f} {us:7.0f}")
            rows.append(
                {"what": "layer", "direction": direction, "region": region, "launches": count, "us": us}
            )
    _print_python(*attention)
    return rows


def _attention(layers: Layers, tokens: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """All layers' attention without the rest, one after the other, its queries and the gradient of its output.

    Keys and values are as Megatron gives them: values are views of all projections.
    """
    params = layers.inputs["packed_seq_params"]
    packed = params.qkv_format == "thd"
    mixed = torch.randn(tokens, 1, KV_HEADS, (HEADS // KV_HEADS + 2) * DIM, device="cuda").bfloat16()
    k, v = mixed[..., -2 * DIM : -DIM].contiguous(), mixed[..., -DIM:]
    q = torch.randn(tokens, 1, HEADS, DIM, device="cuda").bfloat16().requires_grad_()
    k.requires_grad_()

    def forward(query: Tensor) -> Tensor:
        for layer in layers.model.layers:  # type: ignore[union-attr]
            given = [x.squeeze(1) if packed else x for x in (query, k, v)]
            core: Any = layer.self_attention.core_attention
            out = core(
                *given, None, attn_mask_type=layer.self_attention.attn_mask_type, packed_seq_params=params
            )
            query = out.view(tokens, 1, HEADS, DIM)
        return query

    return forward, q, torch.randn_like(q)


def _enqueued(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Medians of the us that the host takes for a layer, forward and backward."""
    times = []
    gc.collect()
    gc.disable()
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        out = forward(x)
        marks.append(time.perf_counter())
        out.backward(grad)
        marks.append(time.perf_counter())
        times.append(np.diff(marks) * 1e6 / LAYERS)
        x.grad = None
    torch.cuda.synchronize()
    gc.enable()
    ahead, back = zip(*times, strict=True)
    return median(ahead), median(back)


def _profiled(layers: Layers, x: Tensor, grad: Tensor) -> dict[str, dict[str, tuple[float, float]]]:
    """By direction and region: launches and us of a layer. Backward's regions are autograd's nodes."""
    regions = {}
    with _marked(layers):
        for direction in ("forward", "backward"):
            torch.cuda.synchronize()
            kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            if direction == "forward":
                with record(activities=kinds) as trace:
                    out = layers.forward(x)
                    torch.cuda.synchronize()
            else:
                with record(activities=kinds) as trace:
                    out.backward(grad)
                    torch.cuda.synchronize()
            regions[direction] = _by_region(trace)
            kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            named = Counter(e.name[:100] for e in kernels if not e.name.startswith("region: "))
            print(
                f"  {direction}: {named.total() / LAYERS:.1f} kernels, copies and fills a layer on the device"
            )
            for kernel, count in named.most_common():
                print(f"    {count / LAYERS:5.2f} {kernel}")
    return regions


def _by_region(trace: Any) -> dict[str, tuple[float, float]]:
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        if name := _region(event.name):
            times[name] += event.cpu_time_total
        if event.name.startswith(LAUNCHES):
            around = event
            while around is not None and not _region(around.name):
                around = around.cpu_parent
            launches[_region(around.name) if around else "other"] += 1
    return {name: (launches[name] / LAYERS, times[name] / LAYERS) for name in times | launches}


def _region(name: str) -> str:
    """The region that a profiler's event opens, "" for none."""
    for prefix in ("region: ", "autograd::engine::evaluate_function: "):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return ""


@contextmanager
def _marked(layers: Layers) -> Iterator[None]:
    """The modules of PARTS and the rotation as regions of the profiler."""
    from megatron.core.transformer import attention

    def marked(called: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"region: {name}"):
                return called(*args, **kwargs)

        return run

    modules = [
        (layer.get_submodule(path), name)
        for layer in layers.model.layers  # type: ignore[union-attr]
        for path, name in PARTS.items()
    ]
    rotate = attention.apply_rotary_pos_emb
    attention.apply_rotary_pos_emb = marked(rotate, "rotation")
    for module, name in modules:
        module.forward = marked(module.forward, name)
    try:
        yield
    finally:
        attention.apply_rotary_pos_emb = rotate
        for module, _ in modules:
            del module.forward


def _print_python(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    """The functions of Python in which attention spends most time. cProfile makes each call longer."""
    ahead, back = cProfile.Profile(), cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, which is profiled
        for _ in range(5):
            out = ahead.runcall(forward, x)
            back.runcall(out.backward, grad)
            torch.cuda.synchronize()
    for direction, counted in (("forward", ahead), ("backward", back)):
        print(f"  Python of attention {direction}, {5 * LAYERS} layers")
        pstats.Stats(counted).sort_stats("tottime").print_stats(14)
