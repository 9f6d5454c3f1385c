"""What analyze found, as PNGs. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.analyze.measure import Layout, Measured
from wlb_megatron.errors import WlbError
from wlb_megatron.extras import install
from wlb_megatron.packing.blocks import Lengths, blocks
from wlb_megatron.report.timeline import Drawn, draw_timelines

_MOST_EVENTS = 512
_COLOURS = ("tab:gray", "tab:blue")


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WlbError(f"pictures need matplotlib: {install('report')}, or leave --out away") from None


def draw_all(
    folder: Path,
    lengths: Lengths,
    measured: Sequence[tuple[str, Measured]],
    layout: Layout,
    capacity: int,
) -> list[Path]:
    """Draw lengths.png, work.png, delay.png and timeline.png; each appears whole or not at all.

    lengths: integers[n], tokens of each document. measured: (name, figures), the baseline first. capacity: Lmax.
    """
    pictures = {
        "lengths": lambda axes: _draw_lengths(axes, lengths, layout.window, capacity),
        "work": lambda axes: _draw_work(axes, measured),
        "delay": lambda axes: _draw_delay(axes, measured),
    }
    paths = [_save(folder / f"{name}.png", draw) for name, draw in pictures.items()]
    return [*paths, _draw_timeline(folder / "timeline.png", measured, layout)]


def _save(path: Path, draw: Callable[[Any], None]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial.png")
    figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    partial.replace(path)
    return path


def _draw_lengths(axes: Any, lengths: Lengths, window: int, capacity: int) -> None:
    edges = np.geomspace(1, max(int(lengths.max()), window, capacity) + 1, 60)  # empty documents are below
    documents, tokens = np.zeros((2, len(edges) - 1))
    for block in blocks(lengths):
        documents += np.histogram(block, edges)[0]
        tokens += np.histogram(block, edges, weights=block)[0]
    for counts, label, colour in ((documents, "documents", "tab:gray"), (tokens, "tokens", "tab:blue")):
        axes.stairs(
            100 * counts / counts.sum(),
            edges,
            label=label,
            color=colour,
            fill=colour == "tab:gray",
            alpha=0.8,
        )
    for at, label in ((window, "window"), (capacity, "Lmax")):
        axes.axvline(at, color="crimson", linestyle="--" if label == "Lmax" else "-", linewidth=1)
        axes.text(
            at,
            axes.get_ylim()[1],
            f"{label} ",
            rotation=90,
            ha="right",
            va="top",
            color="crimson",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("document length (tokens)")
    axes.set_ylabel("share of all (%)")
    axes.set_title(
        f"{int(documents.sum()):,} documents, {int(tokens.sum()):,} tokens", loc="left", fontsize=10
    )
    axes.legend(frameon=False)


def _draw_work(axes: Any, measured: Sequence[tuple[str, Measured]]) -> None:
    relative = [np.concatenate([(grid / grid.mean()).ravel() for grid in m.work]) for _, m in measured]
    edges = np.linspace(0, max(map(np.max, relative)) * 1.02, 80)
    for (name, figures), values, colour in zip(measured, relative, _COLOURS, strict=True):
        axes.hist(
            values,
            edges,
            weights=np.full(len(values), 100 / len(values)),
            color=colour,
            alpha=0.6,
            label=f"{name}: mean imbalance {figures.imbalance.mean:.3f}",
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("work of a micro-batch over the mean of its iteration")
    axes.set_ylabel("micro-batches (%)")
    axes.legend(frameon=False)


def _draw_delay(axes: Any, measured: Sequence[tuple[str, Measured]]) -> None:
    last = max(max(m.delays, default=0) for _, m in measured)
    for at, (name, figures) in enumerate(measured):
        total = max(figures.delays.total(), 1)
        shares = [100 * figures.delays[delay] / total for delay in range(last + 1)]
        axes.bar(
            np.arange(last + 1) + 0.4 * (at - 0.5),
            shares,
            0.4,
            color=_COLOURS[at],
            label=f"{name}: mean {figures.token_delay.mean:.2f} iterations",
        )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("delay (iterations from arrival to training)")
    axes.set_ylabel("tokens (%)")
    axes.legend(frameon=False)


def _draw_timeline(path: Path, measured: Sequence[tuple[str, Measured]], layout: Layout) -> Path:
    """Of each, the iteration nearest to its mean step, on that iteration's slowest data-parallel rank."""
    most = max(1, _MOST_EVENTS // (2 * layout.pp))
    plans = []
    for name, figures in measured:
        steps = figures.steps
        iteration = int(np.abs(steps - steps.mean()).argmin())
        times = figures.times[iteration]
        slowest = int((times.sum(axis=0) + (layout.pp - 1) * times.max(axis=0)).argmax())
        title = f"{name}, iteration {iteration}" + (
            f", first {most} micro-batches" if len(times) > most else ""
        )
        # A step that is drawn in part is drawn without its groups, which may reach beyond that part.
        whole = len(times) <= most
        groups = figures.orders[iteration][slowest] if whole and figures.orders else None
        chunked = figures.chunked[iteration][slowest]
        plans.append(Drawn(title, times[:most, slowest].tolist(), groups, chunked[:most]))
    draw_timelines(path, plans, layout.pp)
    return path
