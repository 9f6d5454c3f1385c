"""How many passes a run has made through its corpora, and what it left out, from a document stream's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """What was given out and what was left out, over all corpora and epochs so far.

    tokens: given out. empty: documents without a token. overlong: documents longer than rules.window. lost_tokens:
    tokens of truncated or dropped documents.
    """

    tokens: int
    empty: int
    overlong: int
    lost_tokens: int


def counts(state: Mapping[str, Any]) -> StreamCounts:
    """Counts from a `DocumentStream.state()`, up to the piece after which it was taken."""
    return StreamCounts(
        *(
            sum(corpus[name] for corpus in state["corpora"])
            for name in ("tokens", "empty", "overlong", "lost_tokens")
        )
    )


def epochs(state: Mapping[str, Any]) -> list[float]:
    """Passes through each corpus: 1.25 is one whole pass, then a quarter of its documents again."""
    sizes = [corpus["documents"] for corpus in state["fingerprint"]["corpora"]]
    return [
        corpus["epoch"] + corpus["cursor"] / size
        for corpus, size in zip(state["corpora"], sizes, strict=True)
    ]


def distinguish(names: Sequence[str]) -> list[str]:
    """The names, numbered from the second occurrence of a name on: a, b, a #2."""
    occurrences: Counter[str] = Counter()
    numbered = []
    for name in names:
        occurrences[name] += 1
        numbered.append(name if occurrences[name] == 1 else f"{name} #{occurrences[name]}")
    return numbered


def figures(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """For a log: epochs by corpus, the most of them, documents above the length at which they are split (truncated,
    dropped), and what was left out, so far."""
    passed, totals = epochs(state), counts(state)
    return {
        "epochs": {name: round(epochs_done, 4) for name, epochs_done in zip(names, passed, strict=True)},
        "most_epochs": max(passed),
        "overlong_documents": totals.overlong,
        "lost_tokens": totals.lost_tokens,
        "empty_documents": totals.empty,
    }


def describe(figures: Mapping[str, Any], max_corpora: int = 4) -> str:
    """The part of a log line on passes: the corpora with the most passes, and what was left out."""
    passed = sorted(figures["epochs"].items(), key=lambda item: -item[1])
    is_alone = len(passed) == 1
    phrases = [
        f"{value:.3f}" + ("" if is_alone else f" {Path(name).name}") for name, value in passed[:max_corpora]
    ]
    line = " | epochs: " + ", ".join(phrases)
    if len(passed) > max_corpora:
        line += f", less of {len(passed) - max_corpora} others"
    if figures["overlong_documents"]:
        line += f" | documents above the window: {figures['overlong_documents']}"
        line += f", {figures['lost_tokens']} of their tokens left out" if figures["lost_tokens"] else ""
    return line
