"""What cannot be done right yet is refused at start, here, before a GPU allocates anything.

Each row: when it applies, the flag at fault, what to change. docs/support.md describes the rows
that a user is likely to meet; a feature that gets built loses its row here and its word there.
Rows look at any of Megatron's flags, so they take its arguments; all other code takes a TrainingJob.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import fatal
from wlb_megatron.registry import KERNELS, USUAL_KERNELS


class Refused(SystemExit):
    """Raised with lines that a person can act on, which Python prints last; exits with status 1.

    ranks_chosen: the ranks that print it have been chosen.
    """

    ranks_chosen = False

    def __init__(self, message: str) -> None:
        super().__init__(fatal(message))


class RefusedHere(Refused):
    """Refused for a file or a GPU of this rank; another rank of the same node may pass."""


class DryRunPassed(Exception):
    """Megatron and the plugin take the flags of a --wlb-dry-run. args: Megatron's arguments, validated and set."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`applies(args, config)` on Megatron's validated args; `flag` and `cure` make the message."""

    applies: Callable[[Any, WlbConfig], object]
    flag: str
    cure: str


def _get(args: Any, name: str) -> Any:
    return getattr(args, name, None)


def one_length(args: Any) -> bool:
    """Whether Megatron is to hold buffers, or graphs, that take one number of tokens."""
    return bool(_get(args, "tp_comm_overlap")) or graphed(args) is not None


MLP_GRAPHS = ("transformer_engine", {"mlp"})
"""The one kind of CUDA graphs whose parts do not depend on where documents end."""


def graphed(args: Any) -> tuple[str, set[str]] | None:
    """Who captures CUDA graphs, and which parts of a layer by name (none: whole layers); None without graphs."""
    made_by = _get(args, "cuda_graph_impl") or "none"  # older flags for graphs set it, too
    parts = _get(args, "cuda_graph_modules") or []
    return None if made_by == "none" else (made_by, {str(getattr(part, "name", part)) for part in parts})


def _windows(args: Any, config: WlbConfig) -> bool:
    """Whether all micro-batches, evaluation's too, can be padded to one length at little cost: packings fill windows of
    it."""
    micro_batch_size = _get(args, "micro_batch_size")
    return (
        config.fixed_windows
        and config.cp_mode != "dynamic"
        and (_get(args, "eval_micro_batch_size") or micro_batch_size) == micro_batch_size
    )


def _balancing(args: Any) -> bool:
    """Whether a router has a balancing loss. Its kinds have one coefficient, or one for each."""
    kinds, coefficients = _get(args, "moe_router_load_balancing_type"), _get(args, "moe_aux_loss_coeff")
    coefficients_of_kinds = coefficients if isinstance(coefficients, list) else [coefficients]
    return any(kind != "none" for kind in (kinds if isinstance(kinds, list) else [kinds])) and any(
        coefficients_of_kinds
    )


def _dispatcher(args: Any) -> str | None:
    """How experts' tokens travel, None without experts: "alltoall", "allgather", or the backend of "flex"."""
    kind = _get(args, "moe_token_dispatcher_type")
    if not _get(args, "num_experts") or kind is None:  # analyze does not read it
        return None
    return str(_get(args, "moe_flex_dispatcher_backend") or "deepep") if kind == "flex" else kind


def _exchange_unequal_tokens(args: Any, config: WlbConfig) -> bool:
    """Whether ranks that exchange experts' tokens may hold unequally many: those beyond one micro-batch's ranks, which
    hold equally many of it. (Ranks of experts are neighbours, tensor- and context-parallel ranks first.)"""
    size = _get(args, "expert_tensor_parallel_size") or _get(args, "tensor_model_parallel_size") or 1
    size *= _get(args, "expert_model_parallel_size") or 1
    shared = (_get(args, "tensor_model_parallel_size") or 1) * (_get(args, "context_parallel_size") or 1)
    if config.cp_mode == "dynamic":  # a group may be one context-parallel rank alone
        shared = _get(args, "tensor_model_parallel_size") or 1
    return bool(size > shared or shared % size)


def _batches_grow(args: Any) -> bool:
    ramp, steps = _get(args, "rampup_batch_size"), _get(args, "step_batch_size_schedule")
    return len(str(steps).split()) > 1 if steps else bool(ramp) and int(ramp[0]) < args.global_batch_size


DELTA_NETS = ("gated_delta_net", "gdn")
"""Values of --experimental-attention-variant that are one layer, the second in Megatron's main alone."""


def delta_nets(args: Any) -> bool:
    """Whether some layers are gated delta nets, by a HybridModel's pattern or a GPTModel's flag."""
    return "G" in (_get(args, "hybrid_layer_pattern") or "") or (
        _get(args, "experimental_attention_variant") in DELTA_NETS
    )


def _refusal_of(names: list[str], cure: str) -> Refusal:
    flags = " / ".join(f"--{name.replace('_', '-')}" for name in names)
    return Refusal(lambda a, c: any(_get(a, name) for name in names), flags, cure)


GIVEN: dict[str, str] = {
    "hybrid_context_parallel dynamic_context_parallel": "it replaces the same attention and sampler; drop it",
    "sequence_packing_scheduler use_varlen_dataset": (
        "the plugin packs documents of --data-path itself; drop it"
    ),
    "dataloader_inter_document_masking": "the plugin masks between documents already; drop it",
    "reset_position_ids reset_attention_mask": (
        "positions restart and documents are isolated already, from the index and not from token values; drop "
        "them"
    ),
    "eod_mask_loss": "it masks by token value, but a document's last token already predicts nothing; drop it",
    "ddp_average_in_collective": (
        "the loss is summed per token, so gradients are summed and divided by all ranks' tokens; drop "
        "--ddp-average-in-collective"
    ),
    "mock_data": "give documents with --data-path; `python -m scripts.corpus PREFIX` makes some, in a clone",
    "dataloader_save": "the packing state is part of Megatron's own checkpoints; drop it",
    "qk_clip log_max_attention_logit": "the plugin's attention does not collect the maximum logit; drop it",
    "fused_single_qkv_rope": "Megatron does not support it for packed sequences; drop it",
    "defer_embedding_wgrad_compute": (
        "it gathers deferred micro-batches into buffers of the first one's size, but micro-batches vary in "
        "length; drop it"
    ),
    "rotary_base_per_layer": "positions of the plan are rotated by one base in all layers; drop it",
    "fallback_to_eager_attn": (
        "attention over packed documents runs on cuDNN's or FlashAttention-4's kernels; drop it"
    ),
    "mtp_hsm": "it matches hidden states by Megatron's own token order; drop it",
    "use_kitchen_attention": "the plugin replaces core attention; drop it",
    "flash_attention_version": "attention over packed documents runs on cuDNN's kernels; drop it",
    "batch_invariant_mode": (
        "attention's kernels depend on the micro-batch; drop it, or use --deterministic-mode"
    ),
    "logits_save_dir logits_load_dir": "stored logits belong to Megatron's own samples; drop it",
    "inprocess_restart": (
        "Megatron's restart inside the process fails again and again (args is not initialized): "
        "use ft_launcher or torchrun --max-restarts, which restart processes"
    ),
    "cpu_offloading_retain_pinned_cpu_buffers": (
        "the buffers are kept for tensors of one shape, but micro-batches vary in length; drop it"
    ),
    "overlap_moe_expert_parallel_comm delay_wgrad_compute": (
        "its schedule runs the forward in parts, which the plugin does not support; drop it"
    ),
    "attention_dropout": "random dropout masks would differ between shardings; set --attention-dropout 0",
    "perform_rl_step": "only pre-training is supported; drop it",
    "phase_transition_iterations": "the document stream has one phase; drop it",
    "fim_data": "fill-in-the-middle rewrites documents; drop it",
}
"""What is refused wherever it is set: attributes of Megatron's arguments, and why, with what to change."""

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda a, c: (
            c.cp_mode == "dynamic"
            and _get(a, "num_experts")
            and (_balancing(a) or _get(a, "moe_z_loss_coeff"))
        ),
        "--wlb-cp-mode dynamic with --moe-aux-loss-coeff / --moe-z-loss-coeff",
        "a router's loss is a mean over a micro-batch, so it would depend on the groups; balance with "
        "--moe-router-enable-expert-bias, or use --wlb-cp-mode fixed",
    ),
    Refusal(
        lambda a, c: c.micro_batches_per_window not in ("auto", "1") and c.cp_mode == "dynamic",
        "--wlb-micro-batches-per-window with --wlb-cp-mode dynamic",
        "dynamic groups choose the number of micro-batches; leave it out",
    ),
    Refusal(
        lambda a, c: c.overlong == "chunk" and (c.chunks == "off" or c.fixed_windows),
        "--wlb-overlong chunk with --wlb-chunks off or another --wlb-packing than varlen",
        "a document above the window can train whole only in chunks; leave those flags out, or use --wlb-overlong "
        "split",
    ),
    Refusal(
        lambda a, c: c.overlong == "chunk" and a.max_position_embeddings <= a.seq_length,
        "--wlb-overlong chunk with --max-position-embeddings of no more than --seq-length",
        "positions exceed the window in such a document; set it to the length of the longest document that is to train "
        "whole (tokens)",
    ),
    Refusal(
        lambda a, c: c.kernels not in ("auto", USUAL_KERNELS) and _get(a, "transformer_impl") == "local",
        f"--wlb-kernels {' / '.join(name for name in KERNELS if name != USUAL_KERNELS)} with --transformer-impl local",
        "the local implementation runs attention in plain torch; use --transformer-impl transformer_engine, or "
        "--wlb-kernels auto",
    ),
    Refusal(
        lambda a, c: _get(a, "train_iters") and not _get(a, "skip_train") and _batches_grow(a),
        "--rampup-batch-size / --step-batch-size-schedule with --train-iters",
        "Megatron's learning rate counts samples as if every batch were the largest, so it would end too high; give "
        "--train-samples (and --lr-decay-samples, --lr-warmup-samples)",
    ),
    Refusal(
        lambda a, c: _get(a, "multi_latent_attention") and _get(a, "apply_rope_fusion"),
        "--multi-latent-attention with fused RoPE",
        "the fused kernel assumes Megatron's own token order; add --no-rope-fusion",
    ),
    Refusal(
        lambda a, c: (
            _get(a, "mtp_num_layers")
            and "m" not in str(_get(a, "pipeline_model_parallel_layout") or "m").split("|")[-1]
        ),
        "--mtp-num-layers on another stage than the last (--pipeline-model-parallel-layout)",
        "hidden states of several depths would pass between stages, in shapes that the plan does not have; put the m "
        "into the last stage",
    ),
    Refusal(
        lambda a, c: graphed(a) not in (None, MLP_GRAPHS),
        "--cuda-graph-impl other than transformer_engine with --cuda-graph-modules mlp",
        "other graphs take in attention or a router, which depend on where documents end; leave graphs off",
    ),
    Refusal(
        lambda a, c: (
            graphed(a) == MLP_GRAPHS
            and not (
                _windows(a, c)
                and _get(a, "micro_batch_size") == 1
                and not _get(a, "num_experts")
                and not _batches_grow(a)
            )
        ),
        "--cuda-graph-impl with varlen packing, dynamic groups, experts, growing batches or --micro-batch-size above 1",
        "a graph takes one number of tokens, but micro-batches vary in length (padding costs 5 to 28 % of a step, "
        "graphs of MLPs give about 1 %); use --wlb-packing original, which fills windows, or leave graphs off",
    ),
    Refusal(
        lambda a, c: _get(a, "hybrid_layer_pattern") and {*a.hybrid_layer_pattern} - {*"*-EG|/"},
        "--hybrid-layer-pattern with layers other than *, -, E and G",
        "M (Mamba) would carry state from one document to the next, and D and + are attention of other kinds; use "
        "attention, MLP, experts and gated delta nets",
    ),
    Refusal(
        lambda a, c: _get(a, "experimental_attention_variant") not in (None, *DELTA_NETS),
        "--experimental-attention-variant other than gated_delta_net (main: gdn)",
        "dsa replaces core attention, as the plugin does, and gdn2 has not been tried; drop it",
    ),
    Refusal(
        lambda a, c: delta_nets(a) and hasattr(a, "linear_cp_mode"),
        "--hybrid-layer-pattern with G / --experimental-attention-variant on Megatron's dev branch",
        "dev cuts tokens for its chunkwise mode itself; use megatron-core 0.18.2, 0.19 or main",
    ),
    Refusal(
        lambda a, c: (
            delta_nets(a)
            and (_get(a, "tensor_model_parallel_size") or 1) > 1
            and not _get(a, "sequence_parallel")
        ),
        "--tensor-model-parallel-size above 1 with gated delta nets, without --sequence-parallel",
        "Megatron then does not sum the gradient of their norm over tensor-parallel ranks (its issue 7452); add "
        "--sequence-parallel",
    ),
    Refusal(
        lambda a, c: delta_nets(a) and _get(a, "deterministic_mode"),
        "--deterministic-mode with gated delta nets",
        "Megatron's deterministic convolution and rule carry state from one document to the next; drop it",
    ),
    Refusal(
        lambda a, c: delta_nets(a) and c.cp_mode == "dynamic",
        "--wlb-cp-mode dynamic with gated delta nets",
        "their heads are spread over all context-parallel ranks; use --wlb-cp-mode fixed",
    ),
    Refusal(
        lambda a, c: delta_nets(a) and c.profile,
        "--wlb-profile with gated delta nets",
        "a profile measures no such layer, so steps would be planned without their work; leave it out",
    ),
    Refusal(
        lambda a, c: "*" not in (_get(a, "hybrid_layer_pattern") or "*").split("/")[0],
        "--hybrid-layer-pattern without *",
        "the plugin plans attention over documents; a HybridModel needs a layer of it",
    ),
    Refusal(
        lambda a, c: "E" in (_get(a, "hybrid_layer_pattern") or "") and not _get(a, "num_experts"),
        "--hybrid-layer-pattern with E",
        "it has experts, of which no flag says how many; give --num-experts, or put - for E",
    ),
    Refusal(
        lambda a, c: "" in (_get(a, "hybrid_layer_pattern") or "*").split("/")[0].split("|"),
        "--hybrid-layer-pattern with nothing between two |",
        "a stage or virtual stage would have no layers; put some there",
    ),
    Refusal(
        lambda a, c: {*(_get(a, "hybrid_layer_pattern") or "").partition("/")[2]} & {*"EG"},
        "--hybrid-layer-pattern with E or G after /",
        "HybridModel tells the routers of further predictions nothing of padding, which would count in their losses, "
        "and G was not tried there; predict with * and -",
    ),
    Refusal(
        lambda a, c: (
            _get(a, "hybrid_layer_pattern")
            and (_get(a, "decoder_first_pipeline_num_layers") or _get(a, "decoder_last_pipeline_num_layers"))
        ),
        "--hybrid-layer-pattern with --decoder-first-pipeline-num-layers / --decoder-last-pipeline-num-layers",
        "memory is counted by the pattern's stages; put | into the pattern",
    ),
    Refusal(
        lambda a, c: _get(a, "hybrid_layer_pattern") and _get(a, "multi_latent_attention"),
        "--hybrid-layer-pattern with --multi-latent-attention",
        "a HybridModel's * has no latent attention; drop it, or train MLA with pretrain_gpt.py",
    ),
    Refusal(
        lambda a, c: _get(a, "fp4"),
        "--fp4-format",
        "token counts are not aligned to FP4's scaling blocks; train in FP8 or bf16",
    ),
    Refusal(
        lambda a, c: c.plan_process == "always" and c.cp_mode == "dynamic",
        "--wlb-plan-process always",
        "--wlb-cp-mode dynamic plans in a thread; use auto",
    ),
    Refusal(
        lambda a, c: _get(a, "sft") and _get(a, "tokenizer_type") != "SFTTokenizer" and not c.sft_mask_data,
        "--sft with another --tokenizer-type than SFTTokenizer",
        "conversations become tokens by Megatron's SFT tokenizer; set it, and --tokenizer-model to a folder",
    ),
    Refusal(
        lambda a, c: c.train_epochs and (c.fixed_windows or _batches_grow(a) or _get(a, "skip_train")),
        "--wlb-train-epochs with another --wlb-packing than varlen, growing batches or --skip-train",
        "the number of steps is not known then; give --train-samples",
    ),
    Refusal(
        lambda a, c: _get(a, "sft") and _get(a, "wlb_overlong") == "split",
        "--wlb-overlong split with --sft",
        "the later part of a conversation would be trained without the earlier one; use chunk, drop or truncate",
    ),
    Refusal(
        lambda a, c: (
            (c.sft_skip_bad_lines or c.sft_drop_tools or c.sft_assistant_only or c.sft_mask_data)
            and not _get(a, "sft")
        ),
        "--wlb-sft-* without --sft",
        "it is about conversations; add --sft, or leave it out",
    ),
    Refusal(
        lambda a, c: _get(a, "dataloader_type") == "cyclic",
        "--dataloader-type cyclic",
        "the plugin shuffles documents itself, by --seed; drop it",
    ),
    Refusal(
        lambda a, c: _dispatcher(a) == "allgather" and _exchange_unequal_tokens(a, c),
        "--moe-token-dispatcher-type allgather with experts spread over ranks of several micro-batches",
        "it gathers equally many tokens of each rank, but micro-batches vary in length; use alltoall, or an "
        "--expert-model-parallel-size (x --expert-tensor-parallel-size) within context x tensor parallel size",
    ),
    Refusal(
        lambda a, c: (
            _dispatcher(a) == "hybridep"
            and not _get(a, "moe_hybridep_pad_uneven_dispatch_inputs")
            and _exchange_unequal_tokens(a, c)
        ),
        "--moe-flex-dispatcher-backend hybridep with experts spread over ranks of several micro-batches",
        "it takes equally many tokens of each rank, but micro-batches vary in length; add "
        "--moe-hybridep-pad-uneven-dispatch-inputs",
    ),
    Refusal(
        lambda a, c: (
            _dispatcher(a) not in ("alltoall", "allgather", "deepep", "hybridep", None)
            or (
                _get(a, "num_experts")
                and (_get(a, "moe_paged_stash") or _get(a, "moe_expert_rank_capacity_factor"))
            )
        ),
        "--moe-flex-dispatcher-backend ncclep / --moe-paged-stash / --moe-expert-rank-capacity-factor",
        "its buffers are made for a fixed number of tokens, but micro-batches vary in length; use "
        "--moe-token-dispatcher-type alltoall",
    ),
    Refusal(
        lambda a, c: (
            _get(a, "num_experts")
            and any(
                kind in str(_get(a, "moe_router_load_balancing_type"))
                for kind in ("sinkhorn", "quantile_balancing")
            )
        ),
        "--moe-router-load-balancing-type sinkhorn / quantile_balancing",
        "it routes each token by the other tokens of its rank, padding included, so routes would differ between "
        "layouts; "
        "use aux_loss, global_aux_loss or none",
    ),
    Refusal(
        lambda a, c: getattr(_get(a, "attention_backend"), "name", "auto") in ("flash", "unfused"),
        "--attention-backend flash / unfused",
        "attention over packed documents runs on cuDNN's kernels; use auto or fused",
    ),
    Refusal(
        lambda a, c: (
            _get(a, "distributed_backend") == "nccl"
            and "local" in (_get(a, "transformer_impl"), getattr(_get(a, "attention_backend"), "name", ""))
        ),
        "--transformer-impl local / --attention-backend local on GPUs",
        "attention would run one document at a time in plain torch; use transformer_engine",
    ),
    Refusal(
        lambda a, c: _get(a, "position_embedding_type") not in ("rope", "yarn", "none", None),
        "--position-embedding-type",
        "only rope, yarn and none are supported; use --position-embedding-type rope",
    ),
    Refusal(
        lambda a, c: _get(a, "tp_comm_overlap") and not _windows(a, c),
        "--tp-comm-overlap with packing by varlen, dynamic groups or another --eval-micro-batch-size",
        "Transformer Engine's buffers take one number of tokens, but micro-batches vary in length (padding costs 37 % "
        "of a step, the overlap gives about 2 %); use --wlb-packing original, which fills windows, or drop it",
    ),
    Refusal(
        lambda a, c: any(
            (_get(a, size) or 1) > 1 for size in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
        ),
        "--tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards",
        "ranks that share a weight's shards would train micro-batches of their own, which the plan does not have; "
        "drop it",
    ),
    Refusal(
        lambda a, c: (
            (_get(a, "enable_mhc_connections") or _get(a, "enable_hyper_connections"))
            and (_get(a, "pipeline_model_parallel_size") or 1) > 1
        ),
        "--enable-mhc-connections / --enable-hyper-connections with a pipeline",
        "stages would pass several streams of hidden states, in shapes that the plan does not have; use one stage",
    ),
    Refusal(
        lambda a, c: c.log_plans and c.log is None,
        "--wlb-log-plans without --wlb-log",
        "it adds to that file's lines; give --wlb-log PATH",
    ),
    Refusal(
        lambda a, c: _get(a, "rerun_mode") == "report_stats",
        "--rerun-mode report_stats",
        "Megatron's parser takes the word, but its rerun machine does not know it (0.18 to 0.20); use validate_results "
        "or disabled",
    ),
    Refusal(
        lambda a, c: _get(a, "multiple_validation_sets") and not _get(a, "full_validation"),
        "--multiple-validation-sets without --full-validation",
        "Megatron evaluates several sets only in full; add --full-validation",
    ),
    Refusal(
        lambda a, c: (
            _get(a, "multiple_validation_sets") and (_get(a, "virtual_pipeline_model_parallel_size") or 1) > 1
        ),
        "--multiple-validation-sets with virtual pipeline stages",
        "Megatron confuses the stages' data iterators with those of the sets; evaluate one set, such as a blend",
    ),
    *(_refusal_of(names.split(), cure) for names, cure in GIVEN.items()),
)


def unsupported(args: Any, config: WlbConfig) -> list[str]:
    """A line for every row of the table that applies. Flags that `args` lack are taken as not given."""
    return [f"{row.flag}: {row.cure}." for row in REFUSALS if row.applies(args, config)]


def refuse_unsupported(args: Any, config: WlbConfig) -> None:
    """Raise Refused with every row of the table that applies."""
    if lines := unsupported(args, config):
        raise Refused("\n".join(lines))
