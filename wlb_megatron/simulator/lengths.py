"""Seeded long-tailed document lengths, for runs without a corpus."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
