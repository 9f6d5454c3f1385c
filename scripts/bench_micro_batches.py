#!/usr/bin/env python3
"""How many micro-batches a step is made of, measured: a pipeline over --gpus GPUs, with recompute and without.

python3 scripts/bench_micro_batches.py --gpus 2 --lengths LENGTHS --profile PROFILE --out out/mb

For each number of windows a step: plain, one micro-batch a window, and the defaults, of 8 layers of 2048 at a window of
64K. All through the same processes (warm_ranks.py), with the rehearsal, which builds kernel graphs before step 1. Each
setting's folder gets bench_4d's files, and when each forward and backward ran.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench_4d import schemes, table
from gpu_train import ROOT, corpus, run

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KINDS = {"full": RECOMPUTE, "none": ""}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2, help="stages (default: 2)")
    parser.add_argument("--windows", default="2,4", help="windows a step, comma list (default: 2,4)")
    parser.add_argument("--recompute", default="none,full", help="comma list (default: none,full)")
    parser.add_argument("--schemes", default="one,ours", help="bench_4d's (default: one,ours)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mb", help="folder of results")
    parser.add_argument("--lengths", type=Path, help=".npy of document lengths")
    parser.add_argument("--profile", type=Path, help="of this model and GPU")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    given = f" --wlb-profile {options.profile}" if options.profile else ""
    prefix = corpus(options.out / "corpus", options.lengths)
    for recompute in options.recompute.split(","):
        for windows in map(int, options.windows.split(",")):
            setting = argparse.Namespace(
                out=options.out / f"w{windows}_{recompute}",
                extra=KINDS[recompute] + given,
                seq_length=65536,
                global_batch_size=windows,
                iterations=options.iterations,
                warm_up=options.warm_up,
                layers=options.layers,
                script=None,
                warm_ranks=True,
                spans=True,
            )
            setting.out.mkdir(parents=True, exist_ok=True)
            for name in options.schemes.split(","):
                label = f"1-1-{options.gpus}-1_{name}"
                flags = ["--pipeline-model-parallel-size", str(options.gpus), *schemes(65536)[name]]
                rows = run(label, options.gpus, flags, prefix, setting)
                told = {
                    "layout": f"1,1,{options.gpus},1",
                    "scheme": name,
                    "gpus": options.gpus,
                    "batch": windows,
                    "window": 65536,
                    "rows": rows,
                }
                (setting.out / f"{label}.result.json").write_text(json.dumps(told), encoding="utf-8")
            print(f"\n{windows} windows a step, recompute {recompute}", flush=True)
            table(setting)


if __name__ == "__main__":
    main()
