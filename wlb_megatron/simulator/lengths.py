"""Seeded long-tailed document lengths, for runs without a corpus."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.blocks import Lengths

WINDOW = 131072


def long_tailed(window: int, count: int = 100_000, seed: int = 1) -> npt.NDArray[np.int64]:
    """int64[count]: tokens of documents for a window of this size, up to the whole of it.

    Nearly all are log-normal about window / 44 (2,979 at 128K), at most window / 16; 1 in 90 is an outlier, anywhere
    from window / 8 to the window. Outliers hold about a sixth of all tokens.
    """
    rng = np.random.default_rng(seed)
    body = rng.lognormal(np.log(window / 44), 0.7, count)
    outliers = window * rng.uniform(1 / 8, 1, count)
    lengths = np.where(rng.random(count) < 1 / 90, outliers, np.minimum(body, window / 16))
    return np.maximum(lengths, 1).astype(np.int64)


def rescale(lengths: Lengths, window: int, of: int = WINDOW) -> npt.NDArray[np.int64]:
    """Lengths of a corpus for a window of `of` tokens, stretched to another window: [8, 3] of 8 to 4 are [4, 2]."""
    return np.maximum(np.rint(lengths * (window / of)), 1).astype(np.int64)
