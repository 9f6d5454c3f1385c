"""Pictures of pipeline steps: micro-batches by stage over time, coloured by work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from wlb_megatron.pipeline.schedule import pipeline_events


def draw_timelines(
    path: Path, plans: Sequence[tuple[str, Sequence[float]]], stages: int, *, backward: float = 2.0
) -> list[float]:
    """Draw a 1F1B step for each (title, work of each micro-batch), one above the other on one time axis.

    A micro-batch's forward takes its work, its backward `backward` times that, on each of `stages` equal stages:
    the times are simulated from work. The unit of time is the step's own work on one stage, so that steps of
    different work compare: 1 would be a stage that never waits. Returns each step's length in it. Writes a PNG,
    whole or not at all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = [[w / ((1 + backward) * sum(work)) for w in work] for _, work in plans]
    steps = [pipeline_events(share, [backward * s for s in share], stages) for share in shares]
    lengths = [max(event.end for event in events) for events in steps]
    heaviest = max(max(work) / sum(work) for _, work in plans)
    figure, rows = pyplot.subplots(
        len(plans), 1, sharex=True, squeeze=False, figsize=(11, 1.1 + 1.3 * len(plans)), layout="constrained"
    )
    shades = pyplot.get_cmap("viridis_r")
    for (title, work), events, length, axes in zip(plans, steps, lengths, rows[:, 0], strict=True):
        for event in events:
            share = work[event.micro_batch] / sum(work) / heaviest
            axes.barh(
                event.stage,
                event.end - event.start,
                left=event.start,
                height=0.86,
                color=shades(share),
                edgecolor="white",
                linewidth=1.2,
                hatch="//" if event.backward else None,
            )
            axes.text(
                (event.start + event.end) / 2,
                event.stage,
                f"{event.micro_batch}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if share > 0.5 else "black",
            )
        axes.axvline(length, color="crimson", linewidth=1.5)
        axes.set_title(
            f"{title}: the step takes {length:.2f} times its work, stages are busy {1 / length:.0%} of it",
            loc="left",
            fontsize=10,
        )
        axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
        axes.invert_yaxis()
    rows[-1, 0].set_xlabel(
        "time (the step's work on a stage = 1, simulated from work; hatched: backward; number: micro-batch)"
    )
    colours = pyplot.cm.ScalarMappable(norm=pyplot.Normalize(0, heaviest), cmap=shades)
    figure.colorbar(colours, ax=rows[:, 0].tolist(), label="share of the step's work")
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial{path.suffix}")
    figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    partial.replace(path)
    return lengths
