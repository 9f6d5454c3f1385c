"""How many micro-batches a step is made of, measured: a pipeline over --gpus GPUs, with recompute and without.

python3 -m scripts.bench.training.bench_micro_batches --gpus 2 --lengths LENGTHS --profile PROFILE --out out/mb

A setting is WINDOWS:RECOMPUTE:LAYERS:SCHEMES: windows of 64K a step, recompute full or none, layers of 2048, and
bench_4d's schemes. All train through the same processes (warm_ranks.py), with the rehearsal, which builds kernel graphs
before step 1. Each setting's folder gets bench_4d's files, and when each forward and backward ran.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.bench.start import add_corpus, add_training, corpus, new_parser
from scripts.bench.training.bench_4d import RECOMPUTE, measure

WINDOW = 65536
KINDS = {"full": RECOMPUTE, "none": ""}
SETTINGS = ["2:none:8:one,ours", "4:none:8:one,ours", "2:full:8:one,ours", "4:full:8:one,ours"]


def main() -> None:
    parser = new_parser(__doc__, "mb")
    parser.add_argument("--gpus", type=int, default=2, help="stages (default: 2)")
    parser.add_argument("settings", nargs="*", default=SETTINGS, help=f"(default: {' '.join(SETTINGS)})")
    add_corpus(parser)
    add_training(parser, iterations=20, warm_up=4)
    parser.add_argument("--profile", type=Path, help="of this model and GPU")
    parser.add_argument(
        "--vocabulary", type=int, default=257, help="words (default: 257, whose logits are small)"
    )
    options = parser.parse_args()
    profile_flag = f" --wlb-profile {options.profile}" if options.profile else ""
    prefix = corpus(options)
    for setting in options.settings:
        windows, recompute, layers, names = setting.split(":")
        job = argparse.Namespace(
            gpus=options.gpus,
            out=options.out / f"w{windows}_{recompute}_{layers}",
            extra=f"{KINDS[recompute]}{profile_flag} --vocab-size {options.vocabulary}",
            seq_length=WINDOW,
            global_batch_size=int(windows),
            iterations=options.iterations,
            warm_up=options.warm_up,
            layers=int(layers),
            script=None,
            model="2048",
            warm_ranks=True,
            spans=True,
        )
        job.out.mkdir(parents=True, exist_ok=True)
        print(f"\n{windows} windows a step, recompute {recompute}, {layers} layers", flush=True)
        for name in names.split(","):
            measure(f"1,1,{options.gpus},1", name, prefix, job)


if __name__ == "__main__":
    main()
