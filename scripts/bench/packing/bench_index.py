"""What a rank holds of a large corpus, and how long it takes to its first plan, over the number of documents.

    python -m scripts.bench.packing.bench_index [--documents 1e6,1e7,1e8] [--folder FOLDER] [--out DIR]

Writes an .idx of so many log-normal documents into FOLDER (20 bytes a document, deleted at the end) and a sparse .bin
beside it; then a process of its own reads, checks and shuffles them and packs iterations of 64 windows of 128K, once
with the index in the page cache. MB: anonymous memory of that process, which is its own; what it maps of the .idx all
processes of a node share. With --out, index.csv is written there.
"""

from __future__ import annotations

import argparse
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


def steps(prefix: str) -> Iterator[str]:
    """What a rank does before its first step, its name yielded when it is done."""
    blend = Blend([prefix])
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


def measure(prefix: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    held: dict[str, int] = {}
    began = time.perf_counter()
    for name in steps(prefix):
        row[f"{name} (s)"] = round(time.perf_counter() - began, 2)
        held = memory()  # here, while all of it is still there
        began = time.perf_counter()
    return row | held


def memory() -> dict[str, int]:
    """Of this process: anonymous, mapped from files, and the most of both at once."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) >> 10 for line in status if line.endswith(" kB")}
    return {"own MB": held["RssAnon"], "mapped MB": held["RssFile"], "most of both": held["VmHWM"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", default="1e6,1e7,1e8")
    parser.add_argument("--folder", type=Path, help="for the .idx (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="folder for index.csv")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    rows = []
    for count in (int(float(number)) for number in args.documents.split(",")):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            prefix = Path(folder) / "corpus"
            write_corpus(prefix, count)
            for _ in range(2):  # the second finds the index in the page cache
                output = subprocess.check_output(
                    [sys.executable, "-m", "scripts.bench.packing.bench_index", "--measure", str(prefix)],
                    text=True,
                )
            rows.append({"documents": count, **json.loads(output)})
    print_table("index", list(rows[0]), [list(row.values()) for row in rows])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_csv(args.out / "index.csv", rows)


if __name__ == "__main__":
    main()
