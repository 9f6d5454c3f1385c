"""Tokenizes one shard of a jsonl into files of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.sft.tokenizer import ConversationTokenizer
from wlb_megatron.sft.conversations import BYTE_ORDER_MARK, BadLine, Reading, conversations_of
from wlb_megatron.sft.index_files import Counts, Tokenizing, lines_of
from wlb_megatron.whole_files import write_whole

MOST_BAD = 100
"""Bad lines that a shard lists; all are counted."""

_PAUSE = 0.5
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes [begin, end) of the jsonl, and the folder in which its files lie."""

    jsonl: Path
    folder: Path
    begin: int
    end: int

    @property
    def prefix(self) -> Path:
        return self.folder / f"shard-{self.begin}-{self.end}"

    @property
    def about_path(self) -> Path:
        """Written last: with it, the shard is whole."""
        return self.prefix.with_suffix(".json")

    def about(self) -> dict[str, Any] | None:
        """{"counts": .., "bad": [[line of the shard, from 1, reason], ..]}; None if it is not (wholly) made."""
        try:
            about = json.loads(self.about_path.read_text(encoding="utf-8"))
            Counts(**about["counts"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return dict(about)


def token_type(token_ids: int) -> Any:
    """Of the .bin, as Megatron's preprocessing chooses it."""
    from megatron.core.datasets.indexed_dataset import DType

    return DType.optimal_dtype(token_ids)


def make_shard(shard: Shard, tokenizer: ConversationTokenizer, tokenizing: Tokenizing) -> Iterator[int]:
    """Writes its .bin, .idx, .mask and .json. Yields the bytes of the jsonl done since it last did."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    reading = Reading(tokenizing.by_role, tokenizing.drops_tools)
    scratch = shard.folder / f".{shard.prefix.name}.{os.getpid()}"
    counts, reported_end, reported_at = Counts(), shard.begin, time.monotonic()
    bad: list[tuple[int, str]] = []
    builder = IndexedDatasetBuilder(f"{scratch}.bin", dtype=token_type(tokenizer.token_ids))
    with open(f"{scratch}.mask", "wb") as masks:
        for number, (following, line) in enumerate(lines_of(shard.jsonl, shard.begin, shard.end), 1):
            if not shard.begin and number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                read = conversations_of(line, reading)
                tokenized = [tokenizer.tokenize(each) for each in read]
            except BadLine as reason:
                counts += Counts(lines=1, bad_lines=1)
                bad += [(number, str(reason))] * (len(bad) < MOST_BAD)
                tokenized = []
            else:
                spelled = sum(map(tokenizer.holds_special_text, read))
                counts += Counts(lines=bool(tokenized), special_text=spelled)
            for tokens, mask in tokenized:
                targets = int(mask.sum())
                if not targets:
                    counts += Counts(without_target=1)
                    continue
                builder.add_document(tokens, [len(tokens)])
                masks.write(mask.tobytes())
                counts += Counts(0, 1, len(tokens), targets, len(tokens))
            if time.monotonic() > reported_at + _PAUSE:
                yield min(following, shard.end) - reported_end
                reported_end, reported_at = min(following, shard.end), time.monotonic()
    builder.finalize(f"{scratch}.idx")
    for suffix in (".bin", ".idx", ".mask"):
        Path(f"{scratch}{suffix}").replace(f"{shard.prefix}{suffix}")
    write_whole(shard.about_path, json.dumps({"counts": asdict(counts), "bad": bad}), "--data-cache-path")
    yield shard.end - reported_end


def make_shards(tokenizing: Tokenizing, shards: Iterator[Shard]) -> Iterator[int | Shard]:
    """A child's work: yields the bytes done as it goes on, and each shard once it is made."""
    try:
        tokenizer = ConversationTokenizer(tokenizing)
        for shard in shards:
            yield from make_shard(shard, tokenizer, tokenizing)
            yield shard
    except OSError as error:
        raise WlbError(str(error)) from None
