"""What padding micro-batches to a few fixed sizes would cost, counted from plans.

python -m scripts.bench.packing.padded_rows --lengths LENGTHS.npy

CUDA graphs of the MLPs take one of a few numbers of rows: Lmax, and so many smaller ones an octave. The buffers of
--tp-comm-overlap take Lmax alone (0 an octave). A micro-batch gets the next size up. Its padding costs linear work, in
the MLPs (--mlp of a layer's parameters) or in all matrix products, and no attention. Steps are those of pipeline_gain.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from scripts.bench.packing.pipeline_gain import groups, planned, tokens_of, work
from wlb_megatron.pipeline.step_time import step_time

PLANS = {
    "no pipeline": (1, []),
    "PP=4, whole documents": (4, ["--chunks", "off"]),
    "PP=4, chunks": (4, ["--chunks", "on", "--max-delay", "0"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", required=True, help="as inspect takes them")
    parser.add_argument("--window", type=int, default=65536, help="tokens (default: 65536)")
    parser.add_argument("--windows", type=int, default=4, help="of a step (default: 4)")
    parser.add_argument("--octave", type=int, nargs="+", default=[0, 1, 2, 4], help="sizes an octave")
    parser.add_argument("--mlp", type=float, default=0.77, help="share of the MLP (default: 0.77)")
    parser.add_argument("--quadratic-at", type=int, default=24576, help="tokens (default: 24576)")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    print(f"{'':24}{'sizes an octave':>16}{'met':>5}{'rows':>7}{'step, MLPs padded':>19}{'all padded':>12}")
    for name, (options.pp, flags) in PLANS.items():
        grids = planned(options, flags)
        tokens = [tokens_of(micro_batch) for grid in grids for micro_batch in grid]
        usual = steps(grids, options, 0.0, lambda rows: rows)
        for octave in options.octave:

            def size(rows: int, octave: int = octave) -> int:
                return padded(rows, octave, options.window * 3 // 2)

            sizes = [size(rows) for rows in tokens]
            mlps, everything = (steps(grids, options, share, size) / usual for share in (options.mlp, 1.0))
            print(
                f"{name:24}{octave:16}{len(set(sizes)):5}{sum(sizes) / sum(tokens):7.2f}{mlps:19.3f}{everything:12.3f}",
                flush=True,
            )


def padded(rows: int, octave: int, longest: int) -> int:
    """The least size that holds the rows: 3 of 8 with one size an octave are padded to 4, with none to 8."""
    return (
        int(longest / 2 ** (math.floor(octave * math.log2(longest / rows)) / octave)) if octave else longest
    )


def steps(
    grids: list[list[dict[str, Any]]], options: argparse.Namespace, share: float, size: Callable[[int], int]
) -> int:
    """Work units of all steps. share: of a token's linear work that a row of padding costs."""
    time = 0
    for grid in grids:
        extra = [share * (size(tokens_of(micro_batch)) - tokens_of(micro_batch)) for micro_batch in grid]
        pairs = zip(grid, extra, strict=True)
        works = [
            round(1024 * (work(micro_batch, options.quadratic_at) + more)) for micro_batch, more in pairs
        ]
        time += step_time(works, [2 * forward for forward in works], options.pp, groups(grid))
    return time


if __name__ == "__main__":
    main()
