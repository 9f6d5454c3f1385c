"""Writes one HTML page with tables and embedded pictures that works offline."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from wlb_megatron.report.reproduction import Section, sections

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; display: block; overflow-x: auto; }
th, td { padding: .25em .8em; border-bottom: 1px solid #8885; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #888; }
figure { margin: 0 0 1em; }
figcaption { font-size: 13px; }
figure.chart { display: inline-block; width: 49%; min-width: 340px; }
figure.chart svg { width: 100%; }
progress { width: 100%; }
img { max-width: 100%; background: white; }
.note, footer { color: #777; max-width: 75ch; }
"""


def reproduction_page(report: dict[str, Any], pictures: Iterable[Path]) -> str:
    """The page of a reproduction. pictures: PNGs to put at its head, by name."""
    share = [row["schemes"]["ours"]["of_bound"] for row in report["configurations"]]
    means = report["means"]
    source = report.get("profile") or f"a table of {report['kernel_table']}"
    summary = (
        f"Simulated, not measured: kernel times from {source}, network and other rates as below. "
        f"Mean speed-up over plain 4D: WLB-LLM as its paper describes it {means['WLB-LLM']['all']:.3f} "
        f"(the paper: {report['paper']['mean']['all']:.2f}), ours {means['ours']['all']:.3f}, "
        f"at least {100 * min(share):.1f} % of a perfectly balanced plan's with as many micro-batches; with 1 "
        f"micro-batch a window {means['ours, 1 micro-batch a window']['all']:.3f}."
    )
    tables = sections(report)
    tables.append(
        Section(
            "Assumptions", ("figure", "value"), [[k, f"{v:,g}"] for k, v in report["assumptions"].items()]
        )
    )
    return page("Balanced packing and context parallelism, simulated", summary, tables, pictures)


def page(
    title: str,
    summary: str,
    tables: Sequence[Section],
    pictures: Iterable[Path],
    *,
    markup: Sequence[str] = (),
    reload: int | None = None,
) -> str:
    """HTML text; pictures are read and become part of it. markup: HTML that comes after the tables. reload: seconds
    after which a browser reads the page again; None: never."""
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{reload}">' if reload else "",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>",
    ]
    for picture in pictures:
        data = b64encode(picture.read_bytes()).decode()
        image = f'<img alt="{escape(picture.stem)}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}</figure>")
    parts += [_section(table) for table in tables]
    return "\n".join([*parts, *markup, "</body></html>", ""])


def _section(section: Section) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in section.header)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in section.rows)
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f"<h2>{escape(section.title)}</h2>{note}{table}"


def _cell(text: str) -> str:
    number = text.replace("%", "").replace(",", "").replace(".", "").strip().lstrip("-").isdigit()
    return f'<td class="number">{escape(text)}</td>' if number or text == "-" else f"<td>{escape(text)}</td>"


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
