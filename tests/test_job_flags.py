"""A job told to analyze and simulate decides about chunks as Megatron's arguments do in training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import call

from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.settings_flags import add_layout, add_settings, settings
from wlb_megatron.simulator.job import Job
from wlb_megatron.simulator.job_flags import add_job, read_job

LENGTHS = np.tile([400, 4000, 900, 300, 8192, 1200], 40)

MEGATRON = {
    "pipeline_model_parallel_size": 4,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "moe_router_load_balancing_type": "aux_loss",
}


def parsed(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_layout(parser)
    add_settings(parser)
    add_job(parser)
    return parser.parse_args(f"--lengths 8 --window 8192 --micro-batches 4 --pp 4 {flags}".split())


def job(flags: str = "") -> Job:
    return read_job(parsed(flags))


@pytest.mark.parametrize(
    ("flags", "megatron"),
    [
        ("", {}),
        ("--vpp 2", {"virtual_pipeline_model_parallel_size": 2}),
        ("--mtp-num-layers 2", {"mtp_num_layers": 2}),
        ("--fine-grained-activation-offloading", {"fine_grained_activation_offloading": True}),
        ("--cpu-offloading-num-layers 3", {"cpu_offloading_num_layers": 3}),
        ("--use-megatron-fsdp", {"use_megatron_fsdp": True}),
        ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
        ("--num-experts 8", {"num_experts": 8}),
        (
            "--num-experts 8 --expert-model-parallel-size 2",
            {"num_experts": 8, "expert_model_parallel_size": 2},
        ),
        (
            "--num-experts 8 --expert-tensor-parallel-size 2",
            {"num_experts": 8, "expert_tensor_parallel_size": 2},
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type global_aux_loss",
            {"num_experts": 8, "moe_router_load_balancing_type": ["global_aux_loss"]},
        ),
    ],
)
def test_the_commands_know_trainings_limits_of_chunks(flags: str, megatron: dict[str, object]) -> None:
    pytest.importorskip("megatron.core")
    from wlb_megatron.plugin.chunk_limits import trainer_of

    trained = trainer_of(SimpleNamespace(**{**MEGATRON, **megatron}))
    assert job(flags).trainer == replace(trained, release=None)


def test_documents_train_in_chunks_unless_the_trainer_cannot() -> None:
    def chunked(flags: str) -> bool:
        return isinstance(job(flags).planner(LENGTHS, settings(parsed(flags))).packer, ChunkPacker)

    assert chunked("--num-experts 8") and not chunked("--mtp-num-layers 1 --thresholds none")


def test_ranks_that_share_experts_are_timed_in_one_order() -> None:
    def orders(flags: str) -> list[list[tuple[int, ...] | None]]:
        chosen = job(f"--dp 2 --iterations 4 --warm-up 0 {flags}")
        return chosen.orders(chosen.plans(chosen.planner(LENGTHS, settings(parsed(flags)))))

    alone, joined = orders(""), orders("--num-experts 8 --expert-model-parallel-size 2")
    assert any(one != other for one, other in alone) and all(one == other for one, other in joined)


@pytest.mark.parametrize("command", ["analyze", "simulate"])
def test_chunks_that_cannot_be_trained_are_refused_with_the_cure(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{command} --lengths 9,30,64 --window 64 --pp 2 --micro-batches 2 --chunks on --mtp-num-layers 1"
    code, _, err = call(capsys, *flags.split())
    assert code == 2 and err.count("\n") == 1
    assert "--chunks on does not go with --mtp-num-layers" in err and "train whole documents" in err
    code, _, err = call(capsys, *f"{command} --lengths 9 --window 64 --moe-router-topk 2".split())
    assert code == 2 and "--moe-router-topk needs --num-experts" in err
