"""What a rank holds of a large corpus, and how long it takes to its first plan, over the number of documents.

    python -m scripts.bench.packing.bench_index [--documents 1e6,1e7,1e8] [--folder FOLDER] [--out DIR] [--start 64x8]

Writes an .idx of so many log-normal documents into FOLDER (20 bytes a document, deleted at the end) and a sparse .bin
beside it; then a process of its own reads, checks and shuffles them and packs iterations of 64 windows of 128K, once
with the index in the page cache. MB: anonymous memory of that process, which is its own; what it maps of the .idx all
processes of a node share. With --out, index.csv is written there.

--start 64x8: instead, what a job of 64 nodes with 8 ranks each needs up to its first plan, from processes measured here
one at a time, with the index and nothing else dropped from the page cache before each: the first rank, which checks the
index, another one, and a process that plans. The totals are arithmetic. With --out, start.csv.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.lengths import sample_lengths
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.planner import Planner
from wlb_megatron.report.files import write_csv
from wlb_megatron.report.table import print_table
from wlb_megatron.workload.cost_model import CostModel

WINDOW, MICRO_BATCHES = 131072, 64
_BLOCK = 1 << 20


def write_corpus(prefix: Path, documents: int) -> None:
    """An index as preprocess_data.py writes it, one sequence a document; every million documents are alike."""
    lengths = np.maximum(np.exp(np.random.default_rng(0).normal(6.5, 1.2, _BLOCK)), 1).astype("<i4")
    sizes = [min(_BLOCK, documents - at) for at in range(0, documents, _BLOCK)]
    total = 0
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for size in sizes:
            file.write(lengths[:size].tobytes())
        for size in sizes:
            ends = total + np.cumsum(2 * lengths[:size].astype(np.int64))
            file.write(np.concatenate(([total], ends[:-1])).astype("<i8").tobytes())
            total = int(ends[-1])
        for at in range(0, documents + 1, _BLOCK):
            file.write(np.arange(at, min(at + _BLOCK, documents + 1), dtype="<i8").tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(total)


def steps(prefix: str, kind: str) -> Iterator[str]:
    """What a rank does before its first step, its name yielded when it is done."""
    if kind in RANKS:
        importlib.import_module("wlb_megatron.plugin.plans.training")
        yield "torch, Megatron, plugin imported"
    blend = Blend([prefix], trusted=lambda _: kind in (OTHER, PLANS))
    yield "index read and checked"
    (corpus,) = blend.corpora()
    sample = sample_lengths(corpus.lengths, WINDOW, "split")
    packer = make_packer(
        WlbConfig(), CostModel(24576.0), window=WINDOW, micro_batches=MICRO_BATCHES, sample=sample
    )
    yield "thresholds found"
    stream = DocumentStream([corpus], Rules(WINDOW, seed=1234, endless=True))
    yield "hashed and shuffled"
    planner = Planner(stream, packer, global_tokens=MICRO_BATCHES * WINDOW)
    planner.next_iteration()
    yield "first plan"
    for _ in range(20):
        planner.next_iteration()
    yield "20 more plans"


FIRST, OTHER, PLANS = "first rank", "another rank", "process that plans"
RANKS = FIRST, OTHER


def measure(prefix: str, kind: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    held: dict[str, int] = {}
    began = time.process_time()
    for name in steps(prefix, kind):
        row[f"{name} (s)"] = round(time.process_time() - began, 2)
        held = memory()  # here, while all of it is still there
        began = time.process_time()
    return row | held


def memory() -> dict[str, int]:
    """Of this process: anonymous, mapped from files, and the most of both at once."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) >> 10 for line in status if line.endswith(" kB")}
    fetched = Path("/proc/self/io").read_text(encoding="utf-8").split()
    read = int(fetched[fetched.index("read_bytes:") + 1]) // 10**6
    sizes = {"own MB": held["RssAnon"], "mapped MB": held["RssFile"], "most of both": held["VmHWM"]}
    return sizes | {"index read MB": read}


def measured(prefix: Path, kind: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "scripts.bench.packing.bench_index"]
    command += ["--measure", str(prefix), "--kind", kind]
    return dict(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))


def start(prefix: Path, nodes: int, ranks: int) -> list[dict[str, Any]]:
    """A row for each kind of process, and one for a node, of which all processes share what they map."""
    index = prefix.with_suffix(".idx")
    measured(prefix, FIRST)  # the programs' own files come into the page cache
    rows = []
    for kind in (FIRST, OTHER, PLANS):
        with index.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        row = measured(prefix, kind)
        seconds = sum(value for name, value in row.items() if name.endswith("(s)"))
        rows.append({"process": kind, "to the 21st plan (s)": round(seconds, 1), **row})
    first, other, plans = rows
    own = ranks * (other["own MB"] + plans["own MB"])
    read = first["index read MB"] + (nodes - 1) * other["index read MB"]
    shared = max(row["mapped MB"] for row in rows)
    print(
        f"a node of {ranks} ranks: {own / 1e3:,.1f} GB of its own, at most {shared / 1e3:.1f} GB mapped and shared"
    )
    print(f"{nodes} nodes read {read / 1e3:,.1f} GB of an index of {index.stat().st_size / 1e9:.1f} GB")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", default="1e6,1e7,1e8")
    parser.add_argument("--folder", type=Path, help="for the .idx (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="folder for index.csv")
    parser.add_argument("--start", help="NODESxRANKS: what a job of so many needs up to its first plans")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default=FIRST, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.kind)))
        return
    rows: list[dict[str, Any]] = []
    for count in (int(float(number)) for number in args.documents.split(",")):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            prefix = Path(folder) / "corpus"
            write_corpus(prefix, count)
            if args.start:
                nodes, ranks = map(int, args.start.split("x"))
                rows += [{"documents": count, **row} for row in start(prefix, nodes, ranks)]
                continue
            measured(prefix, PLANS)  # the next finds the index in the page cache
            rows.append({"documents": count, **measured(prefix, "whole")})
    names = list(dict.fromkeys(name for row in rows for name in row))
    print_table(
        "start" if args.start else "index", names, [[row.get(name, "") for name in names] for row in rows]
    )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_csv(args.out / ("start.csv" if args.start else "index.csv"), rows)


if __name__ == "__main__":
    main()
