"""Measures the error of fitted attention costs on samples that the fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb_megatron.workload.fit_attention import FITTED, fit_way, predicted
from wlb_megatron.workload.pairs_table import WAYS, Device, Sample
from wlb_megatron.workload.profile import ProfiledModel


@dataclass(frozen=True)
class Check:
    """Relative errors of predicted attention times (forward + backward) of samples that the fit has not seen."""

    part: str
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(np.abs(self.errors)))

    @property
    def p95(self) -> float:
        return float(np.percentile(np.abs(self.errors), 95))


def leave_out(model: ProfiledModel, samples: Sequence[Sample], device: Device, folds: int = 8) -> list[Check]:
    """Shares and documents, each predicted by a fit to those of other folds; and shapes that no fit is made to."""
    errors: dict[str, list[float]] = {}
    fitted = [sample for sample in samples if sample["part"] in FITTED]
    for fold in range(folds):
        held = {id(s) for at, s in enumerate(fitted) if at % folds == fold}
        seen = [s for s in samples if id(s) not in held]
        tested = [s for s in samples if id(s) in held or (fold == 0 and s["part"] == "held_out")]
        if not tested:
            continue
        ways = [fit_way(model, seen, device, way) for way in WAYS]
        for sample in tested:
            total = sum(predicted(sample, *way) for way in ways)
            errors.setdefault(sample["part"], []).append(
                total / (sample["forward"][0] + sample["backward"][0]) - 1
            )
    return [Check(part, tuple(relative)) for part, relative in sorted(errors.items())]
