"""Pre-training entries on pip's megatron-core alone (its wheel has the loop, but no pretrain_gpt.py)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from wlb_megatron.plugin.flags.refusal_printing import refuse

USAGE = """usage: torchrun ... -m wlb_megatron.{name} <Megatron's flags> [--wlb-...]
       Megatron's flags are those of its {name}.py"""


def main(name: str = "pretrain_gpt") -> None:
    """Parse Megatron's and the plugin's flags, and run Megatron's own pretrain().

    name: the script of Megatron's that this stands for. pretrain_gpt builds a GPTModel, pretrain_hybrid a HybridModel.
    """
    started = time.time()
    from wlb_megatron.plugin.launch import enable, flags_help

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE.format(name=name), flags_help(), sep="\n\n")
        return

    enable()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps

    set_startup_timestamps(program_start=started, main_entry=time.time())
    pretrain(
        train_valid_test_dataset_provider=_replaced,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=_replaced,
        **_model(name),
    )


def _model(name: str) -> dict[str, Any]:
    """What pretrain() of this release makes the model of; from 0.18 on its caller parses the arguments before."""
    from megatron.training import argument_utils, arguments

    from wlb_megatron.plugin.model.gpt_model import model_provider

    if not hasattr(arguments, "parse_and_validate_args"):  # before 0.18
        return {"model_provider": _unless_off(model_provider)}
    args = arguments.parse_and_validate_args()
    _refuse_off(args)
    hybrid = args.hybrid_layer_pattern is not None
    if hybrid != (name == "pretrain_hybrid"):
        other_entry = "pretrain_hybrid" if hybrid else "pretrain_gpt, or give the pattern"
        refuse(
            f"--hybrid-layer-pattern {'is not for' if hybrid else 'is needed by'} {name}: use {other_entry}"
        )
    if not hasattr(argument_utils, "gpt_config_from_args"):  # before 0.19
        settings = argument_utils.pretrain_cfg_container_from_args(args)
        return {"cfg_container": settings, "model_provider": model_provider}
    of_model = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
    config = of_model(args)
    return {"cfg_container": argument_utils.pretrain_cfg_container_from_args(args, config)}


def _unless_off(model_provider: Callable[..., Any]) -> Callable[..., Any]:
    def provider(*args: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        _refuse_off(get_args())
        return model_provider(*args, **keywords)

    return provider


def _refuse_off(args: Any) -> None:
    if args.wlb_off:
        refuse(
            "--wlb-off: wlb_megatron.pretrain_gpt has no data of its own: run Megatron's pretrain_gpt.py instead"
        )


def _replaced(*_: Any, **__: Any) -> Any:
    raise RuntimeError("wlb_megatron's hook on pretrain() did not replace the provider and forward step")
