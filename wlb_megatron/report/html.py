"""Writes one HTML page with tables and embedded pictures that works offline."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
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
