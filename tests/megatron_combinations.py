"""The table of configurations: what a run adds to the small test model, and on how many processes.

scripts/check_combinations.py runs each through Megatron's loop against the single process with the same `model`
flags; tests/test_megatron_layouts.py runs a few of them.
"""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Combination:
    """`flags`: of this run alone. `model`: flags that the single process takes, too. `without`: flags of the small
    test model that both leave out. `stock`: in bf16, run these flags without the plugin, too, and compare with it.
    `needs`: a package that Megatron asks for then. `available`: bytes of each rank for a step's activations, so that
    some layers are kept and some recomputed."""

    name: str
    processes: int
    flags: str = ""
    model: str = ""
    without: str = ""
    stock: bool = False
    needs: str = ""
    available: str = ""


TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
TP2, PP2, CP2 = f"{TP} 2", f"{PP} 2", f"{CP} 2"
SP = f"{TP2} --sequence-parallel"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)
ALLGATHER = MOE.replace("alltoall", "allgather")
DELTA_NET = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
DELTA_NETS = f"--hybrid-layer-pattern G-*-G- --spec scripts.local_hybrid stack {DELTA_NET}"
BY_DOCUMENT = MOE.replace("type aux", "type seq_aux")
BY_DOCUMENT_ALONE = (
    MOE.replace("aux_loss --moe-aux-loss-coeff 0.01", "aux_loss seq_aux_loss --moe-aux-loss-coeff 0 0.1")
    + " --moe-z-loss-coeff 0.01"
)
"""Those losses of routers that do not depend on which documents share a micro-batch."""
BIASES = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SHARED_EXPERTS = "--moe-shared-expert-intermediate-size 64"
LOCAL_EP = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
EP = "--expert-model-parallel-size 2"
TIED = "--untie-embeddings-and-output-weights"
"""Left out, so that embeddings are tied."""
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
MEGATRON_FSDP = (
    f"--use-megatron-fsdp --ckpt-format fsdp_dtensor {SHARDED} --data-parallel-sharding-strategy "
    "optim_grads_params"
)
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dist"
VPP = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
VPP4 = VPP.replace(" 2 ", " 4 ", 1)

FP8 = "--fp8-format hybrid --fp8-recipe"
FP8_DELAYED = f"{FP8} delayed"
"""On CPUs its collectives and its queues of scales alone (fp8_stand_in.py)."""
EXPERTS = f"{MOE} --moe-grouped-gemm --moe-shared-expert-intermediate-size 256"
MLA = (
    "--multi-latent-attention --no-rope-fusion --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128"
)
WINDOWS = "--window-size 200,0 --window-attn-skip-freq 2 --softmax-type learnable"
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"

FULL, SELECTIVE = f"{RECOMPUTE} uniform", "--recompute-granularity selective"
REHEARSED = "--wlb-rehearsal always"
PATTERN = "--hybrid-layer-pattern"

LONG_WHOLE = "--wlb-chunks off --wlb-max-delay 0 --wlb-max-tokens 4096"
LONG_CHUNKS = "--wlb-chunks on --wlb-quadratic-at 1280 --wlb-micro-batch-cost 32 --wlb-max-tokens 1280"
"""For the GPUs' windows of 1024 tokens."""

GPU: tuple[Combination, ...] = (
    Combination("one GPU, HybridModel", 1, f"{PATTERN} *-*-*-*-"),
    Combination("one GPU, HybridModel, MoE", 1, f"{PATTERN} *E*E*E*E", EXPERTS),
    Combination(
        "one GPU, HybridModel, some layers kept", *(1, f"{PATTERN} *-*-*-*- {FULL}"), available="26000000"
    ),
    Combination("one GPU, FP8 delayed, some layers kept", *(1, FULL, f"{FP8} delayed"), available="26000000"),
    Combination("one GPU, chunks, MTP of 1", 1, LONG_CHUNKS, f"--mtp-num-layers 1 {LONG_WHOLE}"),
    Combination("one GPU, chunks, seq_aux_loss", 1, LONG_CHUNKS, f"{BY_DOCUMENT_ALONE} {LONG_WHOLE}"),
    Combination("one GPU, layers offloaded", 1, "--cpu-offloading-num-layers 2"),
    Combination("one GPU, selective recompute", 1, SELECTIVE),
    Combination("one GPU, FP8 delayed, after a rehearsal", 1, REHEARSED, f"{FP8} delayed"),
    Combination("one GPU, FP8 blockwise, after a rehearsal", 1, REHEARSED, f"{FP8} blockwise"),
    Combination("one GPU, MoE, after a rehearsal", 1, REHEARSED, EXPERTS),
    Combination("one GPU, distributed optimizer, overlaps", 1, OVERLAPS),
    Combination("TP2", 2, TP2, stock=True),
    Combination("TP2+SP, EP2, MoE, overlaps", 2, f"{SP} {LOCAL_EP} {OVERLAPS}", EXPERTS),
    Combination("CP2, layers offloaded", 2, f"{CP2} --cpu-offloading-num-layers 2"),
    Combination("CP2, Megatron-FSDP", 2, f"{CP2} {MEGATRON_FSDP}", needs="einops"),
    Combination("CP2, selective recompute", 2, f"{CP2} {SELECTIVE}"),
    Combination("PP2, tied embeddings", 2, PP2, without=TIED),
    Combination("CP2, FP8 delayed, after a rehearsal", 2, f"{CP2} {REHEARSED}", f"{FP8} delayed"),
    Combination(
        "CP2, FP8 delayed, some layers kept",
        *(2, f"{CP2} {FULL}", f"{FP8} delayed"),
        available="17000000,16000000",
    ),
    Combination("CP2, FP8 blockwise", 2, CP2, f"{FP8} blockwise"),
    Combination("CP2, EP2, MoE, after a rehearsal", 2, f"{CP2} {EP} {REHEARSED}", EXPERTS),
    Combination("CP2", 2, CP2),
    Combination("CP2, HybridModel", 2, f"{CP2} {PATTERN} *-*-*-*-"),
    Combination("TP2+SP", 2, SP, stock=True),
    Combination("PP2", 2, PP2),
    Combination("VPP2 on PP2", 2, VPP),
    Combination("DP2, distributed optimizer, overlaps", 2, OVERLAPS),
    Combination("CP2, EP2, MoE, grouped, shared experts", 2, f"{CP2} {EP}", EXPERTS),
    Combination("CP2, full recompute", 2, f"{CP2} {FULL}"),
    Combination("CP2, FP8 tensorwise", 2, CP2, f"{FP8} tensorwise"),
    Combination("CP2, MLA", 2, CP2, MLA, without="--group-query-attention"),
    Combination("CP2, windows, sinks", 2, CP2, WINDOWS),
    Combination("CP2, MTP of 2", 2, CP2, "--mtp-num-layers 2"),
    Combination("CP2, distributed optimizer, overlaps", 2, f"{CP2} {OVERLAPS}"),
    Combination(
        "CP2, fine-grained offloading",
        2,
        f"{CP2} --fine-grained-activation-offloading --min-offloaded-tensor-size 1024 "
        "--offload-modules core_attn attn_proj attn_norm mlp_norm qkv_linear",
    ),
    Combination("CP2, torch FSDP2", 2, f"{CP2} {FSDP2}"),
)
"""For one or two GPUs (NCCL, Transformer Engine, bf16); those that are in no file of docs/results come first."""

FOUR = "--num-layers 4"
WHOLE = {"no_op": False, "replace_with_linear": False}
NOTHING, LINEAR = {**WHOLE, "no_op": True}, {**WHOLE, "replace_with_linear": True}
HETEROGENEOUS = json.dumps(
    {
        "block_configs": [
            {"attention": {"n_heads_in_group": group, **how}, "mlp": {"ffn_mult": ffn, **mlp}}
            for group, how, ffn, mlp in (
                (2, WHOLE, 2.0, WHOLE),
                (None, NOTHING, 1.0, WHOLE),
                (2, WHOLE, None, NOTHING),
                (None, LINEAR, None, LINEAR),
            )
        ],
        **{"hidden_act": "silu", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
        **{"tie_word_embeddings": False, "rope_theta": 10000, "rope_scaling": {"factor": 8.0}},
    },
    separators=(",", ":"),
)
"""Layers whole, without attention, without an MLP, and with linear layers in their place."""

MTP = "--mtp-num-layers"
EIGHT = "--num-layers 8"

WHOLE = "--wlb-chunks off --wlb-max-delay 0 --wlb-max-tokens 256"
CHUNKS = "--wlb-chunks on --wlb-quadratic-at 80 --wlb-micro-batch-cost 2 --wlb-max-tokens 80"


def _in_chunks(
    name: str,
    stages: int,
    virtual: int,
    flags: str = "",
    model: str = "",
    processes: int = 0,
    without: str = "",
) -> Combination:
    """Documents in chunks over virtual stages, against whole ones."""
    layout = f"{PP} {stages} --num-virtual-stages-per-pipeline-rank {virtual}"
    layers = f"--num-layers {stages * virtual}"
    return Combination(
        f"chunks, VPP{virtual} on PP{stages}{name}",
        *(processes or stages, f"{layout} {flags} {CHUNKS}", f"{layers} {model} {WHOLE}", without),
    )


IN_CHUNKS: tuple[Combination, ...] = (
    _in_chunks("", 2, 2),
    _in_chunks("", 2, 4),
    _in_chunks("", 4, 2),
    _in_chunks("", 4, 4),
    _in_chunks(", no p2p overlap", 4, 2, "--no-overlap-p2p-communication"),
    _in_chunks(", overlap in warm-up and flush", 2, 2, "--overlap-p2p-communication-warmup-flush"),
    _in_chunks(", groups of 4", 2, 2, "--microbatch-group-size-per-virtual-pipeline-stage 4"),
    _in_chunks(", CP2", 2, 2, CP2, processes=4),
    _in_chunks(", TP2+SP", 2, 2, SP, processes=4),
    _in_chunks(", DP2, distributed optimizer", 2, 2, OVERLAPS, processes=4),
    _in_chunks(", EP2", 2, 2, EP, BY_DOCUMENT_ALONE, 4),
    _in_chunks(", tied embeddings", 2, 2, without=TIED),
    _in_chunks(", full recompute", 2, 2, FULL),
    _in_chunks(
        ", CP2, selective recompute, keys sent again",
        *(2, 2, f"{CP2} {SELECTIVE} --wlb-regather-keys"),
        processes=4,
    ),
    Combination(
        "chunks, uneven pipeline layout, VPP2 on PP2",
        2,
        f"{PP2} --pipeline-model-parallel-layout Ett|t|ttt|tL {CHUNKS}",
        f"--num-layers 7 {WHOLE}",
    ),
    *(
        Combination(
            f"chunks, seq_aux_loss, {name}",
            *(processes, f"{layout} {CHUNKS}", f"{FOUR} {BY_DOCUMENT_ALONE} {WHOLE}"),
        )
        for name, processes, layout in (
            ("PP2", 2, PP2),
            ("PP2xCP2", 4, f"{PP2} {CP2}"),
            ("TP2xPP2+SP", 4, f"{PP2} {SP}"),
            ("EP2xPP2", 4, f"{PP2} {EP}"),
            ("VPP2 on PP2", 2, VPP),
            ("VPP2 on PP2, CP2, full recompute", 4, f"{VPP} {CP2} {FULL}"),
            ("DP2 on one stage, overlaps", 2, OVERLAPS),
        )
    ),
    _in_chunks(", MTP of 2", 2, 2, model=f"{MTP} 2"),
    _in_chunks(", MTP of 2 in one layer, CP2", 2, 2, CP2, f"{MTP} 2 --mtp-use-repeated-layer", 4),
    Combination("chunks, MTP of 1, PP2", 2, f"{PP2} {CHUNKS}", f"{MTP} 1 {WHOLE}"),
    Combination("chunks, MTP of 2, CP2xPP2", 4, f"{CP2} {PP2} {CHUNKS}", f"{MTP} 2 {WHOLE}"),
    Combination(
        "chunks, MTP of 1, TP2xPP2+SP, full recompute",
        *(4, f"{TP2} {PP2} --sequence-parallel {FULL} {CHUNKS}", f"{MTP} 1 {WHOLE}"),
    ),
    Combination("chunks, MTP of 2, DP2xPP2, overlaps", 4, f"{PP2} {OVERLAPS} {CHUNKS}", f"{MTP} 2 {WHOLE}"),
    Combination("chunks, MTP of 1, torch FSDP2", 2, f"{FSDP2} {CHUNKS}", f"{MTP} 1 {WHOLE}"),
)

CPU: tuple[Combination, ...] = (
    *IN_CHUNKS,
    Combination("TP2", 2, TP2, stock=True),
    Combination("TP2+SP", 2, SP, stock=True),
    Combination("PP2", 2, PP2),
    Combination("PP4", 4, f"{PP} 4", FOUR),
    Combination("CP2", 2, CP2),
    Combination("CP4, adaptive sharding", 4, f"{CP} 4 --wlb-sharding adaptive"),
    Combination("DP2", 2),
    Combination("DP4", 4),
    Combination("TP2xCP2+SP", 4, f"{TP2} {CP2} --sequence-parallel"),
    Combination("TP2xPP2", 4, f"{TP2} {PP2} --sequence-parallel"),
    Combination("CP2xPP2", 4, f"{CP2} {PP2}"),
    Combination("DP2xPP2, distributed optimizer", 4, f"{PP2} {OVERLAPS}"),
    Combination("DP2xCP2, distributed optimizer", 4, f"{CP2} {OVERLAPS}"),
    Combination("uneven PP2 (1 and 3 layers)", 2, f"{PP2} --decoder-first-pipeline-num-layers 1", FOUR),
    Combination("tied embeddings, PP2", 2, PP2, without=TIED),
    Combination("VPP2 on PP2", 2, VPP, FOUR),
    Combination("VPP2 on PP4, no p2p overlap", 4, f"{VPP4} --no-overlap-p2p-communication", EIGHT),
    Combination(
        "VPP2 on PP2, overlap in warm-up and flush",
        2,
        f"{VPP} --overlap-p2p-communication-warmup-flush",
        FOUR,
    ),
    Combination(
        "VPP2 on PP2, groups of 4", 2, f"{VPP} --microbatch-group-size-per-virtual-pipeline-stage 4", FOUR
    ),
    Combination("VPP2 on PP4 = micro-batches", 4, VPP4, EIGHT),
    Combination("VPP2 on PP2, CP2", 4, f"{VPP} {CP2}", FOUR),
    Combination("VPP2 on PP2, DP2, distributed optimizer", 4, f"{VPP} {OVERLAPS}", FOUR),
    Combination("distributed optimizer, DP2, overlaps", 2, OVERLAPS),
    Combination("distributed optimizer, context of 1", 1, OVERLAPS),
    Combination("Megatron-FSDP, DP2xCP2", 4, f"{CP2} {MEGATRON_FSDP}", needs="einops"),
    Combination("Megatron-FSDP, TP2xDP2+SP", 4, f"{SP} {MEGATRON_FSDP}", needs="einops"),
    Combination("torch FSDP2, dynamic groups, DP2xCP2", 4, f"{CP2} {FSDP2} --wlb-cp-mode dynamic"),
    Combination("torch FSDP2, DP2xCP2", 4, f"{CP2} {FSDP2}"),
    Combination("torch FSDP2, TP2xDP2+SP", 4, f"{SP} {FSDP2}", FOUR),
    Combination("full recompute uniform, CP2", 2, f"{CP2} {FULL}"),
    Combination("full recompute block, PP2", 2, f"{PP2} {RECOMPUTE} block", FOUR),
    Combination("selective recompute, TP2", 2, f"{TP2} {SELECTIVE}"),
    Combination("EP2", 2, EP, MOE),
    Combination("EP2, shared experts", 2, EP, f"{MOE} {SHARED_EXPERTS}"),
    Combination("EP2xTP2+SP", 4, f"{EP} {TP2} --expert-tensor-parallel-size 1 --sequence-parallel", MOE),
    Combination("MoE, CP2", 2, CP2, MOE),
    Combination("MoE balanced by document, CP2", 2, CP2, BY_DOCUMENT),
    Combination("MoE balanced by document, TP2+SP, VPP2 on PP2", 4, f"{SP} {VPP}", f"{FOUR} {BY_DOCUMENT}"),
    Combination("MoE balanced by document, full recompute, CP2xPP2", 4, f"{CP2} {PP2} {FULL}", BY_DOCUMENT),
    Combination("MoE, allgather, EP2 in CP2, PP2", 4, f"{EP} {CP2} {PP2}", ALLGATHER),
    Combination("MoE, allgather, TP2+SP, DP2", 4, SP, ALLGATHER),
    Combination(
        "MoE with z-loss and experts' biases, TP2+SP, PP2",
        4,
        f"{TP2} {PP2} --sequence-parallel",
        f"{MOE} --moe-z-loss-coeff 0.01 {BIASES}",
    ),
    Combination("MoE with experts' biases after a rehearsal, EP2", 2, f"{EP} {REHEARSED}", f"{MOE} {BIASES}"),
    Combination("MoE with z-loss, CP2", 2, CP2, f"{MOE} --moe-z-loss-coeff 0.01"),
    Combination("MoE, full recompute, CP2xPP2", 4, f"{CP2} {PP2} {FULL}", MOE),
    Combination("MoE without aux loss, CP2", 2, CP2, MOE.replace("0.01", "0")),
    Combination("EP2xPP2, distributed optimizer", 4, f"{EP} {PP2} {OVERLAPS}", MOE),
    Combination("MTP of 2, CP2xPP2", 4, f"{CP2} {PP2}", f"{MTP} 2 --wlb-sharding adaptive"),
    Combination("MTP of 1, MoE, TP2+SP, CP2", 4, f"{TP2} {CP2} --sequence-parallel", f"{MTP} 1 {MOE}"),
    Combination("MTP of 2 in one layer, VPP2 on PP2", 2, VPP, f"{FOUR} {MTP} 2 --mtp-use-repeated-layer"),
    Combination("qk-norm, LayerNorm, CP2", 2, CP2, "--qk-layernorm --normalization LayerNorm"),
    Combination(
        "MHA, GELU, biases, TP2", 2, TP2, without="--group-query-attention --swiglu --disable-bias-linear"
    ),
    Combination("MQA, CP2", 2, CP2, "--num-query-groups 1"),
    Combination("half rotary, base 1000, CP2", 2, CP2, "--rotary-percent 0.5 --rotary-base 1000"),
    Combination("interleaved rotary, CP2", 2, CP2, "--rotary-interleaved"),
    Combination(
        "RoPE scaled and interpolated, layers without, L2 norm of queries and keys, output gate, CP2",
        2,
        CP2,
        "--use-rope-scaling --rope-scaling-factor 4 --rotary-seq-len-interpolation-factor 2 --no-rope-freq 2 "
        "--qk-l2-norm --add-qkv-bias --attention-output-gate",
    ),
    Combination(
        "heterogeneous layers, CP2xTP2",
        4,
        f"{CP2} {TP2}",
        f"{FOUR} --use-rope-scaling --use-rotary-position-embeddings --heterogeneous-layers-config-encoded-json "
        f"{HETEROGENEOUS}",
    ),
    Combination(
        "shared experts overlapped, EP2", 2, EP, f"{MOE} {SHARED_EXPERTS} --moe-shared-expert-overlap"
    ),
    Combination("MoE, global aux loss, CP2", 2, CP2, MOE.replace("type aux", "type global_aux")),
    Combination(
        "pipeline layout, ranks in another order, VPP2 on PP2, DP2",
        4,
        f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL --use-tp-pp-dp-mapping {OVERLAPS}",
        FOUR,
    ),
    Combination(
        "two optimizer instances, DP4",
        4,
        f"--num-distributed-optimizer-instances 2 {OVERLAPS}",
        needs="einops",
    ),
    Combination(
        "full recompute, saved activations distributed, TP2",
        2,
        f"{TP2} {FULL} --distribute-saved-activations",
    ),
    Combination(
        "MLP in chunks, recomputed, fused cross entropy, a2a asked for, CP2",
        2,
        f"{CP2} --cp-comm-type a2a {SELECTIVE} --recompute-modules mlp core_attn",
        "--mlp-chunks-for-training 2 --cross-entropy-loss-fusion",
    ),
    Combination("FP8 delayed, full recompute, DP2xPP2", 4, f"{PP2} {FULL}", FP8_DELAYED),
    Combination("evaluation inside, PP2", 2, f"{PP2} --eval-iters 1 --eval-interval 1"),
    Combination("evaluation inside, VPP2 on PP2", 2, f"{VPP} --eval-iters 1 --eval-interval 1", FOUR),
    Combination("gated delta nets, CP2", 2, CP2, DELTA_NETS),
    Combination("gated delta nets, TP2+SP, CP2", 4, f"{SP} {CP2}", DELTA_NETS),
    Combination("gated delta nets, PP2, DP2", 4, f"{PP2} {OVERLAPS}", DELTA_NETS),
    Combination("gated delta nets, full recompute, CP2", 2, f"{CP2} {FULL}", DELTA_NETS),
    Combination(
        "gated delta nets of a GPTModel, full recompute, CP2",
        2,
        f"{CP2} {FULL}",
        f"--experimental-attention-variant gated_delta_net --linear-attention-freq 2 {DELTA_NET}",
    ),
    Combination(
        "gated delta nets, MoE, EP2, TP2+SP",
        4,
        f"{SP} {LOCAL_EP}",
        f"{DELTA_NETS} {MOE}".replace("G-*-G-", "GE*EG"),
    ),
)
"""For CPUs (gloo, fp32)."""
