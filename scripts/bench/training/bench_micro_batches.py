"""How many micro-batches a step is made of, measured: a pipeline over --gpus GPUs, with recompute and without.

python3 -m scripts.bench.training.bench_micro_batches --gpus 2 --lengths LENGTHS --profile PROFILE --out out/mb

A setting is WINDOWS:RECOMPUTE:LAYERS:SCHEMES: windows of 64K a step, recompute full or none, layers of 2048, and
bench_4d's schemes. All train through the same processes (warm_ranks.py), with the rehearsal, which builds kernel graphs
before step 1. Each setting's folder gets bench_4d's files, and when each forward and backward ran.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.bench.training.bench_4d import schemes, table
from scripts.bench.training.gpu_train import ROOT, corpus, run

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WINDOW = 65536
KINDS = {"full": RECOMPUTE, "none": ""}
SETTINGS = ["2:none:8:one,ours", "4:none:8:one,ours", "2:full:8:one,ours", "4:full:8:one,ours"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2, help="stages (default: 2)")
    parser.add_argument("settings", nargs="*", default=SETTINGS, help=f"(default: {' '.join(SETTINGS)})")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mb", help="folder of results")
    parser.add_argument("--lengths", type=Path, help=".npy of document lengths")
    parser.add_argument("--profile", type=Path, help="of this model and GPU")
    parser.add_argument(
        "--vocabulary", type=int, default=257, help="words (default: 257, whose logits are small)"
    )
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4)
    options = parser.parse_args()
    profile_flag = f" --wlb-profile {options.profile}" if options.profile else ""
    prefix = corpus(options.out / "corpus", options.lengths)
    for setting in options.settings:
        windows, recompute, layers, names = setting.split(":")
        job = argparse.Namespace(
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
            label = f"1-1-{options.gpus}-1_{name}"
            flags = ["--pipeline-model-parallel-size", str(options.gpus), *schemes(WINDOW)[name]]
            rows = run(label, options.gpus, flags, prefix, job)
            result = {"layout": f"1,1,{options.gpus},1", "scheme": name, "gpus": options.gpus, "rows": rows}
            result |= {"batch": int(windows), "window": WINDOW}
            (job.out / f"{label}.result.json").write_text(json.dumps(result), encoding="utf-8")
            table(job)


if __name__ == "__main__":
    main()
