"""Through Megatron's own loop: each step recomputes the layers it cannot keep, and trains the same to the last bit."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_combinations import (
    BY_DOCUMENT_ALONE,
    CHUNKS,
    EP,
    FP8_DELAYED,
    FSDP2,
    HETEROGENEOUS,
    MEGATRON_FSDP,
    MOE,
    OVERLAPS,
)
from megatron_runs import flags, train

from wlb_megatron.plugin.flags.versions import megatron_version

pytestmark = pytest.mark.megatron

ITERATIONS = 3
PP2 = "--pipeline-model-parallel-size 2"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO, BLOCK = UNIFORM.replace("layers 1", "layers 2"), UNIFORM.replace("uniform", "block")
LATENT = """--multi-latent-attention --no-rope-fusion --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8
--qk-pos-emb-head-dim 4 --v-head-dim 8"""
HYBRID = "--spec scripts.local_hybrid stack --hybrid-layer-pattern"
WHOLE = "--wlb-chunks off --wlb-max-tokens 128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """available: bytes of each rank for activations. in_step: data-parallel ranks meet inside layers, too, as tensor-
    and context-parallel ones always do. needs: a package. since: the first release that trains it so, started without
    a checkout. experts: not where kept layers see no padding."""

    processes: int = 2
    flags: str = ""
    recompute: str = UNIFORM
    documents: str = WHOLE
    available: str
    in_step: bool = False
    needs: str = ""
    since: float = 0.18
    experts: bool = False


ROWS = {
    "one stage": Row(processes=1, available="350000"),
    "PP2, chunks": Row(flags=PP2, documents=CHUNKS, available="300000"),
    "PP2, units of two layers": Row(flags=PP2, recompute=TWO, available="400000"),
    "PP2, blocks of one layer": Row(flags=PP2, recompute=BLOCK, documents=CHUNKS, available="400000"),
    "PP2xCP2": Row(
        **{"processes": 4, "flags": f"{PP2} --context-parallel-size 2", "documents": CHUNKS},
        available="200000,250000,180000,250000",
    ),
    "TP2 with SP": Row(flags="--tensor-model-parallel-size 2 --sequence-parallel", available="230000,200000"),
    "DP2xPP2, overlaps": Row(
        **{"processes": 4, "flags": f"{PP2} {OVERLAPS}", "documents": CHUNKS},
        available="300000,250000,350000,250000",
    ),
    "EP2xPP2": Row(
        **{"processes": 4, "flags": f"{PP2} {EP} {BY_DOCUMENT_ALONE}", "documents": CHUNKS},
        **{"in_step": True, "experts": True, "available": "700000,600000,700000,650000"},
    ),
    "VPP2 on PP2": Row(flags=f"{PP2} --num-virtual-stages-per-pipeline-rank 2", available="350000"),
    "HybridModel with experts, PP2": Row(
        **{"flags": f"{PP2} {BY_DOCUMENT_ALONE} {HYBRID} *E*-|*E-*", "documents": CHUNKS},
        available="500000",
    ),
    "torch FSDP2, latent attention": Row(
        **{"flags": f"{FSDP2} {LATENT}", "in_step": True, "available": "480000,400000", "since": 0.19},
    ),
    "Megatron-FSDP": Row(flags=MEGATRON_FSDP, available="480000,400000", in_step=True, needs="einops"),
    "heterogeneous layers on uneven stages": Row(
        flags=f"{PP2} --decoder-first-pipeline-num-layers 1 --use-rope-scaling "
        f"--use-rotary-position-embeddings --heterogeneous-layers-config-encoded-json {HETEROGENEOUS}",
        documents=CHUNKS,
        available="300000",
        since=0.19,
    ),
    "FP8 delayed, DP2": Row(flags=FP8_DELAYED, documents=CHUNKS, available="700000,600000", in_step=True),
    "routers' losses over all ranks, DP2": Row(
        **{"flags": MOE.replace("type aux", "type global_aux"), "available": "800000,700000"},
        **{"in_step": True, "experts": True},
    ),
}


def run(corpus: Path, out: Path, processes: int, *more: str, **environment: str) -> list[dict[str, Any]]:
    base = f"--num-layers 4 --data-path {corpus} --global-batch-size 8 --train-iters {ITERATIONS}"
    arguments = flags(base, "--wlb-max-delay 0 --wlb-micro-batches-per-window 2", *more)
    return train(arguments, processes, out, **environment)


def skip_before(release: float) -> None:
    if float(".".join(megatron_version().split(".")[:2])) < release:
        pytest.skip(f"not in a Megatron before {release}")


def check_equal(ranks: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for rank, other in zip(ranks, others, strict=True):
        assert rank["documents"] == other["documents"]
        assert rank["losses"] == other["losses"]
        for name, (gradient, _) in rank["gradients"].items():
            assert torch.equal(gradient, other["gradients"][name][0]), name


@pytest.mark.parametrize("name", ROWS)
def test_kept_layers_change_no_bit_of_losses_and_gradients(name, corpus, tmp_path):
    row = ROWS[name]
    if row.needs and find_spec(row.needs) is None:
        pytest.skip(f"Megatron needs the package {row.needs} for it")
    log = tmp_path / "steps.jsonl"
    skip_before(row.since)
    if row.experts and hasattr(TransformerBlock, "_checkpointed_forward"):
        pytest.skip("kept layers of this Megatron's see no padding mask")
    job = f"{row.flags} {row.recompute} {row.documents} --wlb-gpu-memory 1"
    full = run(corpus, tmp_path / "full", row.processes, job, "--wlb-recompute off")
    memory = {"WORKER_AVAILABLE": row.available}
    kept = run(corpus, tmp_path / "kept", row.processes, job, f"--wlb-log {log}", **memory)
    check_equal(full, kept)
    planned: dict[tuple[int, int], list[Any]] = {}
    for rank in kept:
        place, numbers = rank["place"], rank["recomputed"]
        alike = planned.setdefault((place["pp"], 0 if row.in_step else place["dp"]), numbers)
        assert numbers == alike, "ranks that meet keep the same layers, whatever memory they have"
        counts = [entry[0] for entry in rank["documents"]]
        for iteration, (step, layers_run) in enumerate(zip(numbers, rank["layers_run"], strict=True)):
            # Every micro-batch through every layer once, and once more through each layer that was to be recomputed.
            micro_batches = counts.count(iteration) // len(step[0])
            assert layers_run == micro_batches * place["layers"] + sum(map(sum, step))
    others = {str(numbers) for numbers in planned.values()}
    assert len(others) == len(planned), "the others plan by themselves"
    flat = [number for rank in kept for step in rank["recomputed"] for row in step for number in row]
    assert len(set(flat)) > 1, "the memory is such that some are kept, some are not"
    last = kept[-1]
    for step, line in zip(last["recomputed"], log.read_text(encoding="utf-8").splitlines(), strict=True):
        assert json.loads(line)["recomputed_share"] == sum(map(sum, step)) / (
            last["place"]["layers"] * len(step)
        )


def test_multi_token_prediction_trains_the_same_though_blocks_keep_its_layer(corpus, tmp_path):
    skip_before(0.19)
    job = f"{PP2} {UNIFORM} {CHUNKS} --mtp-num-layers 1 --wlb-gpu-memory 1"
    full = run(corpus, tmp_path / "full", 2, job, "--wlb-recompute off")
    kept = run(corpus, tmp_path / "kept", 2, job, WORKER_AVAILABLE="340000")
    check_equal(full, kept)
    last = [number for step in kept[1]["recomputed"] for row in step for number in row]
    assert set(last) > {2}, "some micro-batches run the flags, some blocks"
