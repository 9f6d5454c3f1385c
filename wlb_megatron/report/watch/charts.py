"""Lines over iterations as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median

POINTS = 400
"""Of a line, at most: neighbours are joined to their median."""
WIDTH, HEIGHT, LEFT, BOTTOM = 520, 170, 64, 22
COLORS = ("#2a6fbb", "#d1682b", "#4a9a4a")

Line = Sequence[tuple[int, float]]


def chart(title: str, lines: Sequence[tuple[str, Line]]) -> str:
    """A figure of named lines; empty if none has two points."""
    drawn = [(name, thinned(line)) for name, line in lines if len(line) > 1]
    if not drawn:
        return ""
    points = [point for _, line in drawn for point in line]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(at: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * (at - first) / max(1, last - first)
        return f"{x:.1f},{(HEIGHT - BOTTOM) * (high - value) / (high - low):.1f}"

    paths = "".join(
        f'<polyline fill="none" stroke="{color}" points="{" ".join(place(*point) for point in line)}"></polyline>'
        for (_, line), color in zip(drawn, COLORS, strict=False)
    )
    texts = [(LEFT - 6, 10, "end", f"{high:,.4g}"), (LEFT - 6, HEIGHT - BOTTOM, "end", f"{low:,.4g}")]
    texts += [
        (LEFT, HEIGHT - 6, "start", f"{first:,}"),
        (WIDTH - 8, HEIGHT - 6, "end", f"iteration {last:,}"),
    ]
    words = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(word)}</text>' for x, y, anchor, word in texts
    )
    names = " ".join(
        f'<span style="color:{color}">{escape(name)}</span>'
        for (name, _), color in zip(drawn, COLORS, strict=False)
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}: {names}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-size="10" fill="currentColor" role="img" aria-label="{escape(title)}">{paths}{words}</svg></figure>'
    )


def thinned(line: Line) -> list[tuple[int, float]]:
    """At most POINTS points: each the median of its neighbours, at the last one's iteration."""
    size = -(-len(line) // POINTS)
    parts = [line[at : at + size] for at in range(0, len(line), size)]
    return [(part[-1][0], median(value for _, value in part)) for part in parts]
