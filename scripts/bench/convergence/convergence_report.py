"""What convergence.py's runs say: tables, a CSV with a row a run, and a picture.

python -m scripts.bench.convergence.convergence_report RUNS.jsonl [RUNS.jsonl ...] --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.csv_files import write_csv
from wlb_megatron.whole_files import renamed_at_end

ORDER = ("plain", "wlb", "wlb-equal", "no-delay", "cut", "chunks", "sorted", "unmasked")
PAIRS = (("wlb", "no-delay"), ("wlb-equal", "no-delay"), ("no-delay", "cut"), ("chunks", "no-delay"))
"""What delay does, also with equal weights of tokens; what cutting documents at windows does; what should be zero."""
Run = dict[str, Any]
Floats = npt.NDArray[np.float64]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of these files; none of a file that is not there. A line that was cut off is left out.

    SystemExit where they were trained on other documents, or a run comes twice.
    """
    runs: dict[tuple[str, int], Run] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                run = json.loads(line)
            except ValueError:
                continue
            if runs and run["corpus"] != next(iter(runs.values()))["corpus"]:
                raise SystemExit(f"{path} holds runs on other documents: report them apart")
            runs[run["arm"], run["seed"]] = run
    return list(runs.values())


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Mean over the first axis and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.inf


def interval(error: float, count: int) -> float:
    """Half the width of the 95 % interval of a mean over `count` values (Student's t, by its expansion in 1/df)."""
    z, df = 1.959964, max(count - 1, 1)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return error * (z + first / df + second / df**2 + third / df**3)


def paired(runs: list[Run], arm: str, other: str = "plain") -> tuple[Floats, Floats]:
    """An arm's loss minus the other's of the same seeds: of all held-out tokens [seeds], by length [seeds, classes]."""
    of = {(run["arm"], run["seed"]): run for run in runs}
    seeds = sorted(seed for name, seed in of if name == arm and (other, seed) in of)
    differences, by_length = (
        np.array([np.subtract(of[arm, seed][key], of[other, seed][key]) for seed in seeds])
        for key in ("held_out_loss", "loss_by_length")
    )
    return differences, by_length


def report(runs: list[Run], out: Path) -> None:
    """Print and write the comparison."""
    out.mkdir(parents=True, exist_ok=True)
    arms = [arm for arm in ORDER if any(run["arm"] == arm for run in runs)]
    others = [arm for arm in arms[1:] if len(paired(runs, arm)[0])]
    text = "\n\n".join(
        [
            losses_table(runs, arms, others),
            lengths_table(runs, others),
        ]
    )
    print(f"\n{text}")
    with renamed_at_end(out / "convergence.txt") as scratch:
        scratch.write_text(text + "\n", encoding="utf-8")
    write_csv(
        out / "convergence.csv",
        [row(run) for run in sorted(runs, key=lambda run: (arms.index(run["arm"]), run["seed"]))],
    )
    draw(out / "convergence.png", runs, others)


def losses_table(runs: list[Run], arms: list[str], others: list[str]) -> str:
    heads = (
        "arm",
        "seeds",
        "loss",
        "minus plain's",
        "std. error",
        "95 % interval",
        "deviation",
        "imbalance",
        "token delay",
        "after a cut",
        "seen",
        "s a run",
    )
    rows = [heads]
    for arm in arms:
        runs_of_arm = [run for run in runs if run["arm"] == arm]
        loss, balance, delay, seconds = (
            float(np.mean([run[key] for run in runs_of_arm]))
            for key in ("held_out_loss", "imbalance", "token_delay", "seconds")
        )
        against = ("", "", "", "")
        if arm in others:
            difference, _ = paired(runs, arm)
            mean, error = mean_and_error(difference)
            half = interval(error, len(difference))
            against = (
                f"{mean:+.4f}",
                f"{error:.4f}",
                f"{mean - half:+.4f} to {mean + half:+.4f}",
                f"{error * len(difference) ** 0.5:.4f}",
            )
        after, seen = (
            f"{np.mean([run[key] for run in runs_of_arm]):.3g}" if key in runs_of_arm[0] else ""
            for key in ("after_a_cut", "earlier_tokens_seen")
        )
        shown = f"{balance:.3f}", f"{delay:.3f}", after, seen, f"{seconds:.0f}"
        rows.append((arm, str(len(runs_of_arm)), f"{loss:.4f}", *against, *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells_of_row, widths, strict=True)).rstrip()
        for cells_of_row in rows
    ]
    plain = np.array([run["held_out_loss"] for run in runs if run["arm"] == "plain"])
    lines.append(f"plain's standard deviation over {len(plain)} seeds: {plain.std(ddof=1):.4f}")
    for arm, other in PAIRS:
        difference, _ = paired(runs, arm, other)
        if len(difference) > 1:
            mean, error = mean_and_error(difference)
            lines.append(f"{arm} minus {other}, {len(difference)} seeds: {mean:+.4f} +- {error:.4f}")
    return "\n".join(lines)


def lengths_table(runs: list[Run], others: list[str]) -> str:
    ends, counts = runs[0]["length_up_to"], runs[0]["tokens_by_length"]
    lines = ["loss minus plain's (+- standard error) on held-out documents of so many tokens at most"]
    lines.append("arm        " + "".join(f"{end:>20,}" for end in ends))
    lines.append("tokens     " + "".join(f"{count:>20,}" for count in counts))
    for arm in others:
        _, by_length = paired(runs, arm)
        cells = [mean_and_error(column) for column in by_length.T]
        lines.append(f"{arm:9}  " + "".join(f"{mean:+.4f} +- {error:.4f}".rjust(20) for mean, error in cells))
    return "\n".join(lines)


def row(run: Run) -> dict[str, Any]:
    """Of the CSV."""
    alone = ("arm", "seed", "held_out_loss", "token_delay", "imbalance", "tokens", "seconds")
    by_length = zip(run["length_up_to"], run["loss_by_length"], strict=True)
    return {
        **{key: run[key] for key in alone},
        **{key: run.get(key, "") for key in ("after_a_cut", "earlier_tokens_seen")},
        **{f"loss_up_to_{end}": round(loss, 6) for end, loss in by_length},
    }


def draw(path: Path, runs: list[Run], others: list[str]) -> None:
    """Each arm's difference from plain, all seeds and the 95 % interval of their mean; and by length of document."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    ends = runs[0]["length_up_to"]
    for at, arm in enumerate(others):
        differences, by_length = paired(runs, arm)
        mean, error = mean_and_error(differences)
        colour = f"C{at}"
        spread = at + 0.08 + 0.2 * np.linspace(0, 1, len(differences))
        left.plot(spread, differences, ".", color=colour, alpha=0.5, markersize=4)
        left.errorbar(at - 0.1, mean, interval(error, len(differences)), fmt="o", color=colour, capsize=4)
        cells = [mean_and_error(column) for column in by_length.T]
        right.errorbar(
            np.arange(len(ends)) + 0.1 * (at - len(others) / 2),
            [mean for mean, _ in cells],
            [interval(error, len(differences)) for _, error in cells],
            fmt="o-",
            color=colour,
            capsize=3,
            label=arm,
            markersize=4,
            linewidth=0.8,
        )
    left.set_xticks(range(len(others)), others)
    right.set_xticks(
        range(len(ends)),
        [f"{low + 1:,} to {end:,}" for low, end in zip([0, *ends], ends, strict=False)],
        fontsize=8,
    )
    left.set_ylabel("held-out loss minus plain's (nats a token)")
    right.set_xlabel("tokens of the held-out document")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.8)
        if max(map(abs, axes.get_ylim())) > 0.06:
            axes.set_yscale("symlog", linthresh=0.05)
        axes.grid(axis="y", linewidth=0.3)
    with renamed_at_end(path) as scratch:
        figure.savefig(scratch, dpi=120, format="png")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="runs.jsonl of one or more calls")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table, CSV and picture")
    options = parser.parse_args()
    runs = read_runs(options.runs)
    if not any(run["arm"] == "plain" for run in runs):
        raise SystemExit("no run of plain in these files")
    report(runs, options.out)


if __name__ == "__main__":
    main()
