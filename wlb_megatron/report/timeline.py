"""Pipeline steps as pictures (micro-batches by stage over time, colored by work), and as traces for Perfetto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.pipeline.schedule import Event, pipeline_events
from wlb_megatron.whole_files import renamed_at_end


class Drawn(NamedTuple):
    """A step to draw.

    work: each micro-batch's. groups: sizes of the groups whose backwards run last first, None if all are 1. documents:
    the document that each micro-batch has a chunk of, or -1; empty if there are no chunks. again: share of its forward
    that a backward repeats, [stage][micro-batch]; empty if none does.
    """

    title: str
    work: Sequence[float]
    groups: Sequence[int] | None = None
    documents: Sequence[int] = ()
    again: Sequence[Sequence[float]] = ()

    def document(self, micro_batch: int) -> int:
        return self.documents[micro_batch] if self.documents else -1


BACKWARD = 2.0
"""A backward's work over its forward's."""

NAMED, COLUMNS = 6, 3
"""Documents in chunks that a legend names, and its columns: more would be wider than the picture."""

CROWDED = 16
"""Micro-batches of a step above which edges are thin, so that colors are seen."""

LEGIBLE = 0.012
"""Of the time axis, at least: shorter bars have no number, which would lie over its neighbors."""


def draw_timelines(path: Path, plans: Sequence[Drawn], stages: int) -> list[float]:
    """Draw a 1F1B step for each plan, one above the other on one time axis.

    Micro-batches are shaded by work; those that share a document in chunks have the document's color, which a legend
    tells. What a backward repeats of its forward is darker.

    A micro-batch's forward takes its work, its backward BACKWARD times that and what it repeats, on each of `stages`
    equal stages: the times are simulated from work. The unit of time is the step's own work on one stage, so that steps
    of different work compare: 1 would be a stage that never waits. Returns each step's length in it. Writes a PNG,
    whole or not at all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Times of forwards and backwards, such that a stage that never waits takes 1, and the events of 1F1B.
    repeated = [_repeated(plan, stages) for plan in plans]
    forwards = [
        np.array(plan.work) / ((1 + BACKWARD + recomputed.max(axis=0)) * sum(plan.work))
        for plan, recomputed in zip(plans, repeated, strict=True)
    ]
    steps = [
        pipeline_events(
            np.broadcast_to(forward, recomputed.shape)[:, None],
            ((BACKWARD + recomputed) * forward)[:, None],
            groups=plan.groups,
        )
        for plan, forward, recomputed in zip(plans, forwards, repeated, strict=True)
    ]
    lengths = [max(event.end for event in events) for events in steps]
    # A row for each step: bars, what they repeat, numbers, a legend of documents in chunks.
    heaviest = max(max(plan.work) / sum(plan.work) for plan in plans)
    figure, rows = pyplot.subplots(
        len(plans), 1, sharex=True, squeeze=False, figsize=(11, 1.1 + 1.3 * len(plans)), layout="constrained"
    )
    shades, hues = pyplot.get_cmap("Greys"), pyplot.get_cmap("tab10")
    if not any(map(_colors, plans)):
        shades = pyplot.get_cmap("viridis_r")
    for plan, events, forward, recomputed, length, axes in zip(
        plans, steps, forwards, repeated, lengths, rows[:, 0], strict=True
    ):
        colors = _colors(plan)
        for event in events:
            share = plan.work[event.micro_batch] / sum(plan.work) / heaviest
            color = colors.get(plan.document(event.micro_batch))
            bar = partial(axes.barh, event.stage, left=event.start, height=0.86)
            bar(
                event.end - event.start,
                color=shades(share) if color is None else hues(color),
                edgecolor="white",
                linewidth=1.2 if len(plan.work) <= CROWDED else 0.4,
                hatch="//" if event.backward else None,
            )
            made_again = recomputed[event.stage, event.micro_batch] * forward[event.micro_batch]
            if event.backward and made_again:
                bar(made_again, color="black", alpha=0.35, linewidth=0)
            if event.end - event.start < LEGIBLE * max(lengths):
                continue
            axes.text(
                (event.start + event.end) / 2,
                event.stage,
                f"{event.micro_batch}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if share > 0.5 or color is not None else "black",
            )
        if colors:
            axes.legend(
                [pyplot.Rectangle((0, 0), 1, 1, color=hues(color)) for color in colors.values()][:NAMED],
                _legend(plan)[:NAMED],
                **{"loc": "upper left", "bbox_to_anchor": (0, -0.12), "ncols": COLUMNS, "fontsize": 7},
                frameon=False,
            )
        axes.axvline(length, color="crimson", linewidth=1.5)
        axes.set_title(
            f"{plan.title}: the step takes {length:.2f} times its work, stages are busy {1 / length:.0%} of it",
            loc="left",
            fontsize=10,
        )
        axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
        axes.invert_yaxis()
    rows[-1, 0].set_xlabel(
        "time (the step's work on a stage = 1, simulated from work; hatched: backward"
        + ("; dark: recomputed" if any(recomputed.any() for recomputed in repeated) else "")
        + "; number: micro-batch)",
        labelpad=4 + 14 * -(-min(NAMED, len(_colors(plans[-1]))) // COLUMNS),  # below the legend
    )
    scale = pyplot.cm.ScalarMappable(norm=pyplot.Normalize(0, heaviest), cmap=shades)
    figure.colorbar(scale, ax=rows[:, 0].tolist(), label="share of the step's work")
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120)
    pyplot.close(figure)
    return lengths


def _repeated(plan: Drawn, stages: int) -> npt.NDArray[np.float64]:
    """float[stage, micro-batch], see Drawn.again."""
    return np.array(plan.again if plan.again else np.zeros((stages, len(plan.work))), dtype=np.float64)


def _colors(plan: Drawn) -> dict[int, int]:
    """Of each document in chunks, in order, which of ten hues it has; neighbors differ."""
    in_chunks = (document for document in dict.fromkeys(plan.documents) if document >= 0)
    return {document: number % 10 for number, document in enumerate(in_chunks)}


def _legend(plan: Drawn) -> list[str]:
    """One label a document in chunks; the last one that is named tells how many others there are."""
    counts = Counter(document for document in plan.documents if document >= 0)
    labels = [f"document {document} in {count} chunks" for document, count in counts.items()]
    if len(labels) > NAMED:
        labels[NAMED - 1] += f" (and {len(labels) - NAMED} more documents)"
    return labels


def chrome_trace(
    groups: Sequence[Sequence[Event]],
    documents: Sequence[Sequence[int]],
    thread: Callable[[int], str],
) -> dict[str, Any]:
    """Trace Event Format, JSON-able.

    Micro-batches with a chunk of a document carry a letter for it in their names, by which viewers choose a color:
    "F3 (B)"; "legend" names the documents.

    Args:
        groups: each data-parallel rank's measured events (nanoseconds), a process each; stages are threads.
        documents: by rank, the document that each micro-batch has a chunk of, or -1.
        thread: returns the name of a stage's row.
    """
    events: list[dict[str, Any]] = []
    legend: dict[str, str] = {}
    for rank, group in enumerate(groups):
        chunks_of = dict(enumerate(documents[rank]))
        in_chunks = [document for document in dict.fromkeys(documents[rank]) if document >= 0]
        letters = {document: letter(number) for number, document in enumerate(in_chunks)}
        legend |= {f"data-parallel rank {rank}, ({x})": f"document {d} in chunks" for d, x in letters.items()}
        events.append(_named("process_name", rank, 0, f"data-parallel rank {rank} (measured)"))
        for stage in sorted({event.stage for event in group}):
            events.append(_named("thread_name", rank, stage, thread(stage)))
        for event in group:
            name = f"{'B' if event.backward else 'F'}{event.micro_batch}"
            name += f".{event.chunk}" if event.chunk else ""
            arguments = {"micro_batch": event.micro_batch, "chunk": event.chunk}
            if (document := chunks_of.get(event.micro_batch, -1)) >= 0:
                name += f" ({letters[document]})"
                arguments["document_in_chunks"] = document
            events.append(
                {
                    "name": name,
                    "cat": "backward" if event.backward else "forward",
                    "ph": "X",
                    "ts": event.start / 1000,
                    "dur": (event.end - event.start) / 1000,
                    "pid": rank,
                    "tid": event.stage,
                    "args": arguments,
                }
            )
    other_data = {"source": "measured"} | ({"legend": legend} if legend else {})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other_data}


def letter(number: int) -> str:
    """A document's letter: A, B, .. Z, AA, AB, .. Viewers leave digits out of colors."""
    return (letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
