"""Where the documents of a part lie, by Megatron's flags: --data-path, --data-args-path, per-split paths, --sft."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import SPLITS, Blend, parse_blend, part_corpora
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.indexed import read_index
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import job_state
from wlb_megatron.sft.conversations import Tokenizing


@dataclass(frozen=True, slots=True)
class DataPaths:
    """Prefixes (and weights) as Megatron's flags give them.

    by_part: those of train, valid and test. split: divides the documents of parts that share theirs; None if each part
    takes all of its own. masks: each corpus has a mask of its trained tokens.
    """

    by_part: Mapping[str, tuple[str, ...]]
    split: str | None = None
    masks: Rules | None = None

    @classmethod
    def of(cls, args: Any) -> DataPaths:
        """args: Megatron's validated arguments. WlbError if a file of paths cannot be read."""
        if args.per_split_data_args_path is not None:
            return cls(_read_parts("--per-split-data-args-path", args.per_split_data_args_path))
        by_part = {part: tuple(getattr(args, f"{part}_data_path") or ()) for part in SPLITS}
        if any(by_part.values()) and not args.data_path:
            return cls(by_part)
        common = args.data_path or ()
        if args.data_args_path is not None:
            common = _read("--data-args-path", args.data_args_path).split()
        parts = SPLITS if args.split is not None else SPLITS[:1]  # without a split, all documents train
        return cls(dict.fromkeys(SPLITS, ()) | dict.fromkeys(parts, tuple(common)), args.split)


def training_corpora(paths: DataPaths) -> list[Corpus]:
    """The corpora that train, from their .idx alone; [] where none is named. WlbError if one cannot be read."""
    words = paths.by_part["train"]
    if not words:
        return []
    prefixes, weights = parse_blend(words)
    lengths = [read_index(prefix).lengths for prefix in prefixes]
    return part_corpora(prefixes, lengths, weights, paths.split)


def prefixes_of(paths: DataPaths) -> list[str]:
    """Each prefix that is named, once, in order."""
    values = [paths.by_part[part] for part in SPLITS if paths.by_part[part]]
    return list(dict.fromkeys(prefix for each in values for prefix in parse_blend(each)[0]))


def renamed(paths: DataPaths, names: Mapping[str, str]) -> DataPaths:
    """The same with other prefixes."""

    def new(values: tuple[str, ...]) -> tuple[str, ...]:
        if not values:
            return values
        prefixes, weights = parse_blend(values)
        new_prefixes = [names[prefix] for prefix in prefixes]
        return tuple(
            new_prefixes if weights is None else chain(*zip(map(repr, weights), new_prefixes, strict=True))
        )

    return replace(paths, by_part={part: new(values) for part, values in paths.by_part.items()})


def documents(
    paths: DataPaths, part: str, blends: dict[tuple[str, ...], Blend] | None = None
) -> tuple[Blend, list[Corpus]] | None:
    """A part's corpora (train, valid or test); None if it has no document. WlbError if a file cannot be read.

    blends: blends that other parts have read, which this one shares: an index is checked once.
    """
    key = paths.by_part[part]
    if part != "train" and not key:
        return None
    blends = {} if blends is None else blends
    if key not in blends:
        prefixes, weights = parse_blend(key)
        allow_open_files(len(prefixes), "the mapped indices of all corpora")
        blends[key] = Blend(prefixes, weights, checked_elsewhere, paths.masks)
    blend = blends[key]
    corpora = blend.corpora(paths.split, part)
    return (blend, corpora) if corpora or part == "train" else None


def _read_parts(flag: str, path: str) -> dict[str, tuple[str, ...]]:
    """The JSON file of Megatron's --per-split-data-args-path: {"train": [...] or "...", "valid": .., "test": ..}."""
    try:
        parts = json.loads(_read(flag, path))
    except ValueError as error:
        raise WlbError(
            f"{flag} {path} is no JSON ({error}); give an object of train, valid and test"
        ) from None
    if not isinstance(parts, dict) or not parts.get("train"):
        raise WlbError(
            f"{flag} {path} names no training corpus; give an object with lists train, valid and test"
        )
    lists = {}
    for part in SPLITS:
        values = parts.get(part) or []
        lists[part] = tuple(values.split() if isinstance(values, str) else map(str, values))
    return lists


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WlbError(
            f"cannot read {flag} {path}: {getattr(error, 'strerror', None) or error}; give a text file"
        ) from None


NETWORK = (
    "lustre",
    "nfs",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "cifs",
    "smb",
    "9p",
    "virtiofs",
    "fuse",
)
"""How the names of file systems begin that all nodes share."""


def checked_elsewhere(prefix: str) -> bool:
    """Whether another rank checks this index: rank 0 on a file system that nodes share, else each node's first rank.

    An index is 20 bytes a document: 1 TB if 512 nodes read 100 million documents of it. Ranks cannot talk to each other
    yet. They need not: a rank that finds an index wrong ends, and its launcher the others.
    """
    if os.environ.get("RANK", "0") == "0":
        return False
    return os.environ.get("LOCAL_RANK", "0") != "0" or file_system(
        str(Path(prefix).resolve().parent)
    ).startswith(NETWORK)


@cache
def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that holds a folder, by its mount; empty if that is not known."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    # 36 35 98:0 /root /mount/point options .. - kind source: the last mount of the longest path holds it
    kinds = {row[4]: row[row.index("-") + 1] for row in rows}
    holding = [point for point in kinds if Path(folder).is_relative_to(point)]
    return kinds[max(holding, key=len)] if holding else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """tokenizing: how the jsonls of --data-path are tokenized; None if that names .bin/.idx pairs with masks. cache:
    the folder of their tokens, None for one beside each. overlong_given: the user has chosen what happens to long
    conversations.
    """

    tokenizing: Tokenizing | None
    cache: Path | None
    overlong_given: bool

    @classmethod
    def of(cls, args: Any, settings: WlbConfig) -> FineTuning | None:
        """args: Megatron's validated arguments. None without --sft."""
        if not getattr(args, "sft", False):
            return None
        tokenizing = Tokenizing(
            tokenizer=str(getattr(args, "tokenizer_model", None)),
            prompt_format=args.sft_tokenizer_prompt_format,
            assistant_only=settings.sft_assistant_only,
            skips_bad=settings.sft_skip_bad_lines,
            drops_tools=settings.sft_drop_tools,
        )
        cache = getattr(args, "data_cache_path", None)
        return cls(
            tokenizing=None if settings.sft_mask_data else tokenizing,
            cache=Path(cache) if cache else None,
            overlong_given=getattr(args, "wlb_overlong", None) is not None,
        )


SPARE, LEAST_SPARE = 1024, 256
"""Files for all that is not counted here (torch, NCCL, checkpoints): asked for, and needed at least."""


@dataclass(slots=True)
class FilesAllowed:
    """Files counted for all purposes so far."""

    total: int = 0


def allow_open_files(count: int, purpose: str) -> None:
    """Let this process open `count` files beside those of earlier calls. Often 1,024 are allowed until it asks.

    purpose: the opener's name, to begin the message. Raises WlbError if the machine's hard limit is too low.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = job_state.part(FilesAllowed)
    total = files.total + count
    if hard_limit != resource.RLIM_INFINITY and hard_limit < total + LEAST_SPARE:
        raise WlbError(
            f"{purpose} need {count} open files, {total + LEAST_SPARE} with all others, but a process may open "
            f"{hard_limit} here: raise the hard limit (ulimit -Hn, Slurm's PropagateResourceLimits, the container's "
            "--ulimit nofile)"
        )
    files.total = total
    target = total + SPARE
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target:
        new_limit = target if hard_limit == resource.RLIM_INFINITY else min(target, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
