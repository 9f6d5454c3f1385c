"""Megatron's flags as far as they decide about documents in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from wlb_megatron.packing.chunks.chunk_limits import Trainer
from wlb_megatron.plugin.flags.trained_model import balancing_of
from wlb_megatron.plugin.flags.versions import megatron_version
from wlb_megatron.refusals import delta_nets


def trainer_of(args: Any) -> Trainer:
    """args: Megatron's validated arguments; what a release does not know is taken as not given."""
    # Imported here, because it imports torch, which the process that plans has no use for.
    from megatron.core.transformer.transformer_block import TransformerBlock

    def setting(name: str) -> Any:
        return getattr(args, name, None)

    return Trainer(
        stages=args.pipeline_model_parallel_size,
        tensor=args.tensor_model_parallel_size,
        experts=setting("num_experts") or 0,
        expert=args.expert_model_parallel_size or 1,
        expert_tensor=args.expert_tensor_parallel_size,
        balancing=balancing_of(args),
        shards_weights=bool(setting("use_megatron_fsdp") or setting("use_torch_fsdp2")),
        shares_scales=_shares_scales(setting),
        mtp=setting("mtp_num_layers") or 0,
        offloads=bool(setting("fine_grained_activation_offloading")),
        interleaves=bool(setting("virtual_pipeline_model_parallel_size")),
        offloads_layers=bool(setting("cpu_offloading") or setting("cpu_offloading_num_layers")),
        replays_routes=bool(setting("moe_enable_routing_replay")),
        release=megatron_version(),
        # Where the block has this function itself (0.17, dev). megatron.core.recompute (0.18, main) hands the mask on.
        hides_padding=hasattr(TransformerBlock, "_checkpointed_forward"),
        delta_nets=delta_nets(args),
        unknown_schedule=bool(setting("virtual_pipeline_model_parallel_size"))
        and not _interleaves_as_known(),
    )


def _shares_scales(setting: Callable[[str], Any]) -> bool:
    """Whether FP8 may reduce the largest values over data-parallel ranks in each forward and backward.

    Delayed scaling does, over tensor-, data- and context-parallel ranks (Megatron's get_amax_reduction_group), or over
    tensor- and context-parallel ones with `tp_only_amax_red`, which is no flag but a setting of some forks. A custom
    recipe, of all layers or of some, may. The other recipes stay within tensor-parallel ranks.
    """
    delayed_scaling = setting("fp8") and setting("fp8_recipe") in (None, "delayed", "custom")
    return bool((delayed_scaling and not setting("tp_only_amax_red")) or setting("te_precision_config_file"))


def _interleaves_as_known() -> bool:
    """Whether this Megatron's interleaved loop still calls what is replaced here, by the names of its code."""
    from megatron.core.pipeline_parallel import schedules

    def names(code: CodeType) -> set[str]:
        nested = (names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
        return set(code.co_names).union(*nested)

    loop = inspect.unwrap(schedules.forward_backward_pipelining_with_interleaving)
    called = {"get_pp_rank_microbatches", "get_schedule_table", "forward_step", "backward_step"}
    return called <= names(loop.__code__)
