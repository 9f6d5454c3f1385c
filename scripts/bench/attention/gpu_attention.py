"""Correctness and speed of sharded attention on GPUs: one layer, forward and backward, bf16.

    python3 -m scripts.bench.attention.gpu_attention MODE --out DIR ...                           # one GPU
    torchrun --nproc-per-node 2 -m scripts.bench.attention.gpu_attention MODE --out DIR ...       # a process a GPU

One GPU:
    breadth                                 errors: head dims, windows, sinks, MLA, deterministic, fp16
Under torchrun:
    real --mixes mixes.json                 over NCCL, beside Transformer Engine's own context parallelism

--kernels fa4 takes FlashAttention-4's in place of cuDNN's (Transformer Engine's own attention stays cuDNN's).
mixes.json: {"name": [document lengths], ...}. Writes DIR/<mode>.csv and prints tables. Errors are norms of the
difference to an fp32 reference over its norm, beside those of Transformer Engine's own unsharded attention.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from scripts.bench.start import new_parser

MODES = {
    "real": ("attention_real", "real"),
    "breadth": ("attention_breadth", "breadth"),
}
"""Module and function of each; they need a GPU, so they are imported when they run, and --help works anywhere."""


def main() -> None:
    parser = new_parser(__doc__, "attention")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--mixes", type=Path, nargs="+")
    parser.add_argument("--only", help="comma list of mixes")
    parser.add_argument("--kinds", nargs="+", default=["per-sequence", "per-document", "hybrid"])
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument(
        "--check", nargs="+", help="in `real`, the mixes whose errors are measured (default all)"
    )
    parser.add_argument("--kernels", choices=("cudnn", "fa4"), default="cudnn")
    parser.add_argument(
        "--cases", help="of `breadth`: I::N, every Nth from the Ith on, so that N processes share them"
    )
    args = parser.parse_args()
    mixes: dict[str, list[int]] = {}
    for path in args.mixes or ():
        mixes |= json.loads(path.read_text())
    if not mixes and args.mode != "breadth":
        parser.error(f"{args.mode} needs --mixes")
    if args.only:
        mixes = {name: mixes[name] for name in args.only.split(",")}
    if find_spec("transformer_engine") is None:
        parser.error("this needs Transformer Engine and a GPU; transformer_engine is not installed")
    run(mixes, args)


def run(mixes: dict[str, list[int]], args: argparse.Namespace) -> None:
    import torch

    from scripts.bench.attention.attention_bench import KERNELS

    KERNELS.use(args.kernels)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cuda.matmul.allow_tf32 = False
    module, function = MODES[args.mode]
    getattr(import_module(f"scripts.bench.attention.{module}"), function)(mixes, args)


if __name__ == "__main__":
    main()
