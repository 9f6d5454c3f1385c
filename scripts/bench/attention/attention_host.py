"""Host time of one layer's attention, forward and backward, and where it goes.

    torchrun --nproc-per-node 2 -m scripts.bench.attention.gpu_attention host --mixes mixes.json --out DIR
        (or one process, CP=1)
    python3 -m scripts.bench.attention.attention_host --mixes mixes.json --cp 2
        (no GPU: operations a layer, Python's own time)

With GPUs: a layer's launches are timed by the host clock, several layers one after the other, each with keys of its
own. Undisturbed first ("wall": until the GPU is done), then its parts, by clocks around them, each less what is inside
it. Windows below that of the mixes shrink every document; "hybrid, one call" is a kind, too.
Without: kernels, transfers and the package's Triton kernels are stand-ins that compute nothing, and tokens are few, so
that what is left is Python and torch's dispatch; operations that launch something on a GPU are counted by name.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wlb_megatron.attention import kv_exchange, sharded_attention
from wlb_megatron.attention.device_layout import DeviceLayout, device_layout
from wlb_megatron.attention.kernels import row_sums
from wlb_megatron.report.files import write_csv
from wlb_megatron.sharding.alignment import padding
from wlb_megatron.sharding.calls.attention_calls import attention_layout
from wlb_megatron.sharding.select import shard

LAYERS = 6
ENTRIES = {
    "cudnn": (("te_backend", "fused_attn_fwd", "forward"), ("te_backend", "fused_attn_bwd", "backward")),
    "fa4": (("fa4_backend", "_flash_attn_fwd", "forward"), ("fa4_backend", "_flash_attn_bwd", "backward")),
}
"""Of each backend, what it calls."""
DEFAULT = ("short2k", "paper-like A", "paper-like B", "paper-like C")
# What a part is for, and the functions that do it.
ROWS = ("add_rows", "join_rows", "merge_rows", "spread_four", "sum_pairs")
VIEWS = (
    "empty",
    "new_empty",
    "_unsafe",
    "view",
    "select",
    "slice",
    "as_strided",
    "squeeze",
    "unsqueeze",
    "detach",
    "alias",
    "expand",
    "permute",
    "split",
)


class Clock:
    """Time inside wrapped functions, each less that of wrapped ones inside it. The threads of a step take turns."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = []

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            took = time.perf_counter() - begin
            self.spent[part] += took - self._inner.pop()
            self.calls[part] += 1
            if self._inner:
                self._inner[-1] += took
            return result

        return timed


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of modules, for a while."""
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    try:
        for where, name, value in changes:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def host(mixes: dict[str, list[int]], args: argparse.Namespace) -> None:
    """On GPUs, a process a rank under torchrun, else one. Writes DIR/host.csv."""
    import torch.distributed as dist

    from scripts.bench.attention.attention_bench import KERNELS, SCALE, machine, padded_to, tensors
    from scripts.bench.attention.attention_steps import planned
    from wlb_megatron.attention.kernels import row_sums_triton

    cp = int(os.environ.get("WORLD_SIZE", "1"))
    if cp > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, group = (dist.get_rank(), dist.group.WORLD) if cp > 1 else (0, None)
    say = print if rank == 0 else lambda *a, **k: None
    timers = [
        *(
            (importlib.import_module(f"wlb_megatron.attention.kernels.{where}"), name, f"kernels {way}")
            for where, name, way in ENTRIES[KERNELS.name]
        ),
        (kv_exchange, "_all_to_all", "all-to-all"),
        (kv_exchange, "_wait", "wait"),
        *((row_sums_triton, name, "Triton rows") for name in ROWS),
        (sharded_attention, "spread_rows", "gathers"),
        *((sharded_attention, name, "gathers") for name in ("start_gather", "start_return", "side_by_side")),
    ]
    parts = list(dict.fromkeys(part for *_, part in timers))
    what = ("forward", "backward", "both", "wall", *parts, "rest")
    say(
        f"\nCP={cp}, host us a layer, slowest rank's: without clocks, then each part with them; launches of rank 0"
    )
    say(f"{'window':>7} {'mix':16}{'sharding':20}" + "".join(f"{word:>12}" for word in what))
    chosen = mixes if args.only else {n: mixes[n] for n in DEFAULT if n in mixes} or mixes
    rows: list[dict[str, Any]] = []
    for window, (name, documents) in product(args.windows, chosen.items()):
        lengths = padded_to([max(1, n * window // sum(documents)) for n in documents], 16)
        x = tensors(int(lengths.sum()))
        for kind in args.kinds:
            plan = planned(lengths, cp, kind)
            layout = device_layout(attention_layout(plan, rank), "cuda")
            index = torch.from_numpy(plan.packed_index(rank)).cuda()
            layers = Layers(x, index, layout, group, KERNELS, SCALE)
            forward, backward, wall = layers.per_layer()
            clock = Clock()
            with replaced(*((m, n, clock.wrap(part, getattr(m, n))) for m, n, part in timers)):
                took = sum(sum(layers.times(LAYERS)[:2]) for _ in range(5))
            spent = [clock.spent[part] / 5 / LAYERS * 1e6 for part in parts]
            remaining = took / 5 / LAYERS * 1e6 - sum(spent)
            times = torch.tensor(
                [forward, backward, forward + backward, wall, *spent, remaining], device="cuda"
            )
            if cp > 1:
                dist.all_reduce(times, dist.ReduceOp.MAX)
            launches = layers.launches() if (name, window) == (list(chosen)[-1], args.windows[-1]) else {}
            say(
                f"{window:7} {name:16}{kind:20}" + "".join(f"{us:12.0f}" for us in times.tolist()),
                *(f" {n} {call}" for call, n in launches.items()),
                flush=True,
            )
            rows.append(
                {"window": window, "mix": name, "cp": cp, "sharding": kind}
                | {f"{word.replace(' ', '_')}_us": us for word, us in zip(what, times.tolist(), strict=True)}
                | {"launches": sum(launches.values()) or ""}
                | machine()
            )
            if rank == 0:
                write_csv(args.out / "host.csv", rows)
    if cp > 1:
        dist.destroy_process_group()


class Layers:
    """Layers one after the other, the output of one being the queries of the next; keys of their own."""

    def __init__(
        self, x: Any, index: Tensor, layout: DeviceLayout, group: Any, kernels: Any, scale: float
    ) -> None:
        self.q = x.q[index].requires_grad_()
        self.keys = [[t[index].requires_grad_() for t in (x.k, x.v)] for _ in range(LAYERS)]
        self.dout = x.dout[index]
        self.rest = layout, group, kernels, scale

    def times(self, layers: int) -> tuple[float, float, float]:
        """Seconds to launch the forwards, and the backwards, and from first launch to last kernel's end."""
        _synchronize()
        gc.disable()
        begin = time.perf_counter()
        out = self.q
        for k, v in self.keys[:layers]:
            out = sharded_attention.sharded_attention(out, k, v, *self.rest)
        middle = time.perf_counter()
        torch.autograd.grad(out, [self.q, *(t for pair in self.keys[:layers] for t in pair)], self.dout)
        end = time.perf_counter()
        gc.enable()
        _synchronize()
        return middle - begin, end - middle, time.perf_counter() - begin

    def per_layer(self, repeats: int = 9) -> list[float]:
        """Microseconds of one more layer of each of times(), medians: what a step costs once falls out."""
        self.times(LAYERS)
        single, many = (np.median([self.times(n) for _ in range(repeats)], axis=0) for n in (1, LAYERS))
        return ((many - single) / (LAYERS - 1) * 1e6).tolist()

    def launches(self) -> dict[str, int]:
        """Calls of the CUDA driver and runtime that put work on the device, a layer."""
        from torch.profiler import ProfilerActivity, profile

        counts = []
        for layers in (1, 2):
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                self.times(layers)
            counts.append(Counter({e.key: e.count for e in trace.key_averages() if _launches(e.key)}))
        return dict((counts[1] - counts[0]).most_common())


def _launches(name: str) -> bool:
    return name.startswith("cu") and any(word in name for word in ("Launch", "Memset", "Memcpy"))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Counted(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class NoKernels:
    """Stands for the attention kernels: buffers of the right shape, nothing computed."""

    def takes(self, dim: int, v_dim: int) -> bool:
        return True

    def buffer_rows(self, call: Any) -> tuple[int, int]:
        return call.q_rows, call.kv_rows

    def forward(self, call: Any, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:2])

    def backward(self, call: Any, q: Tensor, kv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(kv)


def counts(mixes: dict[str, list[int]], cp_size: int, kinds: list[str]) -> None:
    """Table of operations and Python time of the layer of each mix's busiest kind of rank, without a GPU."""
    print(
        f"{'mix':16}{'sharding':14}{'rank':>5}{'kernel calls':>13}{'collectives':>12}{'row kernels':>12}"
        f"{'torch launches':>15}{'views, buffers':>15}{'Python us':>10}  launches by name"
    )
    for name, documents in mixes.items():
        short = [max(1, n // 512) for n in documents]
        short.append(padding(sum(short), 16))
        lengths = np.array([n for n in short if n], dtype=np.int64)
        for kind in kinds:
            sharding, *one_call = kind.split(", ")
            plan = replace(shard(lengths, cp_size, sharding), one_call=bool(one_call))
            rank = max(range(cp_size), key=lambda r: attention_layout(plan, r).rectangles is not None)
            layout = device_layout(attention_layout(plan, rank), "cpu")
            _count(name, kind, rank, layout)


def _count(name: str, kind: str, rank: int, layout: DeviceLayout) -> None:
    calls: Counter[str] = Counter()

    def stand_in(what: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls[what] += 1
            return result(*args, **kwargs)

        return noted

    done = SimpleNamespace(wait=lambda: None)

    def travels(sent: Tensor, _: Any, counts: Any, *rest: Any) -> tuple[Tensor, Any]:
        return sent.new_empty((sum(counts), *sent.shape[1:])), done

    def spread_four(sources: Any, index: Tensor, rows: int) -> list[Tensor]:
        return [source.new_empty((rows, *source.shape[1:])) for source in sources]

    def sums(source: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        shape = layout.tokens, *source.shape[2:]
        return source.new_empty(shape), source.new_empty(shape)

    kernels = NoKernels()
    quiet = [
        (kernels, "forward", stand_in("kernels", kernels.forward)),
        (kernels, "backward", stand_in("kernels", kernels.backward)),
        (kv_exchange, "_all_to_all", stand_in("collectives", travels)),
        (kv_exchange, "add_rows", stand_in("rows", lambda *a: None)),
        (
            kv_exchange,
            "join_rows",
            stand_in("rows", lambda source, *a: source.new_empty(a[-1], *source.shape[1:])),
        ),
        (sharded_attention, "sum_pairs", stand_in("rows", sums)),
    ]
    for where in (sharded_attention, row_sums):
        quiet += [(where, n, stand_in("rows", lambda *a: None)) for n in ("add_rows", "merge_rows")]
        quiet.append((where, "spread_four", stand_in("rows", spread_four)))
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": 4, "k": 1, "v": 1, "dout": 4}
    x = SimpleNamespace(
        **{n: torch.randn(layout.tokens, heads, 8, generator=generator) for n, heads in shapes.items()}
    )
    layers = Layers(x, torch.arange(layout.tokens), layout, None, kernels, 1.0)
    with replaced(*quiet):
        layers.times(1)
        python = sum(layers.per_layer(31)[:2])
        calls.clear()
        with Counted() as counter:
            layers.times(1)
        torch_ops = Counter({n: c for n, c in counter.names.items() if not n.startswith(VIEWS)})
    others = sum(counter.names.values()) - sum(torch_ops.values())
    print(
        f"{name:16}{kind:14}{rank:5}{calls['kernels']:13}{calls['collectives']:12}{calls['rows']:12}"
        f"{sum(torch_ops.values()):15}{others:15}{python:10.0f}  "
        + ", ".join(f"{c} {n}" for n, c in torch_ops.most_common())
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=Path, required=True)
    parser.add_argument("--only", help="comma list of mixes")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["per-document", "hybrid", "hybrid, one call"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.mixes.read_text())
    counts({n: found[n] for n in (given.only.split(",") if given.only else found)}, given.cp, given.kinds)
