"""Shapes of models by name, and models that people know, in Megatron's flags."""

from __future__ import annotations

from wlb_megatron.workload.model import Model

SHAPES = {
    "550M": Model(layers=24, hidden=1024, heads=16, kv_heads=8, ffn=2816),
    "7B": Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=11008),
    "30B": Model(layers=48, hidden=7168, heads=56, kv_heads=8, ffn=19200),
    "70B": Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    "405B": Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248),
}
"""LLaMA-like, of the sizes in WLB-LLM's paper, which does not give them: all with 8 key-value heads as Llama 3."""

_COMMON = "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights"


def _dense(layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> str:
    return (
        f"{_COMMON} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
        f"--group-query-attention --num-query-groups 8 --kv-channels 128 --vocab-size {vocab}"
    )


def _experts(count: int, top_k: int, ffn: int) -> str:
    return f"--num-experts {count} --moe-router-topk {top_k} --moe-ffn-hidden-size {ffn} --moe-grouped-gemm"


_LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128"
)

PRESETS = {
    "llama3-8b": _dense(32, 4096, 14336, 32, 128256),
    "llama3-70b": _dense(80, 8192, 28672, 64, 128256),
    "llama3-405b": _dense(126, 16384, 53248, 128, 128256),
    "qwen3-8b": f"{_dense(36, 4096, 12288, 32, 151936)} --qk-layernorm",
    "qwen3-30b-a3b": _dense(48, 2048, 6144, 32, 151936).replace("groups 8", "groups 4")
    + f" --qk-layernorm {_experts(128, 8, 768)}",
    "qwen3-235b-a22b": _dense(94, 4096, 12288, 64, 151936).replace("groups 8", "groups 4")
    + f" --qk-layernorm {_experts(128, 8, 1536)}",
    "deepseek-v3": f"{_COMMON} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    f"--vocab-size 129280 {_LATENT} {_experts(256, 8, 2048)} --moe-shared-expert-intermediate-size 2048 "
    "--moe-layer-freq ([0]*3+[1]*58)",
    "mixtral-8x7b": f"{_dense(32, 4096, 14336, 32, 32000)} {_experts(8, 2, 14336)}",
    "mixtral-8x22b": f"{_dense(56, 6144, 16384, 48, 32768)} {_experts(8, 2, 16384)}",
}
"""From published configurations. DeepSeek-V3's first three layers are as wide as what a token passes of the others, so
that they take the same time. Its multi-token prediction is left out."""
