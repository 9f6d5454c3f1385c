"""A job given to analyze decides about chunks as Megatron's arguments do in training, and is tried by dry runs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from plan_checks import validate_groups
from test_cli import ROOT
from test_documents_indexed import write_index
from training_jobs import trainer_with

from wlb_megatron.arguments import add_layout, add_settings, complete_layout, settings
from wlb_megatron.dynamic.plan import Stage
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.job_flags import add_job, read_job
from wlb_megatron.workload.memory import GIB

LENGTHS = np.tile([400, 4000, 900, 300, 8192, 1200], 40)


def parsed(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_layout(parser)
    add_settings(parser)
    add_job(parser)
    args = parser.parse_args(f"--lengths 8 --window 8192 --micro-batches 4 --pp 4 {flags}".split())
    complete_layout(args)
    return args


def job(flags: str = "") -> Job:
    return read_job(parsed(flags))


@pytest.mark.parametrize(
    ("flags", "megatron"),
    [
        ("", {}),
        ("--vpp 2", {"virtual_pipeline_model_parallel_size": 2}),
        ("--mtp-num-layers 2", {"mtp_num_layers": 2}),
        (
            "--vpp 2 --fine-grained-activation-offloading",
            {"fine_grained_activation_offloading": True, "virtual_pipeline_model_parallel_size": 2},
        ),
        ("--cpu-offloading-num-layers 3", {"cpu_offloading_num_layers": 3}),
        ("--use-megatron-fsdp", {"use_megatron_fsdp": True}),
        ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
        ("--num-experts 8", {"num_experts": 8}),
        (
            "--dp 2 --num-experts 8 --expert-model-parallel-size 2",
            {"num_experts": 8, "expert_model_parallel_size": 2},
        ),
        (
            "--dp 2 --num-experts 8 --expert-tensor-parallel-size 2",
            {"num_experts": 8, "expert_tensor_parallel_size": 2},
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type global_aux_loss",
            {"num_experts": 8, "moe_router_load_balancing_type": ["global_aux_loss"]},
        ),
    ],
)
def test_the_commands_know_trainings_limits_of_chunks(flags, megatron):
    assert job(flags).trainer == trainer_with(**megatron)


def test_chunks_that_cannot_be_trained_or_whose_keys_cross_a_slow_network_are_not_chosen(refused):
    def chunked(flags: str) -> bool:
        return isinstance(job(flags).planner(LENGTHS, settings(parsed(flags))).packer, ChunkPacker)

    assert chunked("--num-experts 8 --host-launch 0 --expert-rows 0")
    assert not chunked("--cpu-offloading-num-layers 1 --thresholds none")

    def chunked(rate: str) -> bool:
        flags = f"--cp 2 --tp 8 --window 131072 --network-rate {rate}"
        planner = job(flags).planner(16 * LENGTHS, settings(parsed("--thresholds none")))
        return isinstance(planner.packer, ChunkPacker)

    assert chunked("1e12") and not chunked("1e9")
    line = "analyze --lengths 9,30,64 --window 64 --pp 2 --micro-batches 2 --chunks on"
    shown = refused(f"{line} --cpu-offloading-num-layers 1")
    assert "--chunks on cannot be combined with --cpu-offloading-num-layers" in shown
    assert "recompute instead" in shown


def test_iterations_of_tiny_documents_are_few_unless_asked_for() -> None:
    """An iteration of these takes 16,384 documents, and a hundred of them would take minutes."""
    tiny = np.tile([2, 0, 2], 50)
    few = read_job(parsed(""), tiny)
    assert (few.iterations, few.warm_up) == (12, 12)
    assert few.messages == (
        "12 iterations are looked at, not 100: each takes some 16,384 documents (--iterations)",
    )
    assert read_job(parsed("--dp 64"), tiny).warm_up == read_job(parsed("--dp 64"), tiny).iterations == 4
    for flags, lengths in (("--iterations 100", tiny), ("", np.full(9, 900))):
        chosen = read_job(parsed(flags), lengths)
        assert (chosen.iterations, chosen.warm_up, chosen.messages) == (100, 16, ())


def test_chunks_that_do_not_fit_and_hold_more_than_whole_documents_are_not_chosen() -> None:
    """Of many key heads under full recompute, keys with their gradients outweigh the activations that are kept."""

    def planned(flags: str, heads: int) -> tuple[bool, list[str], float]:
        flags = f"--tp 4 --cp 4 --window 131072 --recompute full --num-query-groups {heads} {flags}"
        config = settings(parsed(f"--thresholds none {flags}"))
        messages: list[str] = []
        packer = job(flags).planner(16 * LENGTHS, config, messages.append).packer
        memory = job(flags).memory
        assert memory is not None
        chunked, whole = memory.needed(config, 131072)
        assert (chunked > whole) == (heads == 32)
        return isinstance(packer, ChunkPacker), messages, (chunked + whole) / 2 / 0.9 / GIB

    chunks, messages, _ = planned("", 8)
    assert chunks and "so chunks free" in messages[1]
    _, messages, between = planned("", 32)
    assert "not with a peak of" not in messages[0]  # both fit
    chunks, messages, _ = planned(f"--gpu-memory {between}", 32)
    assert not chunks and "not with a peak of" in messages[0] and "however many micro-batches" in messages[1]
    chunks, messages, _ = planned("--chunks on", 32)
    assert chunks and "so chunks add" in messages[-1]


def test_memory_sets_lmax_and_chunks_as_in_training() -> None:
    """The 7B over TP=4 CP=4 PP=4 at windows of 128K: enough for 1.5 windows, for less, and for chunks alone."""

    def packer(gib: int) -> tuple[bool, int]:
        flags = f"--window 131072 --tp 4 --cp 4 --thresholds none --gpu-memory {gib} "
        chosen = job(flags + ("--chunks off" if gib > 50 else ""))
        config = settings(parsed("--chunks off" if gib > 50 else ""))
        made = chosen.planner(LENGTHS, replace(config, thresholds="none")).packer
        return isinstance(made, ChunkPacker), made.max_tokens

    memory = {gib: job(f"--window 131072 --tp 4 --cp 4 --gpu-memory {gib}").memory for gib in (80, 60, 50)}
    assert packer(80) == (False, 3 * 131072 // 2)
    assert memory[60] is not None and packer(60) == (False, memory[60].whole()) and packer(60)[1] < 196608
    assert memory[50] is not None and packer(50) == (True, memory[50].in_chunks())
    with pytest.raises(WlbError, match=r"a micro-batch of 1\.25 windows"):
        job("--window 131072 --tp 4 --cp 4 --gpu-memory 50").planner(
            LENGTHS, settings(parsed("--chunks off"))
        )
    assert job("--num-experts 8 --gpu-memory 8").memory is None


def test_latent_attention_and_unfused_gradients_reach_what_counts_memory() -> None:
    """Keys of 128 + 64 channels and values of 128; 64 + 32 + 64 compressed ones."""
    latent = "--hidden-size 1024 --num-attention-heads 8 --multi-latent-attention --q-lora-rank 64"
    model = job(f"{latent} --no-gradient-accumulation-fusion").model
    assert (model.shape.head_dim, model.shape.compressed, model.layout.fused) == (160, 160, False)
    assert job().model.shape.compressed is None and job().model.layout.fused


def test_ranks_that_share_experts_are_timed_in_one_order() -> None:
    def orders(flags: str) -> list[list[tuple[int, ...] | None]]:
        chosen = job(f"--dp 2 --iterations 4 --warm-up 0 {flags}")
        config = settings(parsed(flags))
        return chosen.times(config).orders(chosen.run(LENGTHS, config).plans)

    alone = orders("--chunks on")
    joined = orders("--chunks on --num-experts 8 --expert-model-parallel-size 2")
    assert any(order != other for order, other in alone) and all(order == other for order, other in joined)


def test_dynamic_groups_are_planned_and_timed(tmp_path, reported):
    np.save(tmp_path / "lengths.npy", np.tile([3000, 40000, 900, 65536, 1200, 2500, 9000], 9))
    line = f"analyze --no-split --lengths {tmp_path / 'lengths.npy'} --window 65536 --micro-batches 2 --cp 2 --dp 2"
    line += " --host-launch 0 --iterations 3 --warm-up 1 --max-delay 0 --cp-mode "
    speedups = {mode: reported(line + mode)["predicted_speedup"] for mode in ("fixed", "dynamic")}
    assert speedups["dynamic"] > speedups["fixed"] + 0.01


def test_every_document_of_an_iteration_is_in_one_of_its_groups() -> None:
    chosen = job("--cp 2 --dp 2 --pp 2 --iterations 2 --warm-up 1 --cp-mode dynamic")
    config = settings(parsed("--cp-mode dynamic"))
    run = chosen.run(LENGTHS, config)
    assert run.shards is None
    simulated, steps_of_plans = chosen.groups(run.timed_plans, run.planner, config)
    assert simulated.steps.tolist() == run.simulated.steps.tolist()
    for plan, steps in zip(run.plans[1:], steps_of_plans, strict=True):
        held = [
            piece.tokens for row in plan.micro_batches for micro_batch in row for piece in micro_batch.pieces
        ]
        validate_groups(steps, held, Stage.of(2, 2, run.planner.packer.max_tokens // 2 * 2))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        *(("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("mixtral-8x7b", 46.7)),
        *(("qwen3-8b", 8.2), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1)),
        *(("deepseek-v3", 671.0), ("mixtral-8x22b", 140.6)),
    ],
)
def test_a_known_model_has_the_parameters_that_are_published(model, billions, printed):
    job_of_few = "analyze --no-split --search none --iterations 1 --lengths 9,30,64 --window 64"
    out = printed(f"{job_of_few} --model {model}")
    (shown,) = re.findall(r"([\d.]+)B parameters", out)
    assert float(shown) == pytest.approx(billions, rel=2e-3, abs=0.05)
    assert "of activations" in out, "memory is never left out"
    assert job("--model 405B --pp 16").model.shape.layers == 126, (
        "with the embedding and the loss they divide"
    )


@pytest.mark.parametrize("pattern", ["[0,1]*2", "2", "([0,1,0]+[1]*1)", "([1]*1+[0]*1)*2", "2*([0]+[1])"])
def test_layers_without_experts_are_counted_by_megatrons_patterns(pattern: str) -> None:
    flags = f"--num-layers 4 --num-experts 8 --moe-layer-freq {pattern}"
    found = job(flags).model.shape.experts
    assert found is not None and found.dense_layers == 2
    with pytest.raises(WlbError, match="a list of 4 zeros and ones"):
        job("--num-layers 4 --num-experts 8 --moe-layer-freq [1]*3")
    for wrong in ("[1,1]*2+", "²", "[2,0,0,0]", "[1]*1000000000", "len([1])*[1,0,0,0]"):
        with pytest.raises(WlbError, match="neither a number nor a list"):
            job(f"--num-layers 4 --num-experts 8 --moe-layer-freq {wrong}")


DRY = """
--num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --seq-length 1024 --max-position-embeddings 1024 --tensor-model-parallel-size 2
--sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1
--global-batch-size 16 --bf16 --use-distributed-optimizer --overlap-grad-reduce --tokenizer-type NullTokenizer
--vocab-size 257 --train-iters 100 --lr 1e-3 --eval-iters 0 --num-workers 0 --split 100,0,0
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--no-gradient-accumulation-fusion
"""


@pytest.fixture
def launched(tmp_path):
    lengths = np.minimum(np.random.default_rng(3).lognormal(5.0, 1.2, 900), 1024).astype(np.int64) + 1
    write_index(tmp_path / "corpus.idx", lengths)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * int(lengths.sum())))
    return f"{DRY} --data-path {tmp_path / 'corpus'}"


def dry_run(flags: str) -> subprocess.CompletedProcess[str]:
    """Megatron's parser and the plugin's refusals for any number of GPUs, in one process without one."""
    devices = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **devices}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    line = [sys.executable, "-m", "wlb_megatron.pretrain_gpt", *flags.split(), "--wlb-dry-run"]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=200, cwd=ROOT)


@pytest.mark.megatron
def test_a_dry_run_prints_what_is_set_and_what_analyze_predicts(launched, printed):
    done = dry_run(f"{launched} --wlb-world-size 2 --wlb-world-size 64")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "data-parallel size: 8" in done.stdout and "sets --calculate-per-token-loss True" in done.stdout
    out = printed(f"analyze --no-split --search none --world-size 64 --gpu-memory 80 -- {launched}")
    _, verdict = done.stdout.split(out)
    assert verdict.startswith("> wlb_megatron: Megatron and the plugin take these flags on 64 GPUs")
    assert "predicted speed-up" in out and "of activations" in out
    assert "flags: " in out


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--wlb-world-size 12", "world size"),
        ("--wlb-world-size 24", "global_batch_size"),
        ("--wlb-world-size 8 --attention-dropout 0.1", "--attention-dropout"),
        ("", "--wlb-dry-run needs --wlb-world-size"),
        ("--wlb-world-size abc", "a whole number from 1"),
    ],
)
def test_a_dry_run_of_flags_that_are_refused_exits_with_2_and_the_line(flags, line, launched):
    done = dry_run(f"{launched} {flags}")
    assert done.returncode == 2, done.stdout[-500:]
    assert line in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_dry_run_leaves_the_choice_of_megatron_to_the_script():
    """A checkout's script puts its folder first on the path: what is imported earlier would come from elsewhere."""
    code = """
import sys
from wlb_megatron.launch import dry_run
dry_run(["--wlb-world-size", "2"], lambda: print([name for name in sys.modules if name.startswith("megatron")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr[-2000:]
