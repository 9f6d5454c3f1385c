"""The sections of bench_packing.py: which packers over which lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from scripts.bench.packing.packing_rows import COST, WINDOW, Case, Timed, configured, plain
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.synthetic import lognormal
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import Packer, PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.packing.varlen.assign import step_bound, step_work
from wlb_megatron.packing.varlen.thresholds import Repeated


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


def pipeline_rows(lengths: np.ndarray) -> Iterator[dict[str, Any]]:
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
                        PackingJob(config, COST, window=WINDOW, micro_batches=micro_batches, dp=dp, pp=pp)
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
                yield row


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


def large_rows() -> Iterator[dict[str, Any]]:
    """The same of up to a million documents; and of ones of which no two fit together in a window and none leaves room
    for another (the worst case of first-fit packers)."""
    yield from _log_normal([(1 << k, 32768, 1 << (k + 4)) for k in (12, 14, 16)], "large")
    for bins in (1 << 14, 1 << 20):
        rng = np.random.default_rng(1)
        lengths = rng.integers(3 * 32768 // 4 + 1, 32768 + 1, 5 * bins)
        yield _time("varlen", "above half of Lmax", lengths, bins, 32768, 3) | {"section": "large"}


def _log_normal(sizes: Sequence[tuple[int, int, int]], section: str = "time") -> Iterator[dict[str, Any]]:
    """sizes: micro-batches, window (tokens), and documents of an iteration."""
    for bins, window, documents in sizes:
        mean = bins * window / documents
        iterations = max(6, min(200, 200_000 // documents))
        lengths = lognormal(documents * (iterations + 1), seed=1, mean=mean, sigma=1.2, max_tokens=window)
        for packing in ("fixed-greedy", "varlen"):
            yield _time(packing, "log-normal", lengths, bins, window, iterations) | {"section": section}


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
    timed = Timed(make_packer(PackingJob(config, COST, window=window, micro_batches=bins, pp=pp)))
    planner = Planner(Repeated(lengths), timed, global_tokens=bins * window)
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
