"""Training and held-out documents for convergence.py: functions and methods of Python sources, byte by byte.

python -m scripts.bench.convergence.text OUT --text DIR --window 4096 --train 9000000 --held-out 1000000

Lengths have a natural long tail, and go with content: what delays long documents can bias what is learned. Files come
in an order drawn from a seed. Held-out documents are of other files than training's. A document that was seen before,
byte by byte, is left out, so is one above the window. Writes OUT/train and OUT/held-out (.bin, .idx), OUT/facts.json;
with --start OUT/start too, of files that neither of them has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.corpus import END_OF_DOCUMENT, build, text_files
from wlb_megatron.whole_files import renamed_at_end

_BEGINS = re.compile(rb"(?m)^(?: {4})?(?:@|(?:async )?def |class )")
SHORTEST = 32
"""Tokens below which a document is left out: little but blank lines."""


def definitions(source: bytes) -> Iterator[bytes]:
    """A source file cut where a class, a function or a method begins, with its decorators; all bytes, in order."""
    starts, decorated = [0], False
    for match in _BEGINS.finditer(source):
        if not decorated and match.start():
            starts.append(match.start())
        decorated = match[0].endswith(b"@")
    for start, end in zip(starts, [*starts[1:], len(source)], strict=True):
        yield source[start:end]


def documents(files: Iterable[Path], window: int, seen: set[bytes]) -> Iterator[np.ndarray]:
    """uint16 tokens of each document of `window` tokens at most, end-of-document included."""
    for path in files:
        for text in definitions(path.read_bytes()):
            digest = hashlib.blake2b(text, digest_size=16).digest()
            if SHORTEST <= len(text) < window and digest not in seen:
                seen.add(digest)
                tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
                yield np.append(tokens, np.uint16(END_OF_DOCUMENT))


def up_to(stream: Iterator[np.ndarray], tokens: int, digest: Any) -> Iterator[np.ndarray]:
    """Documents until they have so many tokens, which are added to the digest."""
    taken = 0
    while taken < tokens and (document := next(stream, None)) is not None:
        taken += len(document)
        digest.update(document.tobytes())
        yield document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the corpora")
    parser.add_argument("--text", type=Path, required=True, help="folder of Python sources")
    parser.add_argument("--window", type=int, required=True, help="longest document (tokens)")
    parser.add_argument("--train", type=int, required=True, help="tokens to train on")
    parser.add_argument("--held-out", type=int, required=True, help="tokens to evaluate on")
    parser.add_argument("--start", type=int, default=0, help="tokens to train beforehand, of other files")
    options = parser.parse_args()
    files = text_files(options.text, "*.py")
    random.Random(0).shuffle(files)
    seen: set[bytes] = set()
    digest = hashlib.blake2b(digest_size=8)
    # Lazily, file by file: what remains of held-out's last file is dropped, so that no file serves both.
    remaining = iter(files)
    facts = {}
    for name, tokens in (
        ("held-out", options.held_out),
        ("train", options.train),
        ("start", options.start),
    ):
        if not tokens:
            continue
        lengths = build(options.out / name, up_to(documents(remaining, options.window, seen), tokens, digest))
        if (found := int(lengths.sum())) < tokens:
            raise SystemExit(
                f"--text {options.text} has too few tokens in documents below the window: {found:,} of the {tokens:,} "
                f"asked for {name}"
            )
        facts[name] = {"documents": len(lengths), "tokens": found}
    with renamed_at_end(options.out / "facts.json") as scratch:
        scratch.write_text(json.dumps({**facts, "digest": digest.hexdigest()}), encoding="utf-8")


if __name__ == "__main__":
    main()
