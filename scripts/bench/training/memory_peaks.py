"""The memory that steps take on one GPU, as ranks of jobs of 1 to 64, against what the memory model says.

python -m scripts.bench.training.memory_peaks --out DIR [--seconds 330] [--only PART,..] [--processes 2]
python -m scripts.bench.training.memory_peaks --out DIR --again    # the table from what lies there

Each case trains three steps through the whole trainer (lone_rank.py: collectives do nothing, memory is real). Windows
are documents of one length, so that every micro-batch is as long as the longest; with chunks, documents are long.
DIR/reports.jsonl gets a line for each case as it ends, DIR/memory_peaks.csv the table: bytes between steps, at a step's
fullest moment, and reserved, beside two estimates. Lmax: what decides the longest micro-batch, an upper bound. Plan:
what a step with recomputed layers is planned with, event by event.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from scripts.bench.start import LAYERS_8B, TRAINING, environment, new_parser
from scripts.csv_files import write_csv
from scripts.environment import cpu_environment
from scripts.warm_ranks import WarmRanks
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.pipeline.kept_layers import Load, plan_kept_layers
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.workload.memory import GIB, chunked_bytes, stage_memory, token_bytes, weight_bytes
from wlb_megatron.workload.model import Experts, Layout, Model

COMMON = "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
COMMON += "--untie-embeddings-and-output-weights --attention-dropout 0 --num-layers 4"
MODELS = {
    "8B": f"{LAYERS_8B} --num-layers 4",
    "70B": f"{COMMON} --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128",
    "experts": f"{COMMON} --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-router-force-load-balancing",
    "latent-lite": f"{COMMON} --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
    "--multi-latent-attention --no-rope-fusion --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm",
    "latent": f"{COMMON} --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --no-rope-fusion --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm",
}
"""Layers of 8B and 70B models, of Qwen3-30B-A3B, of DeepSeek-V2-Lite and DeepSeek-V3 without experts."""
LARGE = "--vocab-size 128256"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
SIZES = ("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size")
K = 1024
WORKSPACES = 1 / 8
"""GiB of libraries, which estimates leave to the margin."""
LIBRARIES = 3 / 32
"""GiB of them that an earlier job of the same process left, and that this one uses: its peak is the same with them."""
GROUPED = 1 / 8
"""GiB more of them with experts: four streams of grouped GEMMs, 32 MiB each."""
FIRST_FAILURES = 6
"""If so many cases fail and none has run, the others are not tried."""


@dataclass(frozen=True)
class Case:
    """model: of MODELS. layout: TP, CP, PP. flags: more of Megatron's. window: tokens. windows: of a step and
    data-parallel rank. data: data-parallel ranks. last: the last stage's rank, else the first's. long: long-tailed
    documents, packed as the plugin does by default; else each is a window."""

    model: str
    layout: tuple[int, int, int] = (1, 1, 1)
    flags: str = ""
    window: int = 16 * K
    windows: int = 2
    data: int = 1
    last: bool = False
    long: bool = False

    @property
    def name(self) -> str:
        sizes = [f"{n}{size}" for n, size in zip(("TP", "CP", "PP"), self.layout, strict=True) if size > 1]
        sizes += [f"DP{self.data}"] * (self.data > 1) + [f"{'last' if self.last else 'first'} stage"] * (
            self.layout[2] > 1
        )
        words = " ".join([self.model, *sizes, f"{self.window // K}K", "long documents" * self.long])
        return f"{words.strip()}, {_short(self.flags) or 'none recomputed'}"

    @property
    def place(self) -> str:
        """RANK/WORLD: tensor ranks side by side, then context, data, and pipeline ranks."""
        stage = self.data * self.layout[0] * self.layout[1]
        return f"{stage * (self.layout[2] - 1) if self.last else 0}/{stage * self.layout[2]}"

    def arguments(self, prefix: Path, training: str) -> list[str]:
        """The flags of the run."""
        sizes = [f"--{name}={size}" for name, size in zip(SIZES, self.layout, strict=True)]
        sizes += ["--sequence-parallel"] * (self.layout[0] > 1 and "--no-sp" not in self.flags)
        flags = self.flags.replace("--no-sp", "").split()
        longest = 2 * self.window
        packing = ["--wlb-packing", "original", "--wlb-sharding", "per-sequence"]
        if "--no-distributed-optimizer" in flags:
            flags.remove("--no-distributed-optimizer")
            training = training.replace("--use-distributed-optimizer", "")
        return [
            *(MODELS[self.model].split() + training.split() + sizes),
            *("--seq-length", str(self.window), "--max-position-embeddings", str(longest)),
            *("--global-batch-size", str(self.windows * self.data), "--data-path", str(prefix)),
            *(
                "--train-iters",
                "3",
                "--lr-warmup-iters",
                "0",
                "--num-workers",
                "0",
                "--wlb-rehearsal",
                "never",
            ),
            *([] if self.long else packing),
            *flags,
        ]


def _short(flags: str) -> str:
    words = flags.replace(LARGE, "128K words").replace(UNIFORM, "uniform").replace(BLOCK, "block")
    return words.replace("--", "").replace("num-virtual-stages-per-pipeline-rank", "virtual stages")


CASES = (
    Case("8B"),
    Case("8B", flags=f"{UNIFORM} 1", windows=2),
    Case("8B", (2, 2, 2), window=64 * K, windows=4),
    Case("8B", (4, 4, 4), f"{UNIFORM} 1 --num-layers 8", window=128 * K, windows=8),
    Case("8B", flags=f"{UNIFORM} 1 {LARGE}"),
    Case("8B", (1, 1, 2), f"--wlb-chunks on {UNIFORM} 1", window=64 * K, windows=4, long=True),
    Case("experts", flags="--expert-model-parallel-size 8 --num-layers 2", data=8),
    Case("latent-lite", flags="--num-layers 3"),
    Case("70B", (8, 1, 1), f"{UNIFORM} 1 {LARGE}", window=32 * K),
    Case("8B", (1, 1, 4), "--num-layers 8", windows=6),
    Case("8B", (1, 1, 4), f"--num-layers 8 {LARGE}", windows=6, last=True),
    Case("8B", (1, 4, 1), window=64 * K),
    Case("experts", flags=f"--expert-model-parallel-size 8 {UNIFORM} 1", data=8, window=32 * K),
    Case("latent", (8, 1, 1), "--num-layers 2"),
    Case(
        "8B",
        (1, 1, 2),
        f"--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 {UNIFORM} 1",
        windows=4,
        window=32 * K,
    ),
    Case(
        "8B",
        (1, 1, 4),
        f"--wlb-chunks on {UNIFORM} 1 {LARGE}",
        window=64 * K,
        windows=4,
        long=True,
        last=True,
    ),
    Case("8B", (1, 2, 2), f"--wlb-chunks on {UNIFORM} 1", window=128 * K, windows=4, long=True),
    Case("8B", flags=f"{BLOCK} 2", windows=2),
    Case("8B", flags=f"{UNIFORM} 2"),
    Case("8B", flags=f"--num-layers 2 {LARGE}", window=8 * K),
    Case("8B", (4, 1, 1), f"{UNIFORM} 1 {LARGE}", window=32 * K),
    Case("8B", (2, 1, 1)),
    Case("8B", (2, 1, 1), "--no-sp"),
    Case("70B", (8, 1, 1), "--num-layers 2", window=32 * K),
    Case("70B", (4, 2, 1), f"{BLOCK} 1 --num-layers 2", window=32 * K),
    Case("8B", (1, 4, 1), f"{UNIFORM} 1", window=128 * K),
    Case("8B", (1, 4, 1), "--wlb-regather-keys", window=64 * K),
    Case("8B", (1, 2, 1), f"{BLOCK} 2", window=32 * K),
    Case("8B", (1, 1, 4), f"--num-layers 16 {UNIFORM} 1", windows=6),
    Case("8B", (1, 1, 4), f"--num-layers 16 {BLOCK} 2", windows=6),
    Case("8B", (1, 1, 2), "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2", windows=4, window=8 * K),
    Case("8B", (2, 2, 2), f"{UNIFORM} 1 {LARGE}", window=64 * K, windows=4, data=2, last=True),
    Case("8B", flags="--no-distributed-optimizer"),
    Case("8B", data=4),
    Case("8B", flags="--recompute-granularity selective"),
    Case("8B", flags="--hidden-dropout 0.1"),
    Case("8B", flags=f"--mtp-num-layers 1 --num-layers 2 {LARGE}", window=8 * K),
    Case("latent-lite", (1, 2, 1), f"{UNIFORM} 1", window=32 * K),
    Case("latent", (8, 1, 4), f"--wlb-chunks on {UNIFORM} 1", window=64 * K, windows=4, long=True),
    Case("experts", (1, 2, 1), "--expert-model-parallel-size 8 --num-layers 2", data=4, window=32 * K),
    Case(
        "experts",
        (2, 1, 2),
        f"--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 {UNIFORM} 1",
        data=4,
        window=32 * K,
        windows=4,
    ),
    Case("8B", (1, 1, 2), f"{UNIFORM} 1 --wlb-gpu-memory 50", window=64 * K, windows=4, long=True),
    Case(
        "8B",
        (1, 1, 2),
        f"--wlb-chunks on {UNIFORM} 1 --wlb-gpu-memory 50",
        window=64 * K,
        windows=4,
        long=True,
    ),
    Case("8B", (1, 1, 4), "--wlb-chunks on", window=32 * K, windows=4, long=True),
)

TINY = (
    MODELS["8B"]
    .replace("4096", "64")
    .replace("14336", "96")
    .replace("heads 32", "heads 4")
    .replace("groups 8", "groups 4")
    .replace("channels 128", "channels 16")
    .replace("RMSNorm", "LayerNorm")
)
ON_CPU = """--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --wlb-gpu-memory 8"""


def main() -> None:
    parser = new_parser(__doc__, "memory")
    parser.add_argument("--seconds", type=float, default=330, help="begin no case after these")
    parser.add_argument("--limit", type=float, default=75, help="seconds of a case")
    parser.add_argument("--only", help="cases whose name has one of these, comma list")
    parser.add_argument("--processes", type=int, default=2, help="cases at a time on the GPU")
    parser.add_argument("--again", action="store_true", help="print the table from reports.jsonl")
    parser.add_argument("--cpu", action="store_true", help="tiny models on CPUs, to try the cases")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports = options.out / "reports.jsonl"
    if not options.again:
        reports.unlink(missing_ok=True)
        measure(options, reports)
    table([json.loads(line) for line in reports.read_text(encoding="utf-8").splitlines()], options.out)


def measure(options: argparse.Namespace, reports: Path) -> None:
    """Run the cases in order, some at a time."""
    ends_at, waiting, lock = (
        time.perf_counter() + options.seconds,
        queue.SimpleQueue[Case](),
        threading.Lock(),
    )
    for case in CASES:
        if not options.only or any(part in case.name for part in options.only.split(",")):
            waiting.put(case)
    corpora = _corpora(options.out, options.cpu)

    ended: list[bool] = []

    def serve(number: int) -> None:
        ranks = WarmRanks(1, cpu_environment() if options.cpu else _on_gpu())
        try:
            while time.perf_counter() < ends_at:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                report = run_case(case, ranks, corpora[case.window, case.long], options, number)
                ended.append("error" not in report)
                if len(ended) >= FIRST_FAILURES and not any(ended):
                    print("no case has run: the others are left out", flush=True)
                    while not waiting.empty():
                        waiting.get_nowait()
                with lock, reports.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": case.name, **report}) + "\n")
        finally:
            ranks.close()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _on_gpu() -> dict[str, str]:
    return environment(OMP_NUM_THREADS="4", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def run_case(
    case: Case, ranks: WarmRanks, prefix: Path, options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """The report of lone_rank.py, or an error."""
    path, log = options.out / f"report.{number}.json", options.out / f"log.{number}.txt"
    path.unlink(missing_ok=True)
    training = TRAINING
    if options.cpu:
        training = training.replace("--bf16", "").replace("--distributed-backend nccl", "") + f" {ON_CPU}"
        case = replace(case, model="8B", window=_tiny(case.window), flags=_tiny_flags(case))
        MODELS["8B"] = TINY
    arguments = case.arguments(prefix, training)
    if "--wlb-gpu-memory 50" not in case.flags:
        arguments.append("--by-the-flags")
    began = time.perf_counter()
    failed = ranks.run(
        "module", ["scripts.bench.training.lone_rank", case.place, str(path), *arguments], log, options.limit
    )
    seconds = round(time.perf_counter() - began, 1)
    if failed or not path.exists():
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        found = [line for line in said if "Error" in line or "error:" in line] or said[-1:] or ["no log"]
        print(f"{case.name}: failed after {seconds} s: {found[-1][:400]}", flush=True)
        return {"error": found[-1][:400], "log": said[-40:], "seconds": seconds}
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if report["steps"]:
        print(_line(row_of({"case": case.name, **report})), f"{seconds} s", flush=True)
    return {**report, "seconds": seconds}


def _tiny(window: int) -> int:
    return window // 128


def _tiny_flags(case: Case) -> str:
    """What of a case's flags a tiny model on a CPU takes. Megatron's norm there knows no sequence parallelism."""
    flags = f"--no-sp {case.flags}".replace(LARGE, "--vocab-size 512").replace("--wlb-gpu-memory 50", "")
    if case.model == "experts":
        flags += " --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
        flags += " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001"
    return flags


def _corpora(out: Path, tiny: bool) -> dict[tuple[int, bool], Path]:
    """Python's sources, by window and kind: in documents of one window each, or long-tailed up to a window."""
    prefixes, builds = {}, []
    (out / "corpora").mkdir(exist_ok=True)
    for window, long in sorted({(case.window, case.long) for case in CASES}):
        size = _tiny(window) if tiny else window
        prefix = prefixes[window, long] = out / "corpora" / f"{'long' if long else 'equal'}-{size}"
        lengths = np.full(120, size)
        if long:
            lengths = np.maximum(long_tailed(size, 4000, 3), 2).astype(np.int64)
            lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 60 * size))]
        np.save(f"{prefix}.npy", lengths)
        command = [
            sys.executable,
            "-m",
            "scripts.corpus",
            str(prefix),
            "--lengths",
            f"{prefix}.npy",
        ]
        if not prefix.with_suffix(".idx").exists():
            builds.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    if any(build.wait() for build in builds):
        raise SystemExit("a corpus could not be built: see above")
    return prefixes


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    """A row of the table (GiB). Measured figures are the largest of steps after the first, less what earlier jobs of
    the process left behind. call: the run that measured it, where reports of several are in one file."""
    if not report.get("steps"):
        return {
            "call": report.get("call", 1),
            "case": report["case"],
            "error": report.get("error", "no step"),
        }
    steps = report["steps"][1:] or report["steps"]
    fullest = max(steps, key=lambda step: step["allocated"])
    libraries = LIBRARIES + GROUPED * (report["experts"] is not None)
    remainder = max(0.0, round(report.get("before", 0) / GIB - libraries, 3))
    between, peak, reserved = (
        max(step[name] for step in steps) / GIB - remainder for name in ("between", "allocated", "reserved")
    )
    weights, bound, planned = (value and value / GIB + WORKSPACES for value in estimates(report, fullest))
    filled = any(not plan["by_the_flags"] for plan in fullest["loads"])  # up to the memory there is
    return {
        "call": report.get("call", 1),
        "case": report["case"],
        "between_steps": between,
        "weights_estimate": weights,
        "peak": peak,
        "lmax_estimate": bound,
        "lmax_over_peak": bound / peak if peak and not filled else None,
        "plan_estimate": planned or None,
        "plan_over_peak": planned / peak if peak and planned else None,
        "reserved_over_peak": reserved / peak if peak else None,
        "from_earlier_jobs": remainder,
        "error": None,
    }


def estimates(report: dict[str, Any], step: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes by today's memory model: of weights, gradients and optimizer; of the fullest moment by the law of Lmax; by
    the plan of this step's recomputation, 0 where there is none. With experts, for as many tokens as theirs received.
    """
    experts = None
    if report["experts"] is not None:
        received = max(step["experts"][1] for step in report["steps"])
        experts = Experts(**{**report["experts"], "imbalance": ceil(100 * received)})
    shape = Model(**{**report["shape"], "experts": experts})
    layout, stage, alignment = Layout(**report["layout"]), report["stage"], report["alignment"]
    rows = [sum(end - start for _, start, end in row) for row in step["documents"]]
    longest = -(-max(rows) // alignment) * alignment
    weights = weight_bytes(shape, layout, stage)
    chunked = _longest_in_chunks(step["documents"])
    bound = weights + -(-longest // layout.context) * token_bytes(shape, layout, stage)
    if chunked:
        bound = chunked_bytes(shape, layout, longest=longest, held=sum(rows), document=chunked)
    plan = step["loads"][0] if step["loads"] else None
    return weights, bound, weights + plan_peak(report, shape, layout, plan) if plan and plan["loads"] else 0


def plan_peak(report: dict[str, Any], shape: Model, layout: Layout, plan: dict[str, Any]) -> int:
    """Bytes of a step's fullest event on this stage: as it was planned, or today's with the flags of recomputation."""
    if not plan["by_the_flags"]:
        return int(plan["peak"])
    memory = stage_memory(shape, layout, report["stage"], plan["layers"], depths=report["depths"])
    orders = grouped_orders(layout.pipeline, plan["groups"] or (1,) * len(plan["loads"]), len(plan["layers"]))
    loads = [Load(**load) for load in plan["loads"]]
    return plan_kept_layers(orders[report["stage"]], loads, memory, 0).peak


def _longest_in_chunks(documents: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens of the longest document of which several micro-batches hold a part; 0 where there is none."""
    seen: dict[int, list[int]] = {}
    for row in documents:
        for document, start, end in row:
            if document >= 0:
                seen.setdefault(document, []).append(end - start)
    return max((sum(parts) for parts in seen.values() if len(parts) > 1), default=0)


def table(reports: Sequence[dict[str, Any]], out: Path) -> None:
    """CSV and print: all cases, then how estimates lie."""
    rows = [row_of(report) for report in reports]
    columns = [
        "call",
        "case",
        "between_steps",
        "weights_estimate",
        "peak",
        "lmax_estimate",
        "lmax_over_peak",
        "plan_estimate",
    ]
    columns += ["plan_over_peak", "reserved_over_peak", "from_earlier_jobs", "error"]
    write_csv(out / "memory_peaks.csv", [{name: row.get(name) for name in columns} for row in rows])
    for row in rows:
        print(_line(row))
    for name in ("lmax_over_peak", "plan_over_peak", "reserved_over_peak"):
        ratios = [row[name] for row in rows if row.get(name)]
        if ratios:
            print(
                f"{name}: mean {fmean(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} cases"
            )


def _line(row: dict[str, Any]) -> str:
    if row.get("error"):
        return f"{row['case']}: {row['error'][:200]}"
    cells = (f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
    return f"{row['case']} | {' | '.join(cells)}"


if __name__ == "__main__":
    main()
