"""What a document costs (WLB-LLM section 4.1: Wa + Wl), as integers so that every rank compares alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNITS_PER_TOKEN = 1024
"""Work is counted in 1/1024 of the linear cost of a token; int64 holds 9e15 tokens of it."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """work(d) = d + d*d / quadratic_at + per_document, in tokens of linear work.

    quadratic_at: tokens at which attention (Wa, quadratic) equals everything else (Wl, linear).
    per_document: launch and tile cost of one more document, in tokens of linear work.
    """

    quadratic_at: float
    per_document: float = 0.0

    def __post_init__(self) -> None:
        if not self.quadratic_at > 0:
            raise ValueError(f"quadratic_at must be positive, got {self.quadratic_at}")
        if self.per_document < 0:
            raise ValueError(f"per_document must not be negative, got {self.per_document}")

    def work(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Work of documents of these lengths (tokens), int64 in 1/1024 token. Empty documents cost nothing.

        With quadratic_at=4, lengths [0, 4, 8] cost [0, 8, 24] tokens: 8 + 64/4.
        """
        d = np.asarray(lengths, dtype=np.float64)
        tokens = d + d * d / self.quadratic_at + np.where(d > 0, self.per_document, 0.0)
        return np.rint(tokens * UNITS_PER_TOKEN).astype(np.int64)
