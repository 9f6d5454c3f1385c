"""Seeded long-tailed document lengths, for runs without a corpus."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WINDOW = 131072


def long_tailed(window: int, count: int = 100_000, seed: int = 1) -> npt.NDArray[np.int64]:
    """int64[count]: tokens of documents for a window of this size, up to the whole of it.

    99 of 100 are log-normal about window / 40 (3,277 at 128K); of the rest each doubling from window / 8 up is as
    likely as the next, so that outliers hold about a sixth of all tokens.
    """
    rng = np.random.default_rng(seed)
    short = rng.lognormal(np.log(window / 40), 0.8, count)
    outliers = window / 8 * 8.0 ** rng.random(count)
    lengths = np.where(rng.random(count) < 0.011, outliers, np.minimum(short, window / 8))
    return np.maximum(lengths, 1).astype(np.int64)


def rescale(lengths: npt.NDArray[np.int64], window: int, of: int = WINDOW) -> npt.NDArray[np.int64]:
    """Lengths of a corpus for a window of `of` tokens, stretched to another window: [8, 3] of 8 to 4 are [4, 2]."""
    return np.maximum(np.rint(lengths * (window / of)), 1).astype(np.int64)
