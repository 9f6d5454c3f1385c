"""Balance, delay and time of every packer, in tables made by one command.

    python -m scripts.bench.packing.bench_packing [--lengths FILE.npy] [--out FOLDER] [--sections a,b]

Sections: paper (the table of WLB-LLM's section 7.3: window 128K, 4 micro-batches, work d + d*d/24576), delay (balance
against the bound on delay, a picture), time, recompute (planning what a stage recomputes). Without --lengths, lengths
come from a seed. --out gets packing_<section>.csv and delay.png.

imbalance: largest over mean work of an iteration's micro-batches. slowdown: summed largest over summed mean, what all
steps together lose. delay: iterations a token waits, what waits at the end included. ms: of packing, per iteration.
gap: how far above the solver's own optimum its plans may be.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from scripts.bench.start import new_parser
from scripts.csv_files import write_csv
from scripts.lengths import lognormal, paper_like
from scripts.reproduce.schemes import PaperPacker
from scripts.reproduce.solver import FixedGreedyPacker, FixedSolverPacker, repeating_batches
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.lengths import pieces_of, sample_lengths
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import Packer, PackingJob
from wlb_megatron.packing.sample_choices import repeating_planner
from wlb_megatron.packing.varlen.items import Limits
from wlb_megatron.pipeline.kept_layers import Load, plan_kept_layers
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.report.terminal import print_table, progress
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.memory import GIB, ModelChunk, StageMemory

COST = CostModel(quadratic_at=24576)
WINDOW = 131072


@dataclass
class Timed:
    """A packer whose calls are timed: seconds of this process, without Python's garbage collector, whose passes
    take as long as the whole process has objects."""

    packer: Packer
    seconds: list[float] = field(default_factory=list)

    def pack(self, *args: Any) -> Any:
        gc.disable()
        start = time.process_time()
        packed = self.packer.pack(*args)
        self.seconds.append(time.process_time() - start)
        gc.enable()
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packer, name)


@dataclass
class Case:
    """One row: a packer over lengths. `packer`: makes it from a sample of the lengths."""

    section: str
    name: str
    lengths: np.ndarray
    packer: Callable[[Sequence[int]], Packer]
    window: int = WINDOW
    bins: int = 4
    iterations: int = 500
    labels: dict[str, Any] = field(default_factory=dict)

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        lengths = pieces_of(self.lengths, self.window, "split")
        timed: Any = Timed(self.packer(sample_lengths(lengths, self.window, "split")))
        planner = repeating_batches(lengths, timed, self.bins * self.window)
        seen = Seen()
        gaps: list[Any] = []
        for _ in range(self.iterations):
            plan = planner.next_iteration()
            assert plan is not None
            seen.add(plan)
            gaps.append(getattr(timed.packer, "gap", None))
            tick()
        row = {"section": self.section, "packing": self.name, **self.labels, **seen.row(timed.seconds)}
        if self.section == "paper":
            row["gap"] = "" if gaps[0] is None else f"{100 * float(np.mean(gaps)):.1f} %"
        return row


class Seen:
    """Imbalance and delay over iterations."""

    def __init__(self) -> None:
        self.largest: list[int] = []
        self.mean: list[float] = []
        self.tokens: list[int] = []
        self.entry: dict[tuple[int, int], int] = {}
        self.tokens_of_delay: dict[int, int] = {}
        self.waiting: tuple[Piece, ...] = ()
        self.now = 0

    def add(self, plan: IterationPlan) -> None:
        work = [b.work for row in plan.micro_batches for b in row]
        self.largest.append(max(work))
        self.mean.append(sum(work) / len(work))
        self.tokens.append(sum(b.tokens for row in plan.micro_batches for b in row))
        self.now = plan.iteration
        self.arrive(plan)
        for row in plan.micro_batches:
            for micro_batch in row:
                self._count(micro_batch.pieces, plan.iteration)
        self.waiting = plan.waiting

    def arrive(self, plan: IterationPlan) -> None:
        for piece in plan.arrived:
            self.entry[piece.epoch, piece.document] = plan.iteration

    def _count(self, pieces: Sequence[Piece], iteration: int) -> None:
        for piece in pieces:
            delay = iteration - self.entry[piece.epoch, piece.document]
            self.tokens_of_delay[delay] = self.tokens_of_delay.get(delay, 0) + piece.end - piece.start

    def row(self, seconds: Sequence[float]) -> dict[str, Any]:
        latest = max(self.tokens_of_delay)
        self._count(self.waiting, self.now + 1)
        imbalance = np.array(self.largest) / np.array(self.mean)
        tokens = sum(self.tokens_of_delay.values())
        of_mean = np.array(self.tokens) / np.mean(self.tokens)
        return {
            "imbalance": f"{imbalance.mean():.3f}",
            "p95": f"{np.percentile(imbalance, 95):.3f}",
            "max": f"{imbalance.max():.3f}",
            "slowdown": f"{sum(self.largest) / sum(self.mean):.3f}",
            "delay": f"{sum(d * n for d, n in self.tokens_of_delay.items()) / tokens:.3f}",
            "tokens_std": f"{of_mean.std():.3f}",
            "tokens_least": f"{of_mean.min():.2f}",
            "tokens_most": f"{of_mean.max():.2f}",
            "latest": latest,
            "ms": f"{1e3 * float(np.mean(seconds[1:])):.2f}",
        }


def configured(window: int = WINDOW, bins: int = 4, **settings: Any) -> Callable[[Sequence[int]], Packer]:
    config = WlbConfig(**settings)
    return lambda sample: make_packer(
        PackingJob(config, COST, window=window, micro_batches=bins, sample=sample)
    )


def fixed(batches: int, seconds: float | None = None) -> Callable[[Sequence[int]], Packer]:
    """Fixed windows over so many global batches, balanced greedily or by the solver in `seconds`."""
    job = PackingJob(WlbConfig(), COST, window=WINDOW, micro_batches=4)
    return lambda _: (
        FixedGreedyPacker(job, batches) if seconds is None else FixedSolverPacker(job, batches, seconds)
    )


def plain(
    thresholds: Sequence[int], delay: int, capacity: int, window: int = WINDOW
) -> Callable[..., Packer]:
    """The paper's algorithm as it stands: a level goes when it is full; with the bound on delay."""
    limits = Limits(bins=4, window=window, capacity=capacity, max_documents=4096, max_delay=delay)
    return lambda sample: PaperPacker(COST, limits, thresholds)


def paper_cases(lengths: np.ndarray) -> Iterator[Case]:
    def case(name: str, packer: Callable[..., Packer], iterations: int = 500) -> Case:
        return Case("paper", name, lengths, packer, iterations=iterations)

    half, double = WINDOW * 3 // 2, WINDOW * 2
    yield case("original", configured(packing="original"))
    for batches in (1, 2, 4, 8):
        yield case(f"fixed-greedy over {batches}", fixed(batches), 496)
    for batches, seconds in ((1, 0.2), (2, 1.0), (4, 4.0)):
        yield case(f"fixed-solver over {batches}, {seconds} s", fixed(batches, seconds), 64)
    yield case("plain queues 64K, latest 16", plain([65536], 16, half))
    for latest, capacity, name in ((16, half, ""), (8, half, ""), (16, double, ", Lmax 2 windows")):
        yield case(f"plain queues 48K 88K, latest {latest}{name}", plain([49152, 90112], latest, capacity))
    for latest, capacity, name in ((16, half, ""), (8, half, ""), (16, double, ", Lmax 2 windows")):
        yield case(f"varlen, latest {latest}{name}", configured(max_delay=latest, max_tokens=capacity))


def delay_cases(lengths: np.ndarray) -> Iterator[Case]:
    half = WINDOW * 3 // 2
    for latest in (1, 2, 4, 8, 12, 16, 24, 32):
        for name, packer in (
            ("plain queues 48K 88K", plain([49152, 90112], latest, half)),
            ("varlen", configured(max_delay=latest)),
            ("varlen, Lmax 2 windows", configured(max_delay=latest, max_tokens=2 * WINDOW)),
        ):
            yield Case("delay", name, lengths, packer, labels={"bound": latest})


def time_rows() -> Iterator[dict[str, Any]]:
    """Milliseconds of packing alone, per iteration: log-normal documents."""
    sizes = [(4, 131072, 132), (4, 131072, 1024), (512, 32768, 8192)]
    yield from _log_normal(sizes + [(1 << k, 32768, 1 << (k + 4)) for k in (6, 8, 10)])
    for windows, documents in ((2, 134), (4, 1028)):
        lengths = lognormal(
            120 * documents, seed=1, mean=windows * WINDOW / documents, sigma=1.2, max_tokens=WINDOW
        )
        for chunks in ("on", "off"):
            yield _time(
                "varlen",
                f"log-normal, PP=4, chunks {chunks}",
                lengths,
                windows,
                WINDOW,
                100,
                pp=4,
                chunks=chunks,
            )


def _log_normal(sizes: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """sizes: micro-batches, window (tokens), and documents of an iteration."""
    for bins, window, documents in sizes:
        mean = bins * window / documents
        iterations = max(6, min(200, 200_000 // documents))
        lengths = lognormal(documents * (iterations + 1), seed=1, mean=mean, sigma=1.2, max_tokens=window)
        yield _time("varlen", "log-normal", lengths, bins, window, iterations)


def _time(
    packing: str,
    kind: str,
    lengths: np.ndarray,
    bins: int,
    window: int,
    iterations: int,
    pp: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    config = WlbConfig(packing=packing, **settings)
    timed: Any = Timed(make_packer(PackingJob(config, COST, window=window, micro_batches=bins, pp=pp)))
    planner = repeating_planner(lengths, timed, bins * window)
    arrived, micro_batches = [], []
    for _ in range(iterations):
        plan = planner.next_iteration()
        assert plan is not None
        arrived.append(len(plan.arrived))
        micro_batches.append(sum(map(len, plan.micro_batches)))
    seconds, documents = timed.seconds[1:], float(np.mean(arrived))
    return {
        "section": "time",
        "packing": packing,
        "lengths": kind,
        "micro-batches": round(float(np.mean(micro_batches))),
        "documents": round(documents),
        "p50 ms": f"{1e3 * float(np.median(seconds)):.2f}",
        "largest ms": f"{1e3 * max(seconds):.2f}",
        "ns / (n log2 n)": f"{1e9 * float(np.median(seconds)) / (documents * np.log2(documents)):.0f}",
    }


LAYER: dict[str, Any] = {
    "kept": 138_000,
    "input": 9_000,
    "forward": 140_000,
    "working": 300_000,
    "remade": 138_000,
}
"""Bytes of a layer of 4096 for a token held."""

STEPS = {
    # micro-batches, model chunks of a stage, sizes of groups
    "32 micro-batches": (32, 1, None),
    "32, of which one document has 11": (32, 1, [11] + [1] * 21),
    "32 through two model chunks": (32, 2, None),
}


def recompute_rows() -> Iterator[dict[str, Any]]:
    """Planning what a step recomputes on the first of 4 stages of 16 layers in 60 GiB."""
    draw = random.Random(1)
    loads = [Load(tokens, tokens * draw.randint(50, 200)) for tokens in draw.sample(range(2000, 20000), 32)]
    for name, (count, chunks, groups) in STEPS.items():
        layers = 16 // chunks
        chunk = ModelChunk(layers=layers, recomputed=layers, floor=layers * LAYER["input"], **LAYER)
        memory = StageMemory(chunks=(chunk,) * chunks, ends=28, keys=12_000)
        order, times = grouped_orders(4, groups or (1,) * count, chunks)[0], []
        for _ in range(30):
            began = time.perf_counter()
            plan = plan_kept_layers(order, loads, memory, 60 * GIB)
            times.append(1e3 * (time.perf_counter() - began))
        share = sum(map(sum, plan.recomputed)) / (count * 16)
        yield {
            "section": "recompute",
            "step": name,
            "ms": f"{median(times):.2f}",
            "recomputed": f"{share:.1%}",
        }


def draw_delay(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in dict.fromkeys(row["packing"] for row in rows):
        mine = [row for row in rows if row["packing"] == name]
        bounds = [row["bound"] for row in mine]
        (line,) = axes.plot(
            bounds, [float(row["imbalance"]) for row in mine], marker="o", label=f"{name}, mean"
        )
        axes.plot(
            bounds, [float(row["p95"]) for row in mine], ls=":", color=line.get_color(), label=f"{name}, p95"
        )
    axes.set(xlabel="bound on delay (iterations)", ylabel="largest / mean work", xscale="log")
    axes.set_title("Balance against the bound on delay (window 128K, 4 micro-batches)")
    axes.set_xticks(bounds, [str(bound) for bound in bounds])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


SECTIONS = ("paper", "delay", "time", "recompute")


def main() -> None:
    parser = new_parser(__doc__, "packing")
    parser.add_argument(
        "--lengths", type=Path, help="document lengths, .npy (default: paper-like, from a seed)"
    )
    parser.add_argument("--sections", default=",".join(SECTIONS))
    args = parser.parse_args()
    sections = args.sections.split(",")
    if unknown := sorted({*sections} - {*SECTIONS}):
        parser.error(f"unknown sections: {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    lengths = np.load(args.lengths) if args.lengths else paper_like(100_000)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    )
    cases = [*(paper_cases(lengths) if "paper" in sections else ())]
    cases += delay_cases(lengths) if "delay" in sections else []
    rows: list[dict[str, Any]] = []
    with progress(sum(case.iterations for case in cases)) as tick:
        for case in cases:
            rows.append(case.run(lambda: tick("packing")))
    rows += time_rows() if "time" in sections else []
    rows += recompute_rows() if "recompute" in sections else []
    args.out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        rows_of_section = [row for row in rows if row["section"] == section]
        header = [key for key in rows_of_section[0] if key != "section"]
        print_table(section, header, [[row[key] for key in header] for row in rows_of_section])
        write_csv(args.out / f"packing_{section}.csv", rows_of_section)
    if "delay" in sections:
        draw_delay([row for row in rows if row["section"] == "delay"], args.out / "delay.png")


if __name__ == "__main__":
    main()
