"""Makes the .bin, .idx and mask of a jsonl: its shards in parallel processes, then joined by Megatron's builder.

Shards that an earlier build has made are kept. The folder gets its name when all is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wlb_megatron.child import Child
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.sft.tokenizer import ConversationTokenizer
from wlb_megatron.report.terminal import duration, progress
from wlb_megatron.sft.conversations import (
    BYTE_ORDER_MARK,
    SHARD_BYTES,
    BadLine,
    Counts,
    IndexFolder,
    Tokenizing,
    conversations_of,
    lines_before,
    lines_of,
    read_about,
    shards_of,
)
from wlb_megatron.whole_files import of_this_process, write_whole

MOST_PROCESSES = 64
LISTED = 20
"""Bad lines that a message lists."""

PATIENCE, LOOK = 120.0, 0.5
"""Seconds for which a rank waits while no process makes the files, and between two looks."""

MOST_BAD = 100
"""Bad lines that a shard lists; all are counted."""

Say = Callable[[str], None]


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
        return read_about(self.about_path)


def make_shard(shard: Shard, tokenizer: ConversationTokenizer) -> Shard:
    """Writes its .bin, .idx, .mask and .json."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    scratch = shard.folder / f".{shard.prefix.name}.{of_this_process()}"
    counts = Counts()
    bad: list[tuple[int, str]] = []
    builder = IndexedDatasetBuilder(f"{scratch}.bin", dtype=tokenizer.token_type)
    with open(f"{scratch}.mask", "wb") as masks:
        for number, line in enumerate(lines_of(shard.jsonl, shard.begin, shard.end), 1):
            if not shard.begin and number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                read = conversations_of(line, tokenizer.tokenizing)
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
    builder.finalize(f"{scratch}.idx")
    for suffix in (".bin", ".idx", ".mask"):
        Path(f"{scratch}{suffix}").replace(f"{shard.prefix}{suffix}")
    write_whole(shard.about_path, json.dumps({"counts": asdict(counts), "bad": bad}), "--data-cache-path")
    return shard


def make_shards(tokenizing: Tokenizing, shards: Iterator[Shard]) -> Iterator[Shard]:
    """A child's work: yields each shard once it is made."""
    try:
        tokenizer = ConversationTokenizer(tokenizing)
        for shard in shards:
            yield make_shard(shard, tokenizer)
    except OSError as error:
        raise WlbError(str(error)) from None


def build(
    jsonl: Path,
    into: IndexFolder,
    key: dict[str, Any],
    tokenizer: ConversationTokenizer,
    *,
    processes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Say,
) -> None:
    """Make the folder, if no other process is first.

    key: the parts that its name was made of. processes: their number, None for one a core. say: prints a line.

    WlbError, and shards are kept, for bad lines (unless they are to be skipped), if no conversation has a target, and
    if the cache cannot be written.
    """
    try:
        into.partial.mkdir(parents=True, exist_ok=True)
        with _locked(into.partial / "lock", lambda: say(f"waits for a process that tokenizes {jsonl.name}")):
            if into.done:
                return
            size = jsonl.stat().st_size
            shards = [Shard(jsonl, into.partial, *bounds) for bounds in shards_of(size, shard_bytes)]
            _make_all(shards, tokenizer, processes)
            _join(shards, into, key, tokenizer)
    except (OSError, WlbError) as error:
        if into.done:  # without locks: another process has made it, and removed the shards
            return
        if isinstance(error, WlbError):
            raise
        raise WlbError(
            f"cannot write to {into.partial}: {error.strerror or error}; give another --data-cache-path"
        ) from None


@contextlib.contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """One process at a time, of all nodes that share the file system. A lock ends with its process. Where a file system
    has none, several make the same files, each under names of its own until they are whole."""
    with path.open("w") as lock:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for_files(into: IndexFolder) -> None:
    """Waits for the process that makes the files. WlbError once none has had the lock for PATIENCE seconds."""
    free_since = time.monotonic()
    while not into.done:
        if _is_locked(into.partial / "lock"):
            free_since = time.monotonic()
        elif time.monotonic() - free_since > PATIENCE:
            raise WlbError(
                f"no process makes {into.folder}: the first rank of this node has ended, and its own line says why"
            )
        time.sleep(LOOK)


def _is_locked(path: Path) -> bool:
    """Whether a process has the lock, or may have it where the file system has no locks."""
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _make_all(shards: list[Shard], tokenizer: ConversationTokenizer, processes: int | None) -> None:
    missing = [shard for shard in shards if shard.about() is None]
    count = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(missing))
    queued = list(reversed(missing))
    made_shards = (
        _in_processes(queued, tokenizer.tokenizing, count)
        if count > 1
        else _here(queued, tokenizer)  # a process of its own would take longer to start
    )
    refuses = not tokenizer.tokenizing.skips_bad
    start, todo = time.monotonic(), sum(shard.end - shard.begin for shard in missing)
    bytes_left = todo
    with progress(len(missing), lines=True) as tick:
        for shard in made_shards:
            bytes_left -= shard.end - shard.begin
            line = f"tokenizes {shard.jsonl.name}: {1 - bytes_left / shards[-1].end:.0%} done"
            if bytes_left:
                seconds = (time.monotonic() - start) * bytes_left / (todo - bytes_left)
                line += f", about {duration(seconds)} left"
            tick(line)
            if refuses and listed([shard]):
                queued.clear()
    if refuses and (lines := listed(shards)):
        raise refused_lines(shards[0].jsonl, lines)


def _here(queued: list[Shard], tokenizer: ConversationTokenizer) -> Iterator[Shard]:
    """Tokenizes the queued shards, from the last one on, and yields each."""
    while queued:
        yield make_shard(queued.pop(), tokenizer)


def _in_processes(queued: list[Shard], tokenizing: Tokenizing, count: int) -> Iterator[Shard]:
    """The same in `count` processes."""
    children = [Child(partial(make_shards, tokenizing)) for _ in range(count)]
    working: set[Child] = set()
    try:
        for child in children:
            _hand_out(child, queued, working)
        while working:
            for child in [child for child in children if child in working]:
                if (shard := child.receive(hurry=lambda: True)) is not None:
                    working.discard(child)
                    yield shard
                    _hand_out(child, queued, working)
    except TimeoutError:
        raise WlbError(
            "a process that tokenizes has stopped answering; start again, its shard is made anew"
        ) from None
    except (OSError, RuntimeError) as error:
        raise WlbError(
            f"a process that tokenizes has failed: {error}; start again, its shard is made anew"
        ) from None
    finally:
        for child in children:
            child.kill()


def _hand_out(child: Child, queued: list[Shard], working: set[Child]) -> None:
    if queued:
        child.send(queued.pop())
        working.add(child)


def refused_lines(jsonl: Path, lines: list[str]) -> WlbError:
    """What ends a job or a build that is to leave no bad lines out; they are listed."""
    suffix = ["and perhaps more"] if len(lines) >= LISTED else []
    text = f"{jsonl} has lines that cannot be trained; correct them, or leave them out by --wlb-sft-skip-bad-lines:"
    return WlbError("\n".join([text, *lines, *suffix]))


def listed(shards: list[Shard]) -> list[str]:
    """FILE:LINE: reason, of the first bad lines."""
    lines: list[str] = []
    for shard in shards:
        bad = (shard.about() or {}).get("bad", [])
        before = lines_before(shard.jsonl, shard.begin) if bad else 0
        lines += [f"{shard.jsonl}:{before + number}: {reason}" for number, reason in bad]
        if len(lines) >= LISTED:
            break
    return lines[:LISTED]


def _join(
    shards: list[Shard], into: IndexFolder, key: dict[str, Any], tokenizer: ConversationTokenizer
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    abouts = [(shard, shard.about() or {}) for shard in shards]
    counts = sum((Counts(**about["counts"]) for _, about in abouts), Counts())
    if not counts.conversations:
        raise WlbError(
            f"{shards[0].jsonl if shards else into.stem} trains nothing: {counts.lines:,} lines, "
            f"{counts.bad_lines:,} bad, {counts.without_target:,} conversations without a target; correct the file or "
            "--sft-tokenizer-prompt-format"
        )
    scratch = into.partial / f"joined.{of_this_process()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    builder = IndexedDatasetBuilder(str(scratch / f"{into.stem}.bin"), dtype=tokenizer.token_type)
    gc.freeze()  # Megatron's builder collects garbage after each shard: 0.2 s of all that was imported
    with (scratch / f"{into.stem}.mask").open("wb") as masks:
        for shard, about in abouts:
            if about["counts"]["conversations"]:
                builder.add_index(str(shard.prefix))
                with Path(f"{shard.prefix}.mask").open("rb") as part:
                    shutil.copyfileobj(part, masks)
    gc.unfreeze()
    builder.finalize(str(scratch / f"{into.stem}.idx"))
    about = {
        "counts": asdict(counts),
        "key": key,
        "tokens": _sha256(scratch / f"{into.stem}.bin"),
        "jsonl": str(shards[0].jsonl),
        "notes": tokenizer.notes(),
        "bad": listed(shards) if counts.bad_lines else [],
    }
    (scratch / "index.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(OSError):  # another process was first
        scratch.rename(into.folder)
    if not into.done:
        raise WlbError(f"cannot write {into.folder}: remove what is there")
    shutil.rmtree(into.partial, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
