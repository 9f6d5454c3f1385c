#!/usr/bin/env python3
"""Byte-level .bin/.idx of text files by Megatron's own builder, one document a file.

python scripts/build_corpus.py out/corpus/python            the Python standard library's sources
python scripts/build_corpus.py PREFIX --files DIR --glob "*.txt"
python scripts/build_corpus.py PREFIX --lengths lengths.npy     the texts joined, cut anew to these lengths (tokens)
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from wlb_megatron.whole_files import renamed_at_end

END_OF_DOCUMENT = 256
"""Bytes are tokens 0..255; the vocabulary has one more."""


def text_files(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder tree in a fixed order; what other packages installed there is left out."""
    return [
        path
        for path in sorted(folder.rglob(pattern))
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    ]


def at_most(files: list[Path], longest: int) -> list[Path]:
    """Those of at most `longest` tokens, end-of-document included."""
    return [path for path in files if path.stat().st_size < longest]


def documents_of(files: list[Path]) -> Iterator[np.ndarray]:
    """Each file's bytes with the end-of-document token, uint16."""
    for path in files:
        tokens = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16)
        yield np.append(tokens, np.uint16(END_OF_DOCUMENT))


def cut_to(lengths: np.ndarray, documents: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The documents joined and cut anew: the first of lengths[0] tokens, and so on while the text lasts."""
    text = np.concatenate(list(documents))
    ends = np.cumsum(lengths)
    for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
        if end > len(text):
            return
        yield text[start:end]


def build(prefix: Path, documents: Iterator[np.ndarray]) -> np.ndarray:
    """Write PREFIX.bin and PREFIX.idx (under other names first, then renamed). Returns the lengths in tokens."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    bin_path, idx_path = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("bin", "idx"))
    lengths = []
    with renamed_at_end(idx_path) as index, renamed_at_end(bin_path) as tokens:
        builder = IndexedDatasetBuilder(str(tokens), dtype=np.uint16)
        for document in documents:
            builder.add_document(document, [len(document)])
            lengths.append(len(document))
        builder.finalize(str(index))
    return np.array(lengths, dtype=np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", type=Path, help="path of the pair without .bin/.idx")
    parser.add_argument(
        "--files", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of texts"
    )
    parser.add_argument("--glob", default="*.py", help="which files of the folder tree")
    parser.add_argument(
        "--lengths", type=Path, help=".npy of integers: cut the joined texts to these lengths"
    )
    parser.add_argument("--longest", type=int, help="leave out files of more tokens")
    options = parser.parse_args()
    files = text_files(options.files, options.glob)
    if options.longest is not None:
        files = at_most(files, options.longest)
    if not files:
        raise SystemExit(f"no such {options.glob} under {options.files}: give --files, --glob, --longest")
    documents = documents_of(files)
    if options.lengths is not None:
        documents = cut_to(np.load(options.lengths, allow_pickle=False).astype(np.int64), documents)
    lengths = build(options.prefix, documents)
    print(
        f"{options.prefix}.bin/.idx: {len(lengths):,} documents, {lengths.sum():,} tokens; length median "
        f"{np.median(lengths):,.0f}, p99 {np.percentile(lengths, 99):,.0f}, max {lengths.max():,}"
    )


if __name__ == "__main__":
    main()
