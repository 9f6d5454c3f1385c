"""FlashAttention-4's kernels beside cuDNN's, in a few minutes of one GPU or of two.

    python3 -m scripts.bench.attention.fa4.gpu_fa4 --mixes mixes.json --out DIR --seconds 340 \\
        [--parts errors,compile,profile,calls,choice]
    python3 -m scripts.bench.attention.fa4.gpu_fa4 --mixes mixes.json --lengths LENGTHS.npy \\
        --script pretrain_gpt.py --out DIR --seconds 900 --parts nvlink,host,steps,shares,equal    # two GPUs

errors: every case of attention_cases.py with both backends against fp32, in processes side by side, each killed after
    --errors-seconds (errors_*.csv, errors_*.log; a table of FlashAttention-4's errors over cuDNN's)
compile: from a fresh process to the first result, without a cache on disk (compile.log)
profile: wlb-megatron profile --backend fa4 of 7B at TP=4, from which its kernel table is built in (profile_fa4.json)
calls: one bottom-right call, and its diagonal and rectangle, for shapes of segments, with both (calls.csv)
choice: shares of all mixes by window and degree, what adaptive takes and its regret, with both (choice_*.csv)
Each part begins only while there is time; what is done is written as it comes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.bench.attention.attention_regret import against, report
from scripts.bench.attention.fa4.fa4_errors import compare_errors, start_compile, start_errors, wait
from scripts.bench.attention.fa4.fa4_sections import BUDGETS, Sections
from wlb_megatron.report.files import write_csv

PARTS = ("errors", "compile", "profile", "calls", "choice")
"""On one GPU, in this order; those of fa4_sections.py follow in the order in which they are named."""
PROFILED = [
    *("--hidden-size", "4096", "--ffn-hidden-size", "11008", "--num-attention-heads", "32"),
    *(
        "--num-query-groups",
        "8",
        "--kv-channels",
        "128",
        "--swiglu",
        "--tp",
        "4",
        "--cp",
        "2",
        "--grid",
        "full",
    ),
]
"""7B at TP=4: 8 query and 2 key-value heads of 128 channels on a rank, as the built-in tables have."""


SHARES = {131072: 0.5, 32768: 0.5}
"""Of the time that is left, what the mixes of a window of `choice` may take."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=340)
    parser.add_argument("--errors-seconds", type=float, default=100)
    parser.add_argument("--profile-seconds", type=float, default=95)
    parser.add_argument("--profile-of", type=Path, help="of an earlier run, for `choice`")
    parser.add_argument("--jobs", type=int, default=6, help="processes of each backend in `errors`")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--windows", type=int, nargs="+", default=[131072, 32768, 65536])
    parser.add_argument("--every", default="0::1", help="I::N, of `choice`: every Nth mix from the Ith on")
    parser.add_argument("--gpus", type=int, default=2, help="of the parts for two GPUs")
    parser.add_argument("--lengths", type=Path, help=".npy, of `steps`: lengths of documents")
    parser.add_argument("--script", type=Path, help="of `equal`: Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--layers", type=int, default=8, help="of `steps`")
    parser.add_argument("--pairs", type=int, default=4, help="of `equal`, for each backend and degree")
    parser.add_argument("--budgets", default="", help="PART=SECONDS,.. of the parts for two GPUs")
    parser.add_argument("--lines", type=int, default=14, help="of each process's output that are printed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.budgets = {part: float(s) for part, s in (b.split("=") for b in args.budgets.split(",") if b)}
    parts = args.parts.split(",")
    if unknown := [part for part in (*parts, *args.budgets) if part not in (*PARTS, *BUDGETS)]:
        parser.error(f"no such part: {', '.join(unknown)}")
    if "equal" in parts and args.script is None:
        parser.error("equal needs --script")
    clock = _Clock(time.perf_counter() + args.seconds)
    if any(part in PARTS for part in parts):
        _one_gpu(parts, args, clock)
    if any(part in BUDGETS for part in parts):
        with TemporaryDirectory() as work:
            sections = Sections(args, Path(work), time.monotonic() + clock.left())
            if "steps" in parts:
                sections.made_corpus()
            for part in parts:
                if part in BUDGETS:
                    sections.run(part)
            sections.keep_logs()


def _one_gpu(parts: list[str], args: argparse.Namespace, clock: _Clock) -> None:
    beside = []
    if "errors" in parts:
        beside += [start_errors(name, at, args) for name in ("fa4", "cudnn") for at in range(args.jobs)]
    if "compile" in parts:
        beside.append(start_compile(args))
    clock.say("started what runs beside")
    import torch

    from scripts.bench.attention.attention_bench import KERNELS

    torch.backends.cuda.matmul.allow_tf32 = False
    KERNELS.use("fa4")
    clock.say("imported")
    wait(beside, args.errors_seconds)
    if "errors" in parts:
        compare_errors(args)
    clock.say("errors")
    profile = args.profile_of
    if "profile" in parts:
        from wlb_megatron.cli import main as command

        budget, made = str(min(args.profile_seconds, clock.left())), args.out / "profile_fa4.json"
        if not command(["profile", "--backend", "fa4", *PROFILED, "--budget", budget, "--out", str(made)]):
            profile = made
        clock.say("profile")
    if "calls" in parts and clock.left() > 20:
        from scripts.bench.attention.attention_shapes import shapes

        shapes(args.out)
        clock.say("calls")
    if "choice" in parts:
        _choice(args, profile, clock)


class _Clock:
    def __init__(self, until: float) -> None:
        self.began, self.until = time.perf_counter(), until

    def left(self) -> float:
        return self.until - time.perf_counter()

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {what}", flush=True)


def _choice(args: argparse.Namespace, profile: Path | None, clock: _Clock) -> None:
    """Windows and mixes in turn, both backends each, so that what is cut off is cut off of both."""
    from scripts.bench.attention.attention_bench import KERNELS
    from scripts.bench.attention.attention_choice import kernel_table, one_mix

    mixes = json.loads(args.mixes.read_text())
    whole_window = max(sum(lengths) for lengths in mixes.values())
    first, stride = map(int, args.every.split("::"))
    mixes = dict(list(mixes.items())[first::stride])
    by_kernels: dict[str, list[dict[str, Any]]] = {"fa4": [], "cudnn": []}
    wrong: dict[str, list[dict[str, Any]]] = {"fa4": [], "cudnn": []}
    tables = {}
    for name in by_kernels:
        KERNELS.use(name)
        tables[name] = kernel_table(profile if name == "fa4" else None)
    for window in args.windows:
        left = clock.left() * (1.0 if window == args.windows[-1] else SHARES.get(window, 0.5))
        until = time.perf_counter() + left
        for mix, documents in mixes.items():
            if time.perf_counter() > until:
                print(f"{window} {mix}: no more time", flush=True)
                break
            for name in by_kernels:
                KERNELS.use(name)
                shape = (mix, documents, window, whole_window, args.cp)
                by_kernels[name] += one_mix(*shape, tables[name], wrong[name])
            for name in by_kernels:
                for kind, rows in (("", by_kernels[name]), ("_predicted", wrong[name])):
                    mine = [row for row in rows if row["window"] == window]
                    write_csv(args.out / f"choice_{name}_{window}{kind}.csv", mine)
        clock.say(f"choice {window}")
    for name, rows in by_kernels.items():
        report(rows, wrong[name], args.windows, args.cp, name)
    against(by_kernels["fa4"], "FlashAttention-4", by_kernels["cudnn"], "cuDNN")


if __name__ == "__main__":
    main()
