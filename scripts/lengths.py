"""Draws document lengths of several kinds from a seed, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


def paper_like(count: int, seed: int = 0, window: int = 131072) -> Lengths:
    """int64[count]: a long-tailed pre-training mix as in WLB-LLM's figure 3.

    Documents of a quarter window or more are 1 % of documents and 17 % of tokens; none is longer than the window.
    """
    rng = np.random.default_rng(seed)
    kind = rng.random(count)
    body = rng.uniform(0.0, 0.048, count)
    middle = np.exp(rng.uniform(np.log(0.06), np.log(0.18), count))
    tail = np.exp(rng.uniform(np.log(0.18), np.log(0.955), count))
    top = rng.uniform(0.7, 0.955, count)
    share = np.select([kind < 0.976, kind < 0.9885, kind < 0.9985], [body, middle, tail], top)
    return np.maximum(share * window, 1).astype(np.int64)


def code_like(count: int, seed: int = 0) -> Lengths:
    """int64[count]: source files, median 900 tokens, 0.3 % of them generated ones of up to a million."""
    rng = np.random.default_rng(seed)
    files = rng.lognormal(np.log(900), 1.3, count)
    generated = 20_000 * rng.pareto(1.1, count) + 20_000
    return np.clip(np.where(rng.random(count) < 0.003, generated, files), 1, 1 << 20).astype(np.int64)


def web_like(count: int, seed: int = 0) -> Lengths:
    """int64[count]: encyclopedia and web pages, median 350 tokens, 1 % above 11K, a few above 100K."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(350), 1.5, count), 1, 1 << 20).astype(np.int64)


def lognormal(
    count: int, seed: int = 0, mean: float = 1024.0, sigma: float = 1.5, max_tokens: int = 8192
) -> Lengths:
    """int64[count]: log-normal of this mean (tokens) before it is cut off at `max_tokens`."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, count), 1, max_tokens).astype(
        np.int64
    )


KINDS: dict[str, Callable[[int, int], Lengths]] = {
    "paper-like": paper_like,
    "code-like": code_like,
    "web-like": web_like,
    "lognormal": lognormal,
}
