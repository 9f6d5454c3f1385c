"""Reads lines of conversations in Megatron's form, {"messages": [..]}, and says what is wrong with one.

Megatron reads several faults in silence, or fails without naming the line: a role written "Assistant" makes its turn
vanish, a missing content trains the word None. Here each is a reason that goes with file and line number.

And the files that conversations are tokenized into, and the key by which they are found again. A folder of a cache
holds them, named by the key: STEM.bin and STEM.idx as Megatron's indexed dataset, STEM.mask with one byte for each
token of the .bin (1: the token is a trained target), and index.json. The folder gets its name when all are there.
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

Conversation = list[dict[str, Any]]
"""Turns, each with role and content."""

ROLES = ("system", "user", "assistant", "tool")
"""Roles that the formats which mask by role know, spelled so."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadLine(Exception):
    """Why a line cannot be trained; its text is the reason, a line that can be printed."""

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(reason.encode("utf-8", "backslashreplace").decode().split()))


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """How conversations become tokens.

    tokenizer: the folder (or name) that Megatron's --tokenizer-model gives. prompt_format: one of Megatron's.
    assistant_only: trains what the chat template marks by {% generation %}. skips_bad: bad lines are left out and
    counted. drops_tools: turns and calls of tools, which formats by role leave out, are accepted.
    """

    tokenizer: str
    prompt_format: str
    assistant_only: bool = False
    skips_bad: bool = False
    drops_tools: bool = False

    @property
    def by_role(self) -> bool:
        """Whether the prompt format writes and masks turns by their roles, so that it knows no others."""
        return self.prompt_format.startswith("nemotron")


def conversations_of(line: bytes, tokenizing: Tokenizing) -> list[Conversation]:
    """The conversations of one line: a new one begins at each system turn, as in Megatron. [] for a blank line.

    BadLine for anything else than an object with a list `messages` of turns.
    """
    text = _text(line)
    if not text:
        return []
    record = _parse(text)
    if not isinstance(record, dict):
        raise BadLine(f"is a JSON {_kind(record)}, not an object with messages")
    if "messages" not in record:
        keys = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise BadLine(f"has no messages (keys: {keys})")
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is not a list of turns")
    if record.get("tools") and not tokenizing.drops_tools:
        raise BadLine(
            "has tools, which Megatron's tokenizer does not read (--wlb-sft-drop-tools leaves them out)"
        )
    for number, turn in enumerate(messages, 1):
        _check_turn(turn, number, tokenizing)
    conversations = _split(messages)
    for conversation in conversations:
        _check_order(conversation, tokenizing)
    return conversations


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise BadLine("is not UTF-8") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise BadLine("is nested too deep") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadLine("holds more than one JSON value") from None
        raise BadLine(f"is not JSON ({error.msg} at character {error.pos + 1})") from None
    except ValueError:  # a number of too many digits
        raise BadLine("is not JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadLine(f"has the key {next(name for name in names if names.count(name) > 1)} twice")
    return record


def _check_turn(turn: Any, number: int, tokenizing: Tokenizing) -> None:
    if not isinstance(turn, dict):
        raise BadLine(f"turn {number} is a JSON {_kind(turn)}, not an object with role and content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str):
        raise BadLine(f"turn {number} has no role")
    calls = bool(turn.get("tool_calls"))
    if tokenizing.by_role and role not in ROLES:
        raise BadLine(f"turn {number} has the role {role[:20]!r}; known are {', '.join(ROLES)}")
    if tokenizing.by_role and not tokenizing.drops_tools and (calls or role == "tool"):
        raise BadLine(
            f"turn {number} is of a tool, which this prompt format leaves out (--wlb-sft-drop-tools accepts that)"
        )
    if content is None and calls and not tokenizing.by_role:
        return  # a template prints the calls
    if not isinstance(content, str):
        raise BadLine(
            f"turn {number} has {'no content' if content is None else f'a {_kind(content)} as content'}"
        )
    if not content.strip() and role != "system" and not calls:
        raise BadLine(f"turn {number} ({role[:20]}) is empty")


def _split(messages: Conversation) -> list[Conversation]:
    conversations: list[Conversation] = []
    for turn in messages:
        if turn["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(turn)
    return conversations


def _check_order(conversation: Conversation, tokenizing: Tokenizing) -> None:
    """What Megatron's tokenizer asks of a format that masks: an answer follows a question."""
    if not tokenizing.by_role:
        return
    roles = [turn["role"] for turn in conversation]
    if "assistant" not in roles:
        raise BadLine("a conversation has no assistant turn")
    for before, role in zip(["", *roles], roles, strict=False):
        if role == "assistant" and before not in ("user", "tool"):
            raise BadLine(f"an assistant turn follows {before or 'nothing'}, not a user turn")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


VERSION = 1
"""Of the folder's layout, and of what is trained of a conversation. Part of the key."""

SHARD_BYTES = 8 << 20
"""Of the jsonl, tokenized by one process at a time and kept if the build is killed later."""

_SAMPLES, _SAMPLE_BYTES = 256, 1 << 14


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


def lines_of(jsonl: Path, begin: int, end: int) -> Iterator[bytes]:
    """The lines that begin in bytes [begin, end)."""
    with jsonl.open("rb") as stream:
        if begin:
            stream.seek(begin - 1)
            stream.readline()  # of the shard before, unless `begin` is a line's begin
        while stream.tell() < end and (line := stream.readline()):
            yield line


def lines_before(jsonl: Path, begin: int) -> int:
    """How many lines begin before byte `begin`."""
    count, byte = 0, b"\n"
    with jsonl.open("rb") as stream:
        while stream.tell() < begin and (block := stream.read(min(1 << 20, begin - stream.tell()))):
            count += block.count(b"\n")
            byte = block[-1:]
    return count + (byte != b"\n")
