"""Pre-training entries on pip's megatron-core alone (its wheel has the loop, but no pretrain_gpt.py)."""

from __future__ import annotations

import sys
import time
from typing import Any

from wlb_megatron.plugin.flags.refusal_printing import refuse
from wlb_megatron.plugin.flags.versions import WHEEL

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
    if "--wlb-off" in sys.argv:
        refuse(f"--wlb-off: wlb_megatron.{name} has no data of its own: run Megatron's {name}.py instead")
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain, set_startup_timestamps

    if not hasattr(argument_utils, "gpt_config_from_args"):
        refuse(
            f"wlb_megatron.{name} needs a Megatron that has a model builder, as 0.19 has: pip install "
            f"megatron-core=={WHEEL}, or start a checkout's {name}.py through wlb_megatron.launch"
        )
    set_startup_timestamps(program_start=started, main_entry=time.time())
    args = arguments.parse_and_validate_args()
    hybrid = args.hybrid_layer_pattern is not None
    if hybrid != (name == "pretrain_hybrid"):
        other_entry = "pretrain_hybrid" if hybrid else "pretrain_gpt, or give the pattern"
        refuse(
            f"--hybrid-layer-pattern {'is not for' if hybrid else 'is needed by'} {name}: use {other_entry}"
        )
    of_model = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
    pretrain(
        cfg_container=argument_utils.pretrain_cfg_container_from_args(args, of_model(args)),
        train_valid_test_dataset_provider=_replaced,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=_replaced,
    )


def _replaced(*_: Any, **__: Any) -> Any:
    raise RuntimeError("wlb_megatron's hook on pretrain() did not replace the provider and forward step")
