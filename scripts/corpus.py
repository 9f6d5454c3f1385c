"""Byte-level .bin/.idx of text files, one document a file, to try training.

python -m scripts.corpus out/corpus/python            the Python standard library's sources
python -m scripts.corpus PREFIX --files DIR --glob "*.txt"
python -m scripts.corpus PREFIX --lengths lengths.npy     the texts joined, cut anew to these lengths (tokens)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts.commands import run_script
from wlb_megatron.documents.indexed import HEADER, MAGIC, VERSION
from wlb_megatron.documents.lengths import read_lengths
from wlb_megatron.errors import WlbError
from wlb_megatron.whole_files import whole_file

END_OF_DOCUMENT = 256
"""Bytes are tokens 0..255; the vocabulary has one more."""

_UINT16 = 8
"""Of tokens in Megatron's index."""


def text_files(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder tree in a fixed order; what other packages installed there is left out."""
    return [
        path
        for path in sorted(folder.rglob(pattern))
        if path.is_file() and "site-packages" not in path.relative_to(folder).parts
    ]


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
    bin_path, idx_path = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("bin", "idx"))
    counts = []
    with whole_file(idx_path, "PREFIX") as index, whole_file(bin_path, "PREFIX") as tokens:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tokens.open("wb") as stream:
            for document in documents:
                stream.write(document.astype("<u2").tobytes())
                counts.append(len(document))
        lengths = np.array(counts, dtype=np.int64)
        with index.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, _UINT16, len(lengths), len(lengths) + 1))
            stream.write(lengths.astype("<i4").tobytes())
            stream.write((2 * (np.cumsum(lengths) - lengths)).astype("<i8").tobytes())  # bytes before each
            stream.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return lengths


def add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes PREFIX.bin and PREFIX.idx of text files, to try training without a tokenizer: a file is a document, "
        "a byte a token, and token 256 ends a document. Train with --data-path PREFIX --tokenizer-type NullTokenizer "
        "--vocab-size 257."
    )
    parser.add_argument("prefix", metavar="PREFIX", type=Path, help="path of the pair without .bin/.idx")
    library = Path(argparse.__file__).parent
    parser.add_argument(
        "--files", type=Path, default=library, help="folder of texts (default: Python's library)"
    )
    parser.add_argument("--glob", default="*.py", help="which files of the folder tree (default: *.py)")
    parser.add_argument(
        "--lengths",
        help=".npy or .idx: cut the joined texts to these lengths, in tokens (default: whole files)",
    )
    parser.add_argument("--longest", type=int, help="leave out files of more tokens (default: none)")
    parser.set_defaults(run=run_corpus)


def run_corpus(args: argparse.Namespace) -> None:
    """Writes the pair and prints what it holds. WlbError if there is no text, or no room."""
    files = text_files(args.files, args.glob)
    if args.longest is not None:
        # A token more each: end-of-document.
        files = [path for path in files if path.stat().st_size < args.longest]
    if not files:
        raise WlbError(f"no such {args.glob} under {args.files}: give --files, --glob, --longest")
    documents = documents_of(files)
    if args.lengths is not None:
        documents = cut_to(np.asarray(read_lengths(args.lengths), dtype=np.int64), documents)
    lengths = build(args.prefix, documents)
    print(
        f"{args.prefix}.bin/.idx: {len(lengths):,} documents, {lengths.sum():,} tokens; length median "
        f"{np.median(lengths):,.0f}, p99 {np.percentile(lengths, 99):,.0f}, max {lengths.max():,}"
    )


if __name__ == "__main__":
    sys.exit(run_script("corpus", add_corpus))
