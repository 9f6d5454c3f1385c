"""How many tokens buckets of documents count too many: the section `buckets` of bench_dynamic.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from wlb_megatron.dynamic.buckets import bucket

DOCUMENTS = 512
SEEDS = 5
LIMIT = 0.025
"""What FlexSP's 16 buckets keep to (they tell 2.3 %)."""


def bucket_errors(corpora: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean errors over batches of 512 documents, by corpus ("name, window"): 16 buckets of the whole batch counted by
    means and by longest, and, as FlexSP's planner has them, 16 of each micro-batch of the sorted batch."""
    rows: list[dict[str, Any]] = []
    print("16 buckets of 512 documents: tokens too many, %; and how many buckets it takes")
    print("corpus               means  longest | in 2     3     4     5 micro-batches | buckets for 2.5 %")
    for name, lengths in corpora.items():
        batches = [np.sort(np.random.default_rng(seed).choice(lengths, DOCUMENTS)) for seed in range(SEEDS)]
        whole = [bucket(batch) for batch in batches]
        parts = [np.mean([in_micro_batches(batch, count) for batch in batches]) for count in range(2, 6)]
        needed = [enough(batch) for batch in batches]
        errors = [
            np.mean([buckets.error for buckets in whole]),
            np.mean([buckets.limit_error for buckets in whole]),
            *parts,
        ]
        row = {
            "corpus": name,
            "documents": DOCUMENTS,
            "means_error": round(float(errors[0]), 5),
            "longest_error": round(float(errors[1]), 4),
            **{f"longest_error_{m}_micro_batches": round(float(e), 4) for m, e in enumerate(parts, 2)},
            "buckets_for_2.5_percent": f"{min(needed)} to {max(needed)}",
        }
        rows.append(row)
        percent = [f"{100 * e:.2f}" for e in errors]
        print(
            f"{name:20}{percent[0]:>6}{percent[1]:>9} |"
            + "".join(f"{e:>6}" for e in percent[2:])
            + f"               | {row['buckets_for_2.5_percent']}",
            flush=True,
        )
    return rows


def in_micro_batches(batch: Any, count: int) -> float:
    """batch: sorted. Cut into consecutive micro-batches of like tokens, with 16 buckets each."""
    marks = np.searchsorted(np.cumsum(batch), batch.sum() * np.arange(1, count) / count)
    parts = [part for part in np.split(batch, marks) if len(part)]
    return float(sum(bucket(part).limit_error * part.sum() for part in parts) / batch.sum())


def enough(batch: Any) -> int:
    """The least number of buckets of the whole batch that keeps to LIMIT by their longest."""
    return next(count for count in range(1, len(batch) + 1) if bucket(batch, count).limit_error <= LIMIT)
