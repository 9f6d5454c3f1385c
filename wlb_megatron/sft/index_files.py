"""The files that conversations are tokenized into, and the key by which they are found again.

A folder of a cache holds them, named by the key: STEM.bin and STEM.idx as Megatron's indexed dataset, STEM.mask with
one byte for each token of the .bin (1: the token is a trained target), and index.json. The folder gets its name when
all are there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError

VERSION = 1
"""Of the folder's layout, and of what is trained of a conversation. Part of the key."""

SHARD_BYTES = 16 << 20
"""Of the jsonl, tokenized by one process at a time and kept if the build is killed later."""

_SAMPLES, _SAMPLE_BYTES = 256, 1 << 14


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """How conversations become tokens.

    tokenizer: the folder (or name) that Megatron's --tokenizer-model gives. prompt_format: one of Megatron's.
    assistant_only: trains what the chat template marks by {% generation %}. skips_bad: bad lines are left out and
    counted. drops_tools: turns of tools may be left out by the format.
    """

    tokenizer: str
    prompt_format: str
    assistant_only: bool = False
    skips_bad: bool = False
    drops_tools: bool = False

    @property
    def by_role(self) -> bool:
        """Whether the prompt format writes and masks turns by their roles."""
        return self.prompt_format.startswith("nemotron")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a jsonl (or a part of it) came to.

    lines: with a record. conversations, tokens, targets: written. longest: tokens of a conversation. without_target:
    conversations that train nothing, left out. bad_lines: left out. special_text: conversations with the text of a
    special token in a turn, which becomes that token.
    """

    lines: int = 0
    conversations: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    without_target: int = 0
    bad_lines: int = 0
    special_text: int = 0

    def __add__(self, counts: Counts) -> Counts:
        added = {name: value + getattr(counts, name) for name, value in asdict(self).items()}
        return Counts(**{**added, "longest": max(self.longest, counts.longest)})


@dataclass(frozen=True, slots=True)
class IndexFolder:
    """A folder of a cache that is there, or is to be made. `stem` is that of the jsonl's name."""

    folder: Path
    stem: str

    @property
    def prefix(self) -> str:
        """As --data-path takes it."""
        return str(self.folder / self.stem)

    @property
    def partial(self) -> Path:
        """Where it is made, and shards wait for a build that continues."""
        return self.folder.with_name(f".{self.folder.name}.partial")

    @property
    def done(self) -> bool:
        return (self.folder / "index.json").exists()

    def about(self) -> dict[str, Any]:
        """index.json: counts, messages, and what the key was made of. WlbError where it cannot be read."""
        path = self.folder / "index.json"
        about = read_about(path)
        if about is None:
            raise WlbError(f"{path} cannot be read: remove the folder, it is made again")
        return about


def read_about(path: Path) -> dict[str, Any] | None:
    """What a JSON file says of an index or a shard, its "counts" among it; None if it is not there, or damaged."""
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Counts(**about["counts"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return about


def index_folder(jsonl: Path, cache: Path | None, key: str) -> IndexFolder:
    """Where the files of this key lie: in the cache, by default in a folder `cache` beside the jsonl."""
    home = jsonl.resolve().parent / "cache" if cache is None else cache
    return IndexFolder(home / "wlb_sft" / key, jsonl.stem)


def key_of(jsonl: Path, tokenizing: Tokenizing, tokenizer_digest: str) -> tuple[str, dict[str, Any]]:
    """The folder's name, and what it was made of. `tokenizer_digest` covers vocabulary, template and versions.

    Of the file its size, time and a sample count: hashing all of it on every rank would take minutes.
    """
    settings = {
        name: value for name, value in asdict(tokenizing).items() if name not in ("tokenizer", "skips_bad")
    }
    parts = {"version": VERSION, "file": _digest_of(jsonl), "tokenizer": tokenizer_digest, **settings}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16], parts


def _digest_of(jsonl: Path) -> str:
    try:
        with jsonl.open("rb") as stream:
            about = os.fstat(stream.fileno())
            digest = hashlib.sha256(f"{about.st_size} {about.st_mtime_ns}".encode())
            for sample in range(_SAMPLES):
                stream.seek(sample * max(_SAMPLE_BYTES, about.st_size // _SAMPLES))
                digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, about.st_size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise WlbError(f"cannot read {jsonl}: {error.strerror}; give a jsonl of conversations") from None
    return digest.hexdigest()


def shards_of(size: int, shard_bytes: int = SHARD_BYTES) -> list[tuple[int, int]]:
    """Bytes [begin, end) of each shard of a file. A line belongs to the shard in which it begins."""
    return [(begin, min(begin + shard_bytes, size)) for begin in range(0, size, shard_bytes)]


def lines_of(jsonl: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in bytes [begin, end), each with where the next one begins."""
    with jsonl.open("rb") as stream:
        if begin:
            stream.seek(begin - 1)
            stream.readline()  # of the shard before, unless `begin` is a line's begin
        while stream.tell() < end and (line := stream.readline()):
            yield stream.tell(), line


def lines_before(jsonl: Path, begin: int) -> int:
    """How many lines begin before byte `begin`."""
    count, byte = 0, b"\n"
    with jsonl.open("rb") as stream:
        while stream.tell() < begin and (block := stream.read(min(1 << 20, begin - stream.tell()))):
            count += block.count(b"\n")
            byte = block[-1:]
    return count + (byte != b"\n")
