"""The table of configurations: what a run adds to the small test model, and on how many processes.

scripts/check_combinations.py runs each through Megatron's loop against the single process with the same `model`
flags; tests/test_megatron_combinations.py runs a few of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Combination:
    """`flags`: of this run alone. `model`: flags that the single process takes, too. `without`: flags of the small
    test model that both leave out. `loose`: compared with an 8-bit format's rounding in mind."""

    name: str
    processes: int
    flags: str = ""
    model: str = ""
    without: str = ""
    loose: bool = False


TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
VPP = f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"

GPU: tuple[Combination, ...] = (
    Combination("TP2", 2, f"{TP} 2"),
    Combination("TP2+SP", 2, f"{TP} 2 --sequence-parallel"),
    Combination("TP2+SP, TP overlap flags", 2, f"{TP} 2 --sequence-parallel {OVERLAPS}"),
    Combination("CP2", 2, f"{CP} 2"),
    Combination("PP2", 2, f"{PP} 2"),
    Combination("PP2, tied embeddings", 2, f"{PP} 2", without="--untie-embeddings-and-output-weights"),
    Combination("VPP2 on PP2", 2, VPP),
    Combination("VPP2 on PP2, no p2p overlap", 2, f"{VPP} --no-overlap-p2p-communication"),
    Combination("DP2, distributed optimizer, overlaps", 2, OVERLAPS),
    Combination("CP2, distributed optimizer, overlaps", 2, f"{CP} 2 {OVERLAPS}"),
    Combination("EP2, MoE alltoall", 2, "--expert-model-parallel-size 2", MOE),
    Combination(
        "EP2, grouped GEMM, shared experts",
        2,
        "--expert-model-parallel-size 2",
        f"{MOE} --moe-grouped-gemm --moe-shared-expert-intermediate-size 256",
    ),
    Combination("CP2, MoE", 2, f"{CP} 2", MOE),
    Combination("TP2+SP, MoE", 2, f"{TP} 2 --sequence-parallel", MOE),
    Combination(
        "CP2, full recompute",
        2,
        f"{CP} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    Combination("CP2, selective recompute", 2, f"{CP} 2 --recompute-granularity selective"),
    Combination(
        "CP2, FP8 tensorwise", 2, f"{CP} 2", "--fp8-format hybrid --fp8-recipe tensorwise", loose=True
    ),
)
"""For two GPUs (NCCL, Transformer Engine, bf16)."""

CPU: tuple[Combination, ...] = (
    Combination("TP2", 2, f"{TP} 2"),
    Combination("CP2", 2, f"{CP} 2"),
    Combination("PP2", 2, f"{PP} 2"),
    Combination("DP2 sharded", 2, OVERLAPS),
    Combination("EP2", 2, "--expert-model-parallel-size 2", MOE),
)
"""For CPUs (gloo, fp32)."""
