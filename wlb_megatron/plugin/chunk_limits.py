"""What Megatron is told to do that documents in chunks cannot be trained with, and who must keep in step."""

from __future__ import annotations

from typing import Any

from wlb_megatron.plugin.versions import megatron_version


def chunks_refused(args: Any) -> list[tuple[str, str]]:
    """(flag, cure) of each setting under which steps cannot run in groups of micro-batches (grouped_steps.py)."""

    def given(name: str) -> Any:
        return getattr(args, name, None)

    stages = args.pipeline_model_parallel_size
    rows = (
        (
            (given("virtual_pipeline_model_parallel_size") or 1) > 1,
            "--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage",
            "chunks run in the non-interleaved schedule alone; use one model chunk a stage",
        ),
        (
            stages > 1 and _release() < (0, 17),
            f"megatron-core {megatron_version()} with --pipeline-model-parallel-size above 1",
            "its schedule cannot be told to run more forwards ahead; use 0.17 or later",
        ),
        (
            given("mtp_num_layers"),
            "--mtp-num-layers",
            "a chunk's last tokens would have no tokens further on to predict; train whole documents",
        ),
        (
            given("fine_grained_activation_offloading"),
            "--fine-grained-activation-offloading",
            "it brings activations back in the order in which micro-batches began, chunks go back last first; "
            "recompute instead",
        ),
        (
            given("cpu_offloading") or given("cpu_offloading_num_layers"),
            "--cpu-offloading-num-layers",
            "it holds one micro-batch's activations at a time, chunks need those of several; recompute instead",
        ),
    )
    return [(flag, cure) for applies, flag, cure in rows if applies]


def in_step(args: Any) -> bool:
    """Whether data-parallel ranks meet in every forward and backward, so that they need the same groups.

    Ranks that share experts exchange tokens there, routers that balance over all ranks (again under recompute) their
    counts, FSDP's ranks parameters and gradients.
    """
    experts = bool(getattr(args, "num_experts", None)) and (
        (args.expert_model_parallel_size or 1) > 1
        or (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        > args.tensor_model_parallel_size
        or "global_aux_loss" in str(args.moe_router_load_balancing_type)
    )
    return experts or bool(
        getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)
    )


def _release() -> tuple[int, int]:
    major, minor = megatron_version().split(".")[:2]
    return int(major), int(minor)
