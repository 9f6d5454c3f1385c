"""A GPT pre-training entry on pip's megatron-core alone (its wheel has the loop, but no pretrain_gpt.py)."""

from __future__ import annotations

import time
from typing import Any


def main() -> None:
    """Parse Megatron's and the plugin's flags, and run Megatron's own pretrain()."""
    started = time.time()
    from wlb_megatron.plugin.versions import check_megatron

    check_megatron()
    from wlb_megatron.plugin import hooks

    hooks.install()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    set_startup_timestamps(program_start=started, main_entry=time.time())
    args = parse_and_validate_args()
    if args.wlb_off:
        raise SystemExit(
            "wlb_megatron.pretrain_gpt has no data of its own: run Megatron's pretrain_gpt.py instead"
        )
    settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(settings, _replaced, ModelType.encoder_or_decoder, _replaced)


def _replaced(*_: Any, **__: Any) -> Any:
    raise RuntimeError("wlb_megatron's hook on pretrain() did not replace the provider and forward step")
