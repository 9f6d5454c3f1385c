"""Lmax against the GPU's memory, from Megatron's arguments."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_jobs import training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import held
from wlb_megatron.packing.limits import Trainer, describe_memory, no_memory_for_chunks
from wlb_megatron.pipeline.step_law import StepLaw
from wlb_megatron.plugin.flags.limits import (
    adoptable_tokens,
    document_memory,
    fit_to_memory,
    fullest_stage,
    gpu_memory,
    recompute_memory,
)
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.plans.source import _of_recomputation
from wlb_megatron.workload.memory import GIB, chunked_bytes, chunks_in_flight, logits_bytes, memory_needed
from wlb_megatron.workload.model import Layout, Model

IN_ROWS = {"fp8": "hybrid", "fp8_recipe": "delayed"}
"""Micro-batches are multiples of 16 tokens."""


def shapes(job: TrainingJob) -> tuple[Model, Layout]:
    return fullest_stage(job), job.sizes


@pytest.fixture
def memory(monkeypatch):
    """Sets the GPU's memory in GiB."""

    def install(gib: float) -> None:
        properties = SimpleNamespace(total_memory=int(gib * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return install


def test_lmax_is_one_and_a_half_windows_or_what_memory_holds_and_too_little_is_refused_with_a_cure(memory):
    memory(80)
    assert fit_to_memory(training_job()).max_tokens == 49152
    memory(31)
    lower = fit_to_memory(training_job(**IN_ROWS)).max_tokens
    assert lower is not None and 40960 <= lower < 49152 and lower % 16 == 0
    memory(20)
    with pytest.raises(WlbError, match=r"GiB.*--context-parallel-size"):
        fit_to_memory(training_job().with_config(WlbConfig(chunks="off")))
    # Cards of which drivers keep different shares give one Lmax.
    memory(32.9)
    config = fit_to_memory(training_job())
    memory(32.1)
    assert fit_to_memory(training_job()) == config
    memory(31.9)
    assert fit_to_memory(training_job()) != config


def test_fixed_windows_need_room_for_one_window_not_for_one_and_a_quarter(memory):
    fixed = training_job().with_config(WlbConfig(packing="original"))
    shape, layout = shapes(fixed)
    one, more = (memory_needed(shape, layout, tokens) / GIB for tokens in (32768, 40960))
    memory(more / 0.9 - 1)  # rounded down to a GiB, of which 10 % are left free
    assert 32768 <= (fit_to_memory(fixed).max_tokens or 0) < 40960
    memory(one / 0.9 - 1)
    with pytest.raises(WlbError, match=r"of one window \(32768 tokens\)"):
        fit_to_memory(fixed)


def test_a_flag_overrides_it_and_cpus_and_experts_are_not_measured_and_a_saved_one_may_come_along(memory):
    memory(1)
    assert fit_to_memory(training_job().with_config(WlbConfig(max_tokens=60000))).max_tokens == 60000
    assert fit_to_memory(training_job(distributed_backend="gloo")).max_tokens == 49152
    assert fit_to_memory(training_job(num_experts=8)).max_tokens == 49152
    memory(31)
    fits = adoptable_tokens(training_job())
    assert fits == fit_to_memory(training_job()).max_tokens
    assert adoptable_tokens(training_job(wlb_max_tokens=49152)) == 0
    assert adoptable_tokens(training_job(distributed_backend="gloo")) > 1 << 40


def test_where_whole_documents_do_not_fit_micro_batches_are_shorter_and_documents_come_in_chunks(memory):
    staged = {"pipeline_model_parallel_size": 2, "num_layers": 16}
    memory(46)
    fitted = fit_to_memory(training_job(**staged, **IN_ROWS)).max_tokens
    assert fitted is not None and 32768 // 8 <= fitted <= 32768 * 3 // 4 and fitted % 16 == 0
    shape, layout = shapes(training_job(**staged))
    flying = held(32768, 4, 2)
    at = chunked_bytes(shape, layout, longest=fitted, held=flying, document=32768)
    assert at <= 0.9 * 46 * GIB
    assert memory_needed(shape, layout, 40960) > 0.9 * 46 * GIB
    assert adoptable_tokens(training_job(**staged)) == 0
    for refused in ({"virtual_pipeline_model_parallel_size": 2}, {"mtp_num_layers": 1}):
        with pytest.raises(WlbError, match=r"1\.25 windows"):
            fit_to_memory(training_job(**staged | refused))
    memory(6)
    with pytest.raises(WlbError, match="weights, gradients and optimizer state alone need"):
        fit_to_memory(training_job(**staged))


@pytest.mark.parametrize(
    ("flags", "sharded"),
    [
        ({"use_torch_fsdp2": True}, True),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, True),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, False),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, False),
    ],
)
def test_weights_that_fsdp_spreads_are_counted_as_spread(flags, sharded):
    assert shapes(training_job(**flags))[1].fully_sharded == sharded


def test_a_run_with_chunks_says_what_they_free_and_auto_leaves_them_where_keys_do_not_fit(memory):
    memory(80)
    staged = training_job(pipeline_model_parallel_size=2, num_layers=16)
    config = fit_to_memory(staged)
    known = gpu_memory(staged)
    assert known is not None and config.max_tokens == 49152
    assert "so chunks free" in describe_memory(config, known, 32768, chunks=True)
    assert no_memory_for_chunks(config, known) == []
    whole = memory_needed(*shapes(staged), 49152) / GIB
    line = describe_memory(config, known, 32768, chunks=False)
    assert f"{whole:.1f} GiB, however many micro-batches: each may hold 49,152 tokens" in line
    # As many key heads as heads, under full recompute: keys with their gradients outweigh what layers keep.
    many = {"group_query_attention": False, "recompute_granularity": "full", "num_layers": 64}
    keys = training_job(**many, pipeline_model_parallel_size=2)
    shape, layout = shapes(keys)
    needed = memory_needed(shape, layout, 49152) / GIB
    memory(8 * needed)  # there is room for both
    assert no_memory_for_chunks(fit_to_memory(keys), gpu_memory(keys)) == []
    config, known = fit_to_memory(keys), gpu_memory(keys)
    assert known is not None
    chunked, whole = known.needed(config, 32768)
    assert chunked > whole
    memory((chunked + whole) / 2 / 0.9 / GIB)  # whole documents fit, chunks do not
    config, known = fit_to_memory(keys.with_config(config)), gpu_memory(keys)
    ((flag, _),) = no_memory_for_chunks(config, known)
    assert "to use, where whole documents need" in flag and "--wlb-chunks on allows it" in flag
    assert no_memory_for_chunks(replace(config, chunks="on"), known) == []
    assert gpu_memory(training_job(distributed_backend="gloo")) is None
    assert gpu_memory(training_job(distributed_backend="gloo", wlb_gpu_memory=40.0)) is not None


def test_a_document_that_trains_whole_is_as_long_as_memory_allows_and_keys_are_told(memory):
    memory(80)
    wide = document_memory(training_job())
    assert wide is not None and "KiB a token" in wide.of
    recomputed = document_memory(training_job(recompute_granularity="full"))
    assert recomputed is not None and wide.tokens < recomputed.tokens
    memory(40)
    narrow = document_memory(training_job())
    assert narrow is not None and narrow.tokens < wide.tokens
    assert document_memory(training_job(distributed_backend="gloo")) is None
    assert document_memory(training_job(num_experts=8)) is None


@pytest.mark.parametrize(("context", "measured_mb"), [(1, 30084), (2, 17570)])
def test_the_estimate_holds_what_was_measured_on_h100s(context, measured_mb):
    """docs/results/2x_h100/train_cp.csv: peak memory of runs whose longest micro-batch had 48,652 tokens."""
    shape, layout = shapes(training_job(context_parallel_size=context))
    estimate = memory_needed(shape, layout, 48652) / 2**20
    assert measured_mb <= estimate <= 1.1 * measured_mb


ARRIVES = {
    "tensor": ({"tensor_model_parallel_size": 2}, 2),
    "context": ({"context_parallel_size": 4}, 4),
    "pipeline": ({"pipeline_model_parallel_size": 2}, 2),
    "data": ({"data_parallel_size": 2}, 2),
    "virtual": ({"virtual_pipeline_model_parallel_size": 5}, 5),
    "group": ({"microbatch_group_size_per_vp_stage": 16}, 16),
    "micro_batches": ({"data_parallel_size": 2, "global_batch_size": 24}, 12),
    "sequence": ({"sequence_parallel": True}, True),
    "distributed_optimizer": ({"use_distributed_optimizer": False}, False),
    "fully_sharded": ({"use_torch_fsdp2": True}, True),
    "losses_in_forward": ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, True),
    "recompute": ({"recompute_granularity": "full"}, "full"),
    "recompute_layers": ({"recompute_num_layers": 3}, 3),
    "recompute_block": ({"recompute_method": "block"}, True),
    "keep_keys": ({"wlb_regather_keys": True}, False),
    "fused": ({"gradient_accumulation_fusion": False}, False),
    "reduce_overlaps": ({"overlap_grad_reduce": True}, True),
    "gather_overlaps": ({"overlap_param_gather": True}, True),
}
"""Megatron's arguments that set a field of the layout, and its value then."""


@pytest.mark.parametrize("name", [field.name for field in fields(Layout)])
def test_each_field_of_the_layout_arrives(name):
    changed, value = ARRIVES[name]
    assert getattr(shapes(training_job())[1], name) != value
    assert getattr(shapes(training_job(**changed))[1], name) == value


def test_lmax_fits_with_virtual_stages_which_hold_more_micro_batches(memory):
    """70B on TP8 x CP4 x PP8: eight micro-batches' worth in flight without virtual stages, 10.2 with five."""
    memory(79)
    job = training_job(
        **{"seq_length": 61440, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_layers": 80, "vocab_size": 128256},
        **{"num_attention_heads": 64, "num_query_groups": 8, "tensor_model_parallel_size": 8, "global_batch_size": 64},
        **{"context_parallel_size": 4, "pipeline_model_parallel_size": 8, "sequence_parallel": True},
        virtual_pipeline_model_parallel_size=5, wlb_regather_keys=True,
    )  # fmt: skip
    shape, layout = shapes(job)
    assert (chunks_in_flight(layout, 0), chunks_in_flight(replace(layout, virtual=1), 0)) == (47, 8)
    lmax = fit_to_memory(job).max_tokens
    assert lmax is not None and lmax < 92160  # 1.5 windows, which would fit without virtual stages
    without_them = memory_needed(shape, replace(layout, virtual=1), 92160)
    assert without_them < 79 * GIB < memory_needed(shape, layout, 92160)
    assert memory_needed(shape, layout, lmax) <= 0.9 * 79 * GIB


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({}, 2),
        ({"decoder_first_pipeline_num_layers": 1}, 3),
        ({"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 5}, 5),
        ({"num_layers": 6, "account_for_embedding_in_pipeline_split": True}, 2),
        ({"pipeline_model_parallel_layout": "E|ttt|t|tttt|t||t|L"}, 4),
        ({"pipeline_model_parallel_layout": "Et|t|ttttt|tL"}, 5),
    ],
)
def test_the_layers_are_those_of_the_fullest_stage(changed, layers):
    """Eight layers on four stages."""
    shape, _ = shapes(training_job(pipeline_model_parallel_size=4, **changed))
    assert shape.layers == layers


def test_an_unknown_vocabulary_is_taken_to_be_large_and_a_further_token_takes_a_layer_and_logits():
    shape, _ = shapes(training_job(vocab_size=None))
    assert shape.vocab == 131072
    plain, further = (shapes(training_job(mtp_num_layers=depths)) for depths in (None, 2))
    assert further[0].layers == plain[0].layers + 2
    assert logits_bytes(*further) == 3 * logits_bytes(*plain)


# --- what a job's log says of it ---


def of_recomputation(**flags: Any) -> list[str]:
    job = training_job(**{"recompute_granularity": "full", "pipeline_model_parallel_size": 2} | flags)
    memory = recompute_memory(job)
    law = StepLaw(pp=2, backward=(3, 1), again=1000, rooms=memory.rooms() if memory else None)
    planner = SimpleNamespace(packer=SimpleNamespace(max_tokens=49152, law=law))
    return list(_of_recomputation(SimpleNamespace(job=job, config=job.config, planner=planner)))


def test_the_log_says_at_start_what_steps_recompute():
    (line,) = of_recomputation(wlb_gpu_memory=20.0)
    found = re.fullmatch(
        r"recomputes only what does not fit 18\.0 GiB of a GPU \(20\.0 less --wlb-memory-margin 0\.1\): of the layers "
        r"that the flags recompute about (\d+)% in a usual step, (\d+)% in the fullest",
        line,
    )
    assert found, line
    usual, fullest = map(int, found.groups())
    assert 0 <= usual < fullest < 100
    assert "about 0% in a usual step, 0% in the fullest" in of_recomputation(wlb_gpu_memory=140.0)[0]


def test_where_the_flags_run_in_every_step_a_line_says_why():
    begun = "recomputes as the flags say in every step"
    (line,) = of_recomputation(wlb_gpu_memory=20.0, wlb_cp_mode="dynamic")
    assert line.startswith(f"{begun}: the groups of --wlb-cp-mode dynamic")
    routed = {"wlb_gpu_memory": 20.0, "num_experts": 4, "moe_router_load_balancing_type": ["global_aux_loss"]}
    (line,) = of_recomputation(**routed)
    assert line.startswith(f"{begun}, for kept layers would change global_aux_loss")
    one_stage = {"pipeline_model_parallel_size": 1, "wlb_chunks": "off"}
    for kept in (one_stage, {"moe_router_load_balancing_type": "aux_loss"}):
        (line,) = of_recomputation(**(routed | kept))
        assert line.startswith("recomputes only what does not fit")
    old = Trainer(experts=4, hides_padding=True)
    assert (old.keeping_changes("off") or "").startswith("routers' counts")
    assert replace(old, experts=0).keeping_changes("on") is None
    assert of_recomputation(wlb_gpu_memory=20.0, wlb_recompute="off") == []
    assert of_recomputation(wlb_gpu_memory=20.0, recompute_granularity="selective") == []
    assert of_recomputation(distributed_backend="gloo") == [], "nothing says what fits"
