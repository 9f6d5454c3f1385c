"""A pipeline step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wlb_megatron.pipeline.schedule import Event


def chrome_trace(
    groups: Sequence[Sequence[Event]],
    *,
    name: str = "simulated",
    thread: Callable[[int], str] = "stage {}".format,
    documents: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Trace Event Format, JSON-able.

    groups: each data-parallel rank's events, a process each; stages are threads. Times are nanoseconds. thread: returns
    the name of a stage's row. documents: by rank, the document that each micro-batch has a chunk of, or -1. These carry
    a letter for the document in their names, by which viewers choose a color: "F3 (B)"; "legend" names the documents.
    """
    events: list[dict[str, Any]] = []
    legend: dict[str, str] = {}
    for rank, group in enumerate(groups):
        of = documents[rank] if documents else ()
        letters = _letters(of)
        legend |= {f"data-parallel rank {rank}, ({x})": f"document {d} in chunks" for d, x in letters.items()}
        events.append(_named("process_name", rank, 0, f"data-parallel rank {rank} ({name})"))
        for stage in sorted({event.stage for event in group}):
            events.append(_named("thread_name", rank, stage, thread(stage)))
        events += [
            {
                "name": f"{'B' if event.backward else 'F'}{event.micro_batch}"
                + (f".{event.chunk}" if event.chunk else "")
                + _label(of, event.micro_batch, letters),
                "cat": "backward" if event.backward else "forward",
                "ph": "X",
                "ts": event.start / 1000,
                "dur": (event.end - event.start) / 1000,
                "pid": rank,
                "tid": event.stage,
                "args": {"micro_batch": event.micro_batch, "chunk": event.chunk}
                | _document(of, event.micro_batch),
            }
            for event in group
        ]
    other_data = {"source": name} | ({"legend": legend} if legend else {})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other_data}


def _letters(documents: Sequence[int]) -> dict[int, str]:
    """A letter for each document in chunks, in order: A, B, .. Z, AA, AB, .. Viewers leave digits out of colors."""
    in_chunks = [document for document in dict.fromkeys(documents) if document >= 0]
    return {document: _letter(number) for number, document in enumerate(in_chunks)}


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _document(documents: Sequence[int], micro_batch: int) -> dict[str, int]:
    in_chunks = 0 <= micro_batch < len(documents) and documents[micro_batch] >= 0
    return {"document_in_chunks": documents[micro_batch]} if in_chunks else {}


def _label(documents: Sequence[int], micro_batch: int, letters: dict[int, str]) -> str:
    return "".join(f" ({letters[document]})" for document in _document(documents, micro_batch).values())


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
