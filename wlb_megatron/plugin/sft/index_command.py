"""`wlb-megatron sft-index`: tokenizes jsonls ahead of a job, which then finds their files in the cache."""

from __future__ import annotations

import argparse
from pathlib import Path

from wlb_megatron.arguments import add_setting
from wlb_megatron.config import RANKS, whole
from wlb_megatron.sft.index_files import Tokenizing


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
    from wlb_megatron.plugin.sft.indexed import described, index_all

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
