"""Balance, delay and time of every packer, in tables made by one command.

    python scripts/bench_packing.py [--lengths FILE.npy] [--others FILE.npy] [--out FOLDER] [--sections a,b]

Sections: paper (the table of WLB-LLM's section 7.3: window 128K, 4 micro-batches, work d + d*d/24576), delay (balance
against the bound on delay, a picture), others (other lengths and windows, three shuffles), pipeline (predicted step
against its lower bound), time. Without --lengths and --others, lengths come from seeded generators of the project.
With --out, a CSV of all rows and delay.png are written there.

imbalance: largest over mean work of an iteration's micro-batches. slowdown: summed largest over summed mean, what all
steps together lose. delay: iterations a token waits, what waits at the end included. ms: of packing, per iteration.
gap: how far above the solver's own optimum its plans may be.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.assign import step_bound, step_work
from wlb_megatron.packing.delay_bound import Limits
from wlb_megatron.packing.lengths import sample_lengths
from wlb_megatron.packing.packer import Packer, make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.synthetic import KINDS, cut_overlong, lognormal
from wlb_megatron.packing.varlen_packer import VarlenPacker
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.report.table import print_table
from wlb_megatron.workload.cost_model import CostModel

COST = CostModel(quadratic_at=24576)
WINDOW = 131072


class Repeated:
    """Documents of these lengths, over and over."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths.tolist()
        self._given = 0

    def next(self) -> Piece:
        epoch, document = divmod(self._given, len(self._lengths))
        self._given += 1
        return Piece(epoch, document, 0, self._lengths[document])

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state(self, state: dict[str, Any]) -> None:
        self._given = state["given"]


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
        lengths = cut_overlong(self.lengths[self.lengths > 0], self.window)
        timed = Timed(self.packer(sample_lengths(lengths, self.window, "split")))
        planner = Planner(Repeated(lengths), timed, global_tokens=self.bins * self.window)
        seen, gaps = Seen(), []
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
        self.entry: dict[tuple[int, int, int], int] = {}
        self.tokens_of_delay: dict[int, int] = {}
        self.waiting: tuple[Piece, ...] = ()
        self.now = 0

    def add(self, plan: IterationPlan) -> None:
        work = [b.work for row in plan.micro_batches for b in row]
        self.largest.append(max(work))
        self.mean.append(sum(work) / len(work))
        self.now = plan.iteration
        for piece in plan.arrived:
            self.entry[piece.epoch, piece.document] = plan.iteration
        for row in plan.micro_batches:
            for micro_batch in row:
                self._count(micro_batch.pieces, plan.iteration)
        self.waiting = plan.waiting

    def _count(self, pieces: Sequence[Piece], iteration: int) -> None:
        for piece in pieces:
            delay = iteration - self.entry[piece.epoch, piece.document]
            self.tokens_of_delay[delay] = self.tokens_of_delay.get(delay, 0) + piece.end - piece.start

    def row(self, seconds: Sequence[float]) -> dict[str, Any]:
        latest = max(self.tokens_of_delay)
        self._count(self.waiting, self.now + 1)
        imbalance = np.array(self.largest) / np.array(self.mean)
        tokens = sum(self.tokens_of_delay.values())
        return {
            "imbalance": f"{imbalance.mean():.3f}",
            "p95": f"{np.percentile(imbalance, 95):.3f}",
            "max": f"{imbalance.max():.3f}",
            "slowdown": f"{sum(self.largest) / sum(self.mean):.3f}",
            "delay": f"{sum(d * n for d, n in self.tokens_of_delay.items()) / tokens:.3f}",
            "latest": latest,
            "ms": f"{1e3 * float(np.mean(seconds[1:])):.2f}",
        }


def configured(window: int = WINDOW, bins: int = 4, **settings: Any) -> Callable[[Sequence[int]], Packer]:
    config = WlbConfig(**settings)
    return lambda sample: make_packer(config, COST, window=window, micro_batches=bins, sample=sample)


def plain(
    thresholds: Sequence[int], delay: int, capacity: int, window: int = WINDOW
) -> Callable[..., Packer]:
    """The paper's algorithm as it stands: a level goes when it is full; with the bound on delay."""
    limits = Limits(bins=4, window=window, capacity=capacity, max_documents=4096, max_delay=delay)
    return lambda sample: VarlenPacker(COST, limits, thresholds, by_balance=False)


def paper_cases(lengths: np.ndarray) -> Iterator[Case]:
    def case(name: str, packer: Callable[..., Packer], iterations: int = 500) -> Case:
        return Case("paper", name, lengths, packer, iterations=iterations)

    half, double = WINDOW * 3 // 2, WINDOW * 2
    yield case("original", configured(packing="original"))
    for batches in (1, 2, 4, 8):
        yield case(
            f"fixed-greedy over {batches}", configured(packing="fixed-greedy", balance_batches=batches), 496
        )
    for batches, seconds in ((1, 0.2), (2, 1.0), (4, 4.0)):
        solver = configured(packing="fixed-solver", balance_batches=batches, solver_seconds=seconds)
        yield case(f"fixed-solver over {batches}, {seconds} s", solver, 64)
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


def other_cases(others: np.ndarray, name: str) -> Iterator[Case]:
    for kind, lengths in ((name, others), ("lognormal", lognormal(400_000))):
        for window in (8192, 32768, 131072):
            count = min(500, int(lengths.sum()) // (4 * window) - 1)
            packers = {
                "original": configured(window, packing="original"),
                "fixed-greedy over 1": configured(window, packing="fixed-greedy"),
                "plain queues 3/8 11/16": plain(
                    [window * 3 // 8, window * 11 // 16], 16, window * 3 // 2, window
                ),
                "varlen, latest 16": configured(window),
                "varlen, latest 8": configured(window, max_delay=8),
            }
            for shuffle in (1, 2, 3):
                shuffled = np.random.default_rng(shuffle).permutation(lengths)
                for packing, packer in packers.items():
                    labels = {"lengths": kind, "window": window, "shuffle": shuffle}
                    yield Case("others", packing, shuffled, packer, window, 4, count, labels)


def pipeline_rows(lengths: np.ndarray, tick: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Predicted step of varlen and of arrival order over the step's lower bound, mean over iterations."""
    for micro_batches in (16, 64, 256):
        for dp in (1, 4, 32):
            for pp in (4, 16):
                row: dict[str, Any] = {
                    "section": "pipeline",
                    "micro-batches": micro_batches,
                    "dp": dp,
                    "pp": pp,
                }
                for packing in ("original", "varlen"):
                    config = WlbConfig(packing=packing)
                    packer = make_packer(
                        config, COST, window=WINDOW, micro_batches=micro_batches, dp=dp, pp=pp
                    )
                    planner = Planner(Repeated(lengths), packer, global_tokens=micro_batches * dp * WINDOW)
                    over = []
                    for _ in range(
                        max(12, 60 * 64 // (micro_batches * dp)) if micro_batches * dp < 4096 else 8
                    ):
                        plan = planner.next_iteration()
                        assert plan is not None
                        grid = plan.micro_batches
                        pieces = [p.tokens for r in grid for b in r for p in b.pieces]
                        bound = step_bound(grid, int(COST.work(max(pieces))), pp)
                        over.append(step_work(grid, pp) / bound - 1)
                    row[packing] = f"{100 * float(np.mean(over)):.2f} %"
                    row[f"{packing} p95"] = f"{100 * float(np.percentile(over, 95)):.2f} %"
                    tick()
                yield row


def time_rows(tick: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Milliseconds of packing alone, per iteration; the documents are lognormal, 1,024 tokens on average."""
    sizes = [(4, 131072, 132), (4, 131072, 1024), (512, 32768, 8192)]
    sizes += [(1 << k, 32768, 1 << (k + 4)) for k in (6, 8, 10, 12, 14, 16)]
    for bins, window, documents in sizes:
        mean = bins * window / documents
        iterations = max(6, min(200, 200_000 // documents))
        lengths = lognormal(documents * (iterations + 1), seed=1, mean=mean, sigma=1.2, longest=window)
        for packing in ("fixed-greedy", "varlen"):
            timed = Timed(make_packer(WlbConfig(packing=packing), COST, window=window, micro_batches=bins))
            planner = Planner(Repeated(lengths), timed, global_tokens=bins * window)
            arrived = []
            for _ in range(iterations):
                plan = planner.next_iteration()
                assert plan is not None
                arrived.append(len(plan.arrived))
            seconds, each = timed.seconds[1:], float(np.mean(arrived))
            yield {
                "section": "time",
                "packing": packing,
                "micro-batches": bins,
                "documents": round(each),
                "p50 ms": f"{1e3 * float(np.median(seconds)):.2f}",
                "largest ms": f"{1e3 * max(seconds):.2f}",
                "ns / (n log2 n)": f"{1e9 * float(np.median(seconds)) / (each * np.log2(each)):.0f}",
            }
            tick()


def mean_over_shuffles(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["lengths"], row["window"], row["packing"]), []).append(row)
    means = []
    for group in groups.values():
        row = {k: v for k, v in group[0].items() if k != "shuffle"}
        for key in ("imbalance", "p95", "max", "slowdown", "delay", "latest", "ms"):
            row[key] = f"{np.mean([float(r[key]) for r in group]):.3f}"
        means.append(row)
    return means


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=Path, help="document lengths, .npy (default: paper-like, from a seed)"
    )
    parser.add_argument("--others", type=Path, help="other lengths for section others (default: web-like)")
    parser.add_argument("--out", type=Path, help="folder for packing.csv and delay.png")
    parser.add_argument("--sections", default="paper,delay,others,pipeline,time")
    args = parser.parse_args()
    sections = args.sections.split(",")
    if unknown := sorted({*sections} - {"paper", "delay", "others", "pipeline", "time"}):
        parser.error(
            f"unknown sections: {', '.join(unknown)}; choose from paper, delay, others, pipeline, time"
        )
    lengths = np.load(args.lengths) if args.lengths else KINDS["paper-like"](100_000, 0)
    others = np.load(args.others) if args.others else KINDS["web-like"](200_000, 0)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    )

    cases = list(paper_cases(lengths)) if "paper" in sections else []
    cases += delay_cases(lengths) if "delay" in sections else []
    cases += (
        other_cases(others, args.others.stem if args.others else "web-like") if "others" in sections else []
    )
    rows: list[dict[str, Any]] = []
    with progress(sum(case.iterations for case in cases)) as tick:
        for case in cases:
            rows.append(case.run(tick))
    piped = "pipeline" in sections
    with progress(36 * piped + 18 * ("time" in sections)) as tick:
        rows += pipeline_rows(lengths, tick) if piped else []
        rows += time_rows(tick) if "time" in sections else []

    for section in sections:
        shown = [row for row in rows if row["section"] == section]
        shown = mean_over_shuffles(shown) if section == "others" else shown
        if shown:
            header = [key for key in shown[0] if key != "section"]
            print_table(section, header, [[row[key] for key in header] for row in shown])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write(rows, args.out / "packing.csv")
        if "delay" in sections:
            draw_delay([row for row in rows if row["section"] == "delay"], args.out / "delay.png")


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    fresh.replace(path)


class progress:
    """A bar on stderr where it is a terminal and rich is installed; `with` gives what counts one step."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if total and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress

                self._bar = Progress(console=Console(stderr=True))
                self._task = self._bar.add_task("packing", total=total)
            except ImportError:
                pass

    def __enter__(self) -> Callable[[], None]:
        if self._bar is None:
            return lambda: None
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    main()
