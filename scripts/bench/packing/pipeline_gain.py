"""What the number of micro-batches and chunks gain in a pipeline, counted from plans: 1F1B over what `inspect` prints.

python -m scripts.bench.packing.pipeline_gain --lengths LENGTHS.npy

Work of tokens [s, e) of a document is that of [0, e) less that of [0, s), where d tokens have d + d*d / --quadratic-at,
and 1,000 tokens a micro-batch beside; a forward takes a third. Prints the time a token of arrival order over each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from wlb_megatron.pipeline.step_time import step_time

WAYS = {
    "one micro-batch a window": ["--micro-batches-per-window", "1", "--chunks", "off"],
    "whole documents": ["--chunks", "off"],
    "chunks, none delayed": ["--chunks", "on", "--max-delay", "0"],
}
OWN = 1000
"""Tokens of linear work that a micro-batch adds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", required=True, help="as inspect takes them")
    parser.add_argument("--window", type=int, default=131072, help="tokens (default: 131072)")
    parser.add_argument("--windows", type=int, default=4, help="of a step (default: 4)")
    parser.add_argument("--pp", type=int, default=4, help="stages (default: 4)")
    parser.add_argument("--quadratic-at", type=int, default=24576, help="tokens (default: 24576)")
    parser.add_argument("--iterations", type=int, default=150)
    options = parser.parse_args()
    plain, _ = measured(options, ["--packing", "original"])
    for name, flags in WAYS.items():
        time, largest = measured(options, flags)
        print(
            f"{name:26}{plain / time:.3f} x arrival order, largest micro-batch {largest:.2f} windows",
            flush=True,
        )


def planned(options: argparse.Namespace, flags: list[str]) -> list[list[dict[str, Any]]]:
    """The micro-batches of each iteration, as inspect prints them."""
    command = [sys.executable, "-m", "wlb_megatron.cli", "inspect", "--json", "-"]
    for name in ("lengths", "window", "pp", "quadratic_at", "iterations"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    inspected = subprocess.run(
        [*command, "--micro-batches", str(options.windows), *flags], stdout=subprocess.PIPE, check=True
    )
    return [iteration["micro_batches"] for iteration in json.loads(inspected.stdout)["iterations"]]


def measured(options: argparse.Namespace, flags: list[str]) -> tuple[float, float]:
    """Work units a trained token, and the most tokens of a micro-batch in windows."""
    time = trained = largest = 0
    for grid in planned(options, flags):
        tokens = [tokens_of(micro_batch) for micro_batch in grid]
        works = [round(1024 * work(micro_batch, options.quadratic_at)) for micro_batch in grid]
        time += step_time(works, [2 * forward for forward in works], options.pp, groups(grid))
        trained, largest = trained + sum(tokens), max(largest, *tokens)
    return time / trained, largest / options.window


def tokens_of(micro_batch: dict[str, Any]) -> int:
    return sum(end - start for _, start, end in micro_batch["documents"])


def work(micro_batch: dict[str, Any], at: int) -> float:
    """Tokens of linear work."""
    documents = micro_batch["documents"]
    spans = [
        (prefix, prefix + end - start)
        for (_, start, end), prefix in zip(documents, prefixes(micro_batch), strict=True)
    ]
    return OWN + sum(end + end * end / at - begin - begin * begin / at for begin, end in spans)


def prefixes(micro_batch: dict[str, Any]) -> list[int]:
    """Earlier tokens that each entry attends to; plans without chunks do not tell them."""
    return micro_batch.get("prefix") or [0] * len(micro_batch["documents"])


def groups(grid: list[dict[str, Any]]) -> tuple[int, ...]:
    """Sizes of the groups: a micro-batch that goes on with a document is of the group before it."""
    sizes: list[int] = []
    for micro_batch in grid:
        if any(prefixes(micro_batch)):
            sizes[-1] += 1
        else:
            sizes.append(1)
    return tuple(sizes)


if __name__ == "__main__":
    main()
