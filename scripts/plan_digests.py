"""Prints a digest of seeded plans for each family of settings, to show that a change of code changes no plan.

    python -m scripts.plan_digests [--plans 1000] > after.txt    # and at the commit before; then diff

A family is a packer with an Lmax, with chunks or without, and numbers of data-parallel ranks and pipeline stages. Its
digest covers the plans of seeded corpora, windows and costs. 1,000 plans take some seconds on one core.
"""

from __future__ import annotations

import argparse
import hashlib
from itertools import islice, product

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.sample_choices import repeating_planner
from wlb_megatron.registry import PACKERS
from wlb_megatron.workload.cost_model import CostModel

ITERATIONS = 4
"""Plans of each corpus."""

FAMILIES: list[tuple[str, str, float]] = [
    *((name, "off", 1.5) for name, entry in PACKERS.items() if not entry.instead),
    *(("varlen", "on", share) for share in (0.15, 0.4, 0.75)),
]
"""(packing, chunks, Lmax in windows)."""


def lengths_of(dice: np.random.Generator, window: int) -> np.ndarray:
    """int64[n] of 1 to `window` tokens: uniform, log-normal, or short ones with some as long as the window."""
    count = int(dice.integers(5, 200))
    kinds = (
        dice.integers(1, window + 1, count),
        dice.lognormal(np.log(window / 20), 1.3, count),
        np.where(dice.random(count) < 0.1, window, dice.integers(1, window // 16 + 2, count)),
    )
    return np.clip(kinds[dice.integers(len(kinds))], 1, window).astype(np.int64)


def digest(packing: str, chunks: str, share: float, dp: int, pp: int, corpora: int, spread: str) -> str:
    """Of so many corpora's plans, as 16 hexadecimal digits."""
    total = hashlib.sha256()
    for seed in range(corpora):
        dice = np.random.default_rng([seed, dp, pp])
        window = int(dice.choice([16, 500, 4096, 32768]))
        lmax = int(window * share)
        config = WlbConfig(packing=packing, chunks=chunks, max_tokens=lmax, batch_spread=spread)
        cost = CostModel(window * float(dice.choice([0.3, 1, 4])), 0.5, window * float(dice.choice([0, 0.1])))
        windows = int(dice.integers(1, 9))
        packer = make_packer(PackingJob(config, cost, window=window, micro_batches=windows, dp=dp, pp=pp))
        planner = repeating_planner(lengths_of(dice, window), packer, windows * dp * window)
        for plan in islice(iter(planner.next_iteration, None), ITERATIONS):
            total.update(repr(plan).encode())
    return total.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=1000, help="over all families, about")
    parser.add_argument("--batch-spread", default="auto", help="as --wlb-batch-spread (default: auto)")
    args = parser.parse_args()
    families = list(product(FAMILIES, (1, 2, 4), (1, 2, 4, 8)))
    corpora = -(-args.plans // (ITERATIONS * len(families)))
    for (packing, chunks, share), dp, pp in families:
        name = f"{packing:14}chunks={chunks:4}lmax={share:<5}dp={dp} pp={pp}"
        print(name, digest(packing, chunks, share, dp, pp, corpora, args.batch_spread), flush=True)


if __name__ == "__main__":
    main()
