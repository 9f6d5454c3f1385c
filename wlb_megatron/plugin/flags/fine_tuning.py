"""--sft by Megatron's flags: where conversations come from, and how they become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.sft.index_files import Tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """tokenizing: of the jsonls of --data-path; None where that names .bin/.idx pairs with masks. cache: the folder of
    their tokens, None for one beside each. overlong_given: the user has chosen what happens to long conversations."""

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
