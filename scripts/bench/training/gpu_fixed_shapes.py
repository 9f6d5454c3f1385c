"""What two features that need fixed shapes gain at most: CUDA graphs of parts, and tensor-parallel overlap.

python -m scripts.bench.training.gpu_fixed_shapes graphs --script ../Megatron-LM/pretrain_gpt.py --out out/fixed

The plugin takes both with packings that fill windows, and refuses them with varlen, whose micro-batches vary in length.
Here documents are as long as the window. Stock Megatron's ratios are upper bounds of what varlen could gain; the plugin
packs windows, and its losses with and without must be the same. graphs: one GPU; eager, the MLPs as CUDA graphs, whole
layers as CUDA graphs (stock alone). overlap: two GPUs, TP=2 with sequence parallelism, with --tp-comm-overlap or not.
Times are medians of Megatron's own after --warm-up. Multicast stays off
(UB_SKIPMC=1): Transformer Engine's buffers then go through CUDA's memory handles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.training.gpu_train import ROOT, STOCK, corpus, run
from wlb_megatron.report.files import write_csv

GRAPHS = ["--te-rng-tracker"]
"""Of all variants: graphs need this generator, and processes that stay must not change it."""
MLP = ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mlp"]
WINDOWS = ["--wlb-packing", "fixed-greedy"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
OVERLAP = ["--tp-comm-overlap", "--tp-comm-bootstrap-backend", "nccl"]


@dataclass(frozen=True)
class Section:
    """GPUs, flags of each variant (the first is compared with), and {window: windows a step}."""

    gpus: int
    variants: dict[str, list[str]]
    windows: dict[int, int]
    fresh: frozenset[str] = field(default_factory=frozenset)
    """Variants that get processes of their own: they leave behind what cannot be put back."""


SECTIONS = {
    "graphs": Section(
        1,
        {
            "eager": [*STOCK, *GRAPHS],
            "mlp-graph": [*STOCK, *GRAPHS, *MLP],
            "plugin": [*WINDOWS, *GRAPHS],
            "plugin-mlp-graph": [*WINDOWS, *GRAPHS, *MLP],
            "layer-graph": [*STOCK, *GRAPHS, *MLP[:2]],
        },
        {8192: 8, 2048: 16, 65536: 2},
    ),
    "overlap": Section(
        2,
        {
            "stock": [*STOCK, *TENSOR],
            "overlap": [*STOCK, *TENSOR, *OVERLAP],
            "plugin": [*WINDOWS, *TENSOR],
            "plugin-overlap": [*WINDOWS, *TENSOR, *OVERLAP],
        },
        {65536: 2, 16384: 4},
        frozenset({"overlap", "plugin-overlap"}),
    ),
}

LONGEST = {"layer-graph": 8192, "plugin": 8192, "plugin-mlp-graph": 8192}
"""Windows of some variants, at most (tokens): a layer's graph takes a mask of the window squared; others take time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=tuple(SECTIONS))
    parser.add_argument("--script", type=Path, required=True, help="Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fixed", help="folder of results")
    parser.add_argument("--windows", type=int, nargs="+", help="some of the section's (tokens)")
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument(
        "--warm-up", type=int, default=6, help="iterations left out; graphs come in the fourth"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=90.0, help="most that a run may take (seconds)")
    parser.add_argument("--extra", default="", help="further flags for every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    section = SECTIONS[options.section]
    rows: list[dict[str, Any]] = []
    failed: set[str] = set()
    for window in options.windows or section.windows:
        options.seq_length, options.global_batch_size = window, section.windows[window]
        for row in measured(section, failed, options):
            rows.append(row)
            write_csv(options.out / f"{options.section}.csv", rows)
    table(rows)


def measured(section: Section, failed: set[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each variant at one window that gave step times, as it ends; one that gave none joins `failed`."""
    window, windows = options.seq_length, options.global_batch_size
    lengths = options.out / f"lengths_{window}.npy"
    np.save(lengths, np.full(4096, window))
    prefix = corpus(options.out / f"corpus_{window}", lengths)
    base = float("nan")
    for variant, flags in section.variants.items():
        if variant in failed or (section.gpus == 1 and window > LONGEST.get(variant, window)):
            continue
        name = f"{options.section}-{window}-{variant}"
        options.warm_ranks = variant not in section.fresh
        steps = run(name, section.gpus, flags, prefix, options, {"UB_SKIPMC": "1"})
        if not steps and options.warm_ranks:  # what an earlier run left there may be at fault
            options.warm_ranks = False
            steps = run(name, section.gpus, flags, prefix, options, {"UB_SKIPMC": "1"})
        timed = steps[options.warm_up :]
        if not timed:
            print(f"{name}: no step times, see {options.out / name}.log", flush=True)
            failed.add(variant)
            continue
        ns_a_token = median(1e6 * step["ms"] / step["tokens"] for step in timed)
        base = ns_a_token if variant == next(iter(section.variants)) else base
        row = (
            {"section": options.section, "window": window, "windows": windows, "layers": options.layers}
            | {"gpus": section.gpus, "variant": variant, "steps": len(timed)}
            | {"ms_a_step": median(step["ms"] for step in timed), "ns_a_token": ns_a_token}
            | {"time_ratio": ns_a_token / base}
            | {"ms_saved_a_layer": (base - ns_a_token) * window / 1e6 / options.layers}
            | {"peak_mb": timed[-1]["peak_mb"], "loss": timed[-1]["loss"]}
        )
        print(f"{name}: {row['ms_a_step']:.1f} ms a step, {row['time_ratio']:.3f}", flush=True)
        yield row


def table(rows: list[dict[str, Any]]) -> None:
    """ms saved: of a layer's forward and backward in a micro-batch of one window, against the first variant."""
    print(
        f"\n{'window':>8} {'variant':16} {'ms a step':>10} {'time':>7} {'ms saved':>9} {'peak MB':>9} {'loss':>8}"
    )
    for row in rows:
        print(
            f"{row['window']:8} {row['variant']:16} {row['ms_a_step']:10.1f} {row['time_ratio']:7.3f} "
            f"{row['ms_saved_a_layer']:9.3f} {row['peak_mb']:9.0f} {row['loss']:8.4f}"
        )


if __name__ == "__main__":
    main()
