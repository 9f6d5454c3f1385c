"""How long a layer without attention, its matrix products, its attention and the loss take at the sizes people train.

python -m scripts.bench.simulator.layer_rates --out DIR [--seconds 90]

On one GPU, each tensor-parallel rank's shape by itself, through the profiler's own layer (Megatron's, bf16) and clock.
DIR/layer_rates.jsonl gets a line for each point as it is measured: nanoseconds of forward and backward. The built-in
rates (wlb_megatron/workload/assumptions.py) are fitted to these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scripts.bench.start import new_parser
from wlb_megatron.profiler.attention import AttentionBench
from wlb_megatron.profiler.clock import Clock
from wlb_megatron.profiler.layer import Ends, Part, keep_gradients, layer_step, loss_step, optimizer_step
from wlb_megatron.profiler.points import Point
from wlb_megatron.profiler.run import _kernels
from wlb_megatron.workload.profile import ProfiledModel

EIGHT = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256}
SEVENTY = {"hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128, "vocab": 128256}
SMALL = {"hidden": 2048, "ffn": 5632, "heads": 16, "kv_heads": 4, "head_dim": 128, "vocab": 128256}
TINY = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 128}
MODELS: dict[str, dict[str, Any]] = {"8B": EIGHT, "70B": SEVENTY, "2048": SMALL, "tiny": TINY}
SHAPES = (("8B", 1), ("70B", 4), ("8B", 4), ("70B", 8), ("8B", 2), ("70B", 2), ("2048", 1), ("8B", 8))
TOKENS = (8192, 32768, 2048, 16384, 512)
DIAGONALS = (1024, 4096, 16384, 65536)
Measured = tuple[dict[str, Any], Part]


def main() -> None:
    parser = new_parser(__doc__, "rates")
    parser.add_argument("--seconds", type=float, default=90, help="begin no point after these")
    parser.add_argument("--shapes", help="MODEL:TP, comma list (default: all)")
    parser.add_argument("--backend", default="te", choices=("te", "fa4", "torch"), help="attention's kernels")
    parser.add_argument("--least", action="store_true", help="two token counts, to try it on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = options.backend != "torch"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    clock, ends_at = Clock(device, 0.08), time.perf_counter() + options.seconds
    chosen: tuple[tuple[str, int], ...] = SHAPES
    if options.shapes:
        chosen = tuple((name, int(tp)) for name, tp in (s.split(":") for s in options.shapes.split(",")))
    path = options.out / "layer_rates.jsonl"
    versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if on_gpu else "CPU"}
    _write(path, versions, "w")
    for name, tp in chosen:
        model = ProfiledModel(**MODELS[name], tp=tp)
        try:
            for sizes, part in _points(model, device, options.backend, options.least):
                if time.perf_counter() > ends_at:
                    return
                _measure(path, clock, {"model": name, "tp": tp, **sizes}, part)
        except Exception as error:  # out of memory, or a layer that cannot be built: the next shape goes on
            _write(path, {"model": name, "tp": tp, "error": f"{type(error).__name__}: {error}"[:300]})
        if on_gpu:
            torch.cuda.empty_cache()


def _points(model: ProfiledModel, device: torch.device, backend: str, least: bool) -> Iterator[Measured]:
    """A shape's points, the layer's own first."""
    like = torch.empty(0, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    layer, cross_entropy = _layer(model, device, like.dtype)
    for tokens in (64, 128) if least else TOKENS:
        yield {"part": "layer", "tokens": tokens}, layer_step(layer, model, tokens, like)
    for name, (rows, columns) in products(model).items():
        for tokens in (64,) if least else (8192, 32768)[: 1 + (model.tp == 1)]:
            for way in ("forward and data", "weights"):
                sizes = {"part": "product", "name": name, "way": way, "tokens": tokens}
                yield sizes | {"shape": [rows, columns]}, _product(tokens, rows, columns, way, like)
    attention = AttentionBench(model, _kernels(backend), device, like.dtype)
    for length in (64,) if least else DIAGONALS:
        point = Point("diagonal", {"diagonals": [[length, max(1, 16384 // length)]], "rectangles": []})
        yield {"part": "attention", **point.sizes}, attention.step(point)
    yield {"part": "optimizer", "parameters": model.layer_parameters}, optimizer_step(layer)
    del layer
    ends: Any = keep_gradients(Ends(model).to(device, like.dtype))
    for tokens in (64,) if least else (2048, 8192):
        yield {"part": "loss", "tokens": tokens}, loss_step(ends, model, tokens, like, cross_entropy)


def products(model: ProfiledModel) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of a layer's weight matrices on one tensor-parallel rank."""
    width, inner = model.rank_heads * model.head_dim, model.ffn // model.tp
    return {
        "qkv": (width + 2 * model.rank_kv_heads * model.head_dim, model.hidden),
        "projection": (model.hidden, width),
        "up": (inner * (2 if model.gated else 1), model.hidden),
        "down": (model.hidden, inner),
    }


def _product(tokens: int, rows: int, columns: int, way: str, like: torch.Tensor) -> Part:
    """Forward: y = x w', or nothing. Backward: the gradient of x, or of w."""
    x = torch.randn(tokens, columns, device=like.device, dtype=like.dtype)
    w = torch.randn(rows, columns, device=like.device, dtype=like.dtype) * 0.02
    gradient = torch.randn(tokens, rows, device=like.device, dtype=like.dtype)
    if way == "weights":
        return (lambda: None), lambda _: gradient.t() @ x
    return (lambda: x @ w.t()), lambda _: gradient @ w


def _layer(
    model: ProfiledModel, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor] | None]:
    if device.type == "cuda":
        from wlb_megatron.profiler.profiled_layer import megatron_layer

        return megatron_layer(model)
    from wlb_megatron.profiler.layer import torch_layer

    return torch_layer(model, device, dtype), None


def _measure(path: Path, clock: Clock, sizes: dict[str, Any], part: Part) -> None:
    try:
        timing = clock.measure(*part)
    except RuntimeError as error:
        _write(path, {**sizes, "error": str(error).splitlines()[0][:200]})
        if clock.on_gpu:
            torch.cuda.empty_cache()
        return
    _write(path, {**sizes, **asdict(timing)})


def _write(path: Path, line: dict[str, Any], mode: str = "a") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
