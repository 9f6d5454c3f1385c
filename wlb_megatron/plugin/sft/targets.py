"""What --sft makes of a job: its jsonls become .bin/.idx pairs with masks, and long conversations are not split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.indexed import read_index
from wlb_megatron.documents.target_masks import Kept
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunks.choose_chunks import settings_refused
from wlb_megatron.plugin.flags.data_paths import prefixes_of, renamed
from wlb_megatron.plugin.flags.training_job import TrainingJob


def with_targets(
    job: TrainingJob, config: WlbConfig, say: Callable[[str], None]
) -> tuple[TrainingJob, WlbConfig]:
    """The job over tokenized conversations, and what happens to those longer than the window. The same job without
    --sft. Tokenizes what is not in the cache; say: prints a line. WlbError for what cannot be trained."""
    tuning = job.fine_tuning
    if tuning is None:
        return job, config
    data = job.data
    prefixes = prefixes_of(data)
    if tuning.tokenizing is not None:
        from wlb_megatron.plugin.sft.indexed import described, index_all

        for prefix in prefixes:
            if not Path(prefix).is_file():
                raise WlbError(
                    f"--sft reads conversations from jsonl files, and {prefix} is none; for .bin and .idx with a mask "
                    "add --wlb-sft-mask-data"
                )
        made = index_all([Path(prefix) for prefix in prefixes], tuning.tokenizing, tuning.cache, say=say)
        for indexed in made:
            say(described(indexed))
        for note in dict.fromkeys(note for indexed in made for note in indexed.notes):
            say(note)
        data = renamed(data, {prefix: each.files.prefix for prefix, each in zip(prefixes, made, strict=True)})
        prefixes = prefixes_of(data)
    if not tuning.overlong_given:
        longest = max((int(read_index(prefix).lengths.max()) for prefix in prefixes), default=0)
        config = replace(config, overlong=overlong_of(job, config, longest))
    return replace(job, data=replace(data, masks=Kept(job.batches.window, config.overlong))), config


def overlong_of(job: TrainingJob, config: WlbConfig, longest: int) -> str:
    """What happens by default to conversations longer than the window; longest: tokens of the longest.

    They train whole, in chunks, where chunks run and positions allow it, else they are dropped.
    """
    window = job.batches.window
    chunks = (
        longest > window
        and job.model.positions > window
        and config.chunks != "off"
        and config.packing == "varlen"
        and not settings_refused(config)
        and not job.trainer.chunks_refused(config.chunks)
    )
    return "chunk" if chunks else "drop"
