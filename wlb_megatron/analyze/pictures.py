"""What analyze found, as PNGs. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wlb_megatron.analyze.comparison import Analysis
from wlb_megatron.analyze.measure import Measured
from wlb_megatron.documents.corpus import Lengths, blocks
from wlb_megatron.errors import WlbError, install
from wlb_megatron.pipeline.kept_layers import recomputed_array
from wlb_megatron.plan import IterationPlan, MicroBatch
from wlb_megatron.report.timeline import Drawn, draw_timelines
from wlb_megatron.simulator.iteration import recomputed_by_flags
from wlb_megatron.whole_files import renamed_at_end

_MOST_EVENTS = 512
_COLORS = ("tab:gray", "tab:blue")


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WlbError(f"drawing needs matplotlib: {install('report')}, or leave --pictures out") from None


def draw_all(folder: Path, analysis: Analysis) -> list[Path]:
    """Draw step.png, timeline.png, lengths.png, work.png and delay.png; each appears whole or not at all."""
    records = analysis.measured
    pictures = {
        "lengths": lambda axes: _draw_lengths(axes, analysis.lengths, analysis.job.window, analysis.capacity),
        "work": lambda axes: _draw_work(axes, records),
        "delay": lambda axes: _draw_delay(axes, records),
    }
    steps = records[0][1].steps
    number = int(np.abs(steps - steps.mean()).argmin())  # of arrival order; the other's has arrived with it
    runs = [
        (name, run.plans[len(run.plans) - len(steps) + number])
        for (name, _), run in zip(records, analysis.runs, strict=True)
    ]
    paths = [_save(folder / f"{name}.png", draw) for name, draw in pictures.items()]
    step = _save(folder / "step.png", lambda axes: draw_step(axes, runs), height=6.0)
    return [step, _draw_timeline(folder / "timeline.png", analysis, number), *paths]


def _save(path: Path, draw: Callable[[Any], None], height: float = 4.2) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, height), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120)
    pyplot.close(figure)
    return path


def _draw_lengths(axes: Any, lengths: Lengths, window: int, capacity: int) -> None:
    edges = np.geomspace(1, max(int(lengths.max()), window, capacity) + 1, 60)  # empty documents are below
    documents, tokens = np.zeros((2, len(edges) - 1))
    for block in blocks(lengths):
        documents += np.histogram(block, edges)[0]
        tokens += np.histogram(block, edges, weights=block)[0]
    for counts, label, color in ((documents, "documents", "tab:gray"), (tokens, "tokens", "tab:blue")):
        axes.stairs(
            100 * counts / counts.sum(),
            edges,
            label=label,
            color=color,
            fill=color == "tab:gray",
            alpha=0.8,
        )
    for place, label in ((window, "window"), (capacity, "Lmax")):
        axes.axvline(place, color="crimson", linestyle="--" if label == "Lmax" else "-", linewidth=1)
        axes.text(
            place,
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


def _draw_work(axes: Any, records: Sequence[tuple[str, Measured]]) -> None:
    relative = [np.concatenate([(grid / grid.mean()).ravel() for grid in m.work]) for _, m in records]
    edges = np.linspace(0, max(map(np.max, relative)) * 1.02, 80)
    for (name, figures), values, color in zip(records, relative, _COLORS, strict=True):
        axes.hist(
            values,
            edges,
            weights=np.full(len(values), 100 / len(values)),
            color=color,
            alpha=0.6,
            label=f"{name}: mean imbalance of work {figures.imbalance.mean:.3f}",
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("work of a micro-batch over the mean of its iteration")
    axes.set_ylabel("micro-batches (%)")
    axes.legend(frameon=False)


def _draw_delay(axes: Any, records: Sequence[tuple[str, Measured]]) -> None:
    last = max(max(m.delays, default=0) for _, m in records)
    for number, (name, figures) in enumerate(records):
        total = max(figures.delays.total(), 1)
        shares = [100 * figures.delays[delay] / total for delay in range(last + 1)]
        axes.bar(
            np.arange(last + 1) + 0.4 * (number - 0.5),
            shares,
            0.4,
            color=_COLORS[number],
            label=f"{name}: mean {figures.token_delay.mean:.2f} iterations",
        )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("delay (iterations from arrival to training)")
    axes.set_ylabel("tokens (%)")
    axes.legend(frameon=False)


def draw_step(axes: Any, runs: Sequence[tuple[str, IterationPlan]]) -> None:
    """Micro-batches of one iteration, each a bar of its documents' work, the longest document first.

    runs: (name, plan). Ranks of data parallelism lie side by side; a bar's parts are documents, shaded by their length.
    """
    length = max(
        piece.prefix + piece.tokens
        for _, plan in runs
        for _, micro_batch in _columns(plan)
        for piece in micro_batch.pieces
    )
    x, ticks = 0.0, []
    for name, plan in runs:
        begin = x
        columns = _columns(plan)[:MOST_BARS]
        works = [micro_batch.work for _, micro_batch in columns]
        for _, micro_batch in columns:
            weights = [piece.tokens * (1.0 + piece.prefix + piece.tokens / 2) for piece in micro_batch.pieces]
            bottom = 0.0
            for weight, piece in sorted(zip(weights, micro_batch.pieces, strict=True), reverse=True):
                share = micro_batch.work / max(works) * weight / sum(weights)
                shade = 0.15 + 0.85 * ((piece.prefix + piece.tokens) / length) ** 0.5
                axes.bar(
                    x, share, 0.85, bottom, color=(0.12, 0.35, 0.65, shade), edgecolor="white", linewidth=0.4
                )
                bottom += share
            x += 1
        mean = sum(works) / len(works) / max(works)
        axes.plot([begin - 0.5, x - 0.5], [mean, mean], color="crimson", linewidth=1)
        ticks.append(
            ((begin + x - 1) / 2, f"{name}\niteration {plan.iteration}: max/mean work {1 / mean:.2f}")
        )
        x += 1.5
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("work of a micro-batch over its step's largest")
    axes.set_title(
        "One step of these documents: a bar is a micro-batch, its parts documents (darker: longer), red the mean",
        loc="left",
        fontsize=9,
    )


MOST_BARS = 64
"""Micro-batches of a step that a picture shows."""


def _columns(plan: IterationPlan) -> list[tuple[int, MicroBatch]]:
    """(data-parallel rank, micro-batch), rank by rank."""
    return [
        (rank, micro_batch)
        for rank, column in enumerate(zip(*plan.micro_batches, strict=True))
        for micro_batch in column
    ]


def _draw_timeline(path: Path, analysis: Analysis, iteration: int) -> Path:
    """Of each, the same iteration on its slowest data-parallel rank, by simulated times."""
    model, stages = analysis.job.model, range(analysis.job.model.layout.pipeline)
    limit = max(1, _MOST_EVENTS // (2 * len(stages)))
    plans = []
    for (name, figures), run in zip(analysis.measured, analysis.runs, strict=True):
        times = figures.simulated.micro_batches[iteration]
        slowest = int((times.sum(axis=0) + (len(stages) - 1) * times.max(axis=0)).argmax())
        title = name + (f", first {limit} micro-batches" if len(times) > limit else "")
        # A step that is drawn in part is drawn without its groups, which may reach beyond that part.
        fits = len(times) <= limit and bool(figures.orders)
        groups = figures.orders[iteration][slowest] if fits else None
        chunked = figures.chunked[iteration][slowest][:limit] if figures.orders else ()
        numbers = recomputed_by_flags(times[None].astype(np.int64), model)[0]
        if run.kept is not None:
            numbers = recomputed_array(run.kept[iteration])
        layers = np.array([sum(model.layers_of(p, c) for c in range(model.layout.virtual)) for p in stages])
        repeats = numbers[slowest].sum(axis=1)[:, :limit] / layers[:, None]
        plans.append(Drawn(title, times[:limit, slowest].tolist(), groups, chunked, repeats.tolist()))
    draw_timelines(path, plans, len(stages))
    return path
