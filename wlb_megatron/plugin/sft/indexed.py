"""What --sft makes of a job: its jsonls become .bin/.idx pairs with masks, found in the cache or made there first.

`wlb-megatron sft-index` makes them ahead of a job, which then finds them in the cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wlb_megatron.arguments import add_setting
from wlb_megatron.config import RANKS, whole
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.indexed import read_index
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.limits import settings_refused
from wlb_megatron.plugin.flags.data_paths import prefixes_of, renamed
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.sft.build import Say, build, refused_lines, wait_for_files
from wlb_megatron.plugin.sft.tokenizer import ConversationTokenizer
from wlb_megatron.sft.conversations import SHARD_BYTES, Counts, IndexFolder, Tokenizing, index_folder, key_of


@dataclass(frozen=True, slots=True)
class Indexed:
    """The files of a jsonl, what it came to, and what the log says of its format."""

    jsonl: Path
    files: IndexFolder
    counts: Counts
    notes: tuple[str, ...]


def index_all(
    jsonls: Sequence[Path],
    tokenizing: Tokenizing,
    cache: Path | None,
    *,
    say: Say,
    processes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Indexed]:
    """The files of each jsonl. Several processes may call this at once: the first one of a node (torchrun's LOCAL_RANK)
    makes what is missing, the others wait.

    WlbError for what cannot be tokenized; with bad lines that are not to be skipped, it lists them.
    """
    tokenizer = ConversationTokenizer(tokenizing)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    indexed_files = []
    for jsonl in jsonls:
        key, parts = key_of(jsonl, tokenizing, tokenizer.digest)
        files = index_folder(jsonl, cache, key)
        if first and not files.done:
            build(*(jsonl, files, parts, tokenizer), processes=processes, shard_bytes=shard_bytes, say=say)
        wait_for_files(files)  # of the first rank of this node
        about = files.about()
        counts = Counts(**about["counts"])
        if counts.bad_lines and not tokenizing.skips_bad:
            raise refused_lines(jsonl, about["bad"])
        indexed_files.append(Indexed(jsonl, files, counts, tuple(about["notes"])))
    return indexed_files


def described(indexed: Indexed) -> str:
    """One line about a jsonl: its conversations and tokens that train, and those left out."""
    counts = indexed.counts
    line = (
        f"{indexed.jsonl.name}: {counts.conversations:,} conversations, {counts.tokens:,} tokens, "
        f"{counts.targets / counts.tokens:.1%} of them trained, the longest {counts.longest:,}"
    )
    if counts.bad_lines:
        line += f"; {counts.bad_lines:,} bad lines left out"
    if counts.without_target:
        line += f"; {counts.without_target:,} conversations without a target left out"
    if counts.special_text:
        line += (
            f"; WARNING: in {counts.special_text:,} the text of a turn spells a special token and becomes it, as in "
            "Megatron"
        )
    return line


def with_targets(job: TrainingJob, say: Say) -> TrainingJob:
    """The job over tokenized conversations, with what happens to those longer than the window. The same job without
    --sft. Tokenizes what is not in the cache; say: prints a line. WlbError for what cannot be trained."""
    tuning = job.fine_tuning
    if tuning is None:
        return job
    data = job.data
    prefixes = prefixes_of(data)
    if tuning.tokenizing is not None:
        for prefix in prefixes:
            if not Path(prefix).is_file():
                raise WlbError(
                    f"--sft reads conversations from jsonl files, and {prefix} is none; for .bin and .idx with a mask "
                    "add --wlb-sft-mask-data"
                )
        indexed_files = index_all(
            [Path(prefix) for prefix in prefixes], tuning.tokenizing, tuning.cache, say=say
        )
        for indexed in indexed_files:
            say(described(indexed))
        for note in dict.fromkeys(note for indexed in indexed_files for note in indexed.notes):
            say(note)
        data = renamed(
            data, {prefix: each.files.prefix for prefix, each in zip(prefixes, indexed_files, strict=True)}
        )
        prefixes = prefixes_of(data)
    config = job.config
    if not tuning.overlong_given:
        longest_tokens = max((int(read_index(prefix).lengths.max()) for prefix in prefixes), default=0)
        config = replace(config, overlong=overlong_of(job, longest_tokens))
    masks = Rules(job.batches.window, config.overlong)
    return replace(job, config=config, data=replace(data, masks=masks))


def overlong_of(job: TrainingJob, longest_tokens: int) -> str:
    """What happens by default to conversations longer than the window; longest_tokens: tokens of the longest.

    They train whole, in chunks, where chunks run and positions allow it, else they are dropped.
    """
    window, config = job.batches.window, job.config
    chunks = (
        longest_tokens > window
        and job.model.positions > window
        and config.chunks != "off"
        and not config.fixed_windows
        and not settings_refused(config)
        and not job.trainer.chunks_refused(config.chunks)
    )
    return "chunk" if chunks else "drop"


def add_sft_index(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tokenizes conversations by Megatron's own SFT tokenizer into a .bin, an .idx and a mask of trained tokens. "
        "A job with the same flags finds them in its --data-cache-path. Can be started again after it was killed."
    )
    add = parser.add_argument
    add("jsonl", nargs="+", type=Path, help="files of conversations, one {'messages': [..]} a line")
    add(
        "--tokenizer-model", required=True, help="as the job's: folder of a Hugging Face tokenizer (required)"
    )
    add(
        "--sft-tokenizer-prompt-format",
        default="nemotron-h-aligned",
        help="as the job's: nemotron-h-aligned, nemotron-nano-v2, identity, default (default: nemotron-h-aligned)",
    )
    add("--data-cache-path", type=Path, help="as the job's (folder; default: cache/ beside each jsonl)")
    for name in ("sft_assistant_only", "sft_drop_tools", "sft_skip_bad_lines"):
        add_setting(parser, name)
    add("--processes", type=whole(1, RANKS), help="processes that tokenize (default: one a core, at most 64)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    tokenizing = Tokenizing(
        tokenizer=args.tokenizer_model,
        prompt_format=args.sft_tokenizer_prompt_format,
        assistant_only=args.sft_assistant_only,
        skips_bad=args.sft_skip_bad_lines,
        drops_tools=args.sft_drop_tools,
    )
    for indexed in index_all(
        args.jsonl, tokenizing, args.data_cache_path, say=print, processes=args.processes
    ):
        for line in (described(indexed), *indexed.notes):
            print(line)
        print(
            f"written: {indexed.files.prefix}.bin, .idx and .mask (analyze --lengths {indexed.files.prefix}.idx)"
        )
