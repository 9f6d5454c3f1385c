"""Flags, refusals and bad input at the entry: one clear line, a non-zero exit, nothing written."""

import argparse
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import forked_ranks
import numpy as np
import pytest
from megatron_runs import (
    LENGTHS,
    cpu_environment,
    flags,
    launch,
    logged_losses,
    output_of,
    rewrite_corpus,
    run_script,
)

from wlb_megatron.arguments import add_arguments, config_from_args
from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.take_over import wrap_parse_args
from wlb_megatron.refusals import REFUSALS, Refused, refuse_unsupported

FLAGS = """batch-spread chunks cp-mode document-cost dry-run fresh-order gpu-memory kernels log
log-plans max-delay max-documents max-tokens memory-margin micro-batch-cost micro-batches-per-window off overlong
packing plan-process profile quadratic-at recompute regather-keys rehearsal replace-script-functions
sft-assistant-only sft-drop-tools sft-mask-data sft-skip-bad-lines sharding thresholds token-weights
trace trace-iteration train-epochs world-size"""


def test_the_list_of_flags_is_frozen():
    parser = add_arguments(argparse.ArgumentParser())
    offered = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    option_strings = sorted(flag for action in offered for flag in action.option_strings if "wlb" in flag)
    assert option_strings == [f"--wlb-{name}" for name in FLAGS.split()]


def test_no_flags_give_the_defaults_of_the_dataclass_and_each_says_its_unit_or_choices_and_default():
    args = add_arguments(argparse.ArgumentParser()).parse_args([])
    assert config_from_args(args) == WlbConfig()
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for setting in fields(WlbConfig):
        if isinstance(setting.default, str | int | float) and setting.default is not False:
            assert f"(default: {setting.default})" in text, setting.name


def test_help_is_shown_where_megatrons_own_text_cannot_be_printed(monkeypatch, capsys):
    def parse_args(extra: Callable[[Any], Any], ignore_unknown_args: bool) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--factor", help="(e.g. 1.10 = 10%).")
        return extra(parser).parse_args()

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        wrap_parse_args(parse_args)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "(e.g. 1.10 = 10%)." in shown and "--wlb-off" in shown


class Megatron(argparse.Namespace):
    """Validated Megatron arguments that the plugin takes."""

    def __init__(self, **changed: object) -> None:
        accepted = {
            **{"micro_batch_size": 1, "eval_iters": 0, "seq_length": 64, "max_position_embeddings": 128},
            **{"position_embedding_type": "rope", "attention_dropout": 0.0, "apply_rope_fusion": True},
            "distributed_backend": "nccl",
        }
        super().__init__(**{**accepted, **changed})


SWITCHES = """multi_latent_attention overlap_moe_expert_parallel_comm hybrid_context_parallel
dataloader_inter_document_masking reset_position_ids eod_mask_loss ddp_average_in_collective sft fim_data mock_data
qk_clip fused_single_qkv_rope cpu_offloading_retain_pinned_cpu_buffers tp_comm_overlap defer_embedding_wgrad_compute
fallback_to_eager_attn mtp_hsm use_kitchen_attention batch_invariant_mode inprocess_restart
perform_rl_step multiple_validation_sets"""
REFUSED = dict.fromkeys(SWITCHES.split(), True) | {
    **{"cuda_graph_impl": "local", "hybrid_layer_pattern": "M*", "fp4": "e2m1", "attention_dropout": 0.1},
    **{"sequence_packing_scheduler": "dp_balanced", "dataloader_type": "cyclic", "dataloader_save": "state"},
    **{"attention_backend": types.SimpleNamespace(name="flash"), "transformer_impl": "local"},
    **{"position_embedding_type": "learned_absolute", "experimental_attention_variant": "dsa"},
    **{"gtp_weight_remat_size": 2, "rotary_base_per_layer": [1e4, 1e6], "flash_attention_version": 3},
    **{"logits_save_dir": "logits", "rerun_mode": "report_stats", "phase_transition_iterations": [5]},
}
"""One argument a row of the table."""


def test_what_is_handled_is_not_refused():
    refuse_unsupported(Megatron(), WlbConfig())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_with_the_flag_and_a_cure(name):
    with pytest.raises(Refused) as refused:
        refuse_unsupported(Megatron(**{name: REFUSED[name]}), WlbConfig())
    (line,) = str(refused.value).splitlines()
    assert line.startswith("wlb_megatron: error: --")
    assert ": " in line


ALLTOALL = {"num_experts": 8, "moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {"num_experts": 8, "moe_token_dispatcher_type": "allgather"}
FLEX = {"num_experts": 8, "moe_token_dispatcher_type": "flex"}
EP2 = {"expert_model_parallel_size": 2}
TOGETHER: list[dict[str, object]] = [
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]},
    {**ALLGATHER, **EP2},
    {**FLEX, **EP2, "moe_flex_dispatcher_backend": "hybridep"},
    {**FLEX, "moe_flex_dispatcher_backend": "ncclep"},
    {"enable_mhc_connections": True, "pipeline_model_parallel_size": 2},
    {**ALLTOALL, "moe_router_load_balancing_type": "sinkhorn"},
    {"full_validation": True, "multiple_validation_sets": True, "virtual_pipeline_model_parallel_size": 2},
    {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tm|L"},
    {"hybrid_layer_pattern": "--|-E/*-", "num_experts": 4},
    {"hybrid_layer_pattern": "*-/*E", "num_experts": 4},
    {"hybrid_layer_pattern": "G*", "linear_cp_mode": None},
    {"hybrid_layer_pattern": "*E"},
    {"hybrid_layer_pattern": "*-||*-|*-"},
    {"hybrid_layer_pattern": "G*", "tensor_model_parallel_size": 2},
    {"experimental_attention_variant": "gdn", "deterministic_mode": True},
    {"hybrid_layer_pattern": "*-*-", "decoder_first_pipeline_num_layers": 1},
    {"hybrid_layer_pattern": "*-", "multi_latent_attention": True, "apply_rope_fusion": False},
    {"sft": True, "tokenizer_type": "SFTTokenizer", "wlb_overlong": "split"},
]
"""Arguments of the rows that need several."""


@pytest.mark.parametrize("arguments", TOGETHER)
def test_arguments_that_are_refused_together_get_one_line_with_a_cure(arguments):
    (line,) = refusals_of(Megatron(**arguments), WlbConfig())
    assert line.startswith("wlb_megatron: error: --") and ": " in line


HYBRIDEP = {**FLEX, **EP2, "moe_flex_dispatcher_backend": "hybridep"}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("arguments", "cp_mode", "refused"),
    [
        (ALLGATHER, "fixed", False),
        ({**ALLGATHER, **EP2, "context_parallel_size": 2}, "fixed", False),
        ({**ALLGATHER, **EP2, "context_parallel_size": 2}, "dynamic", True),
        ({**ALLGATHER, **EP2, "context_parallel_size": 3}, "fixed", True),
        ({**ALLGATHER, **EP2, **TP2}, "fixed", True),  # experts' tensor parallel, too
        ({**ALLGATHER, **EP2, **TP2, "expert_tensor_parallel_size": 1}, "fixed", False),
        ({**FLEX, **EP2}, "fixed", False),
        ({**FLEX, **EP2, "moe_flex_dispatcher_backend": "deepep"}, "dynamic", False),
        ({**HYBRIDEP, "moe_hybridep_pad_uneven_dispatch_inputs": True}, "fixed", False),
        ({**FLEX, "moe_paged_stash": True}, "fixed", True),
    ],
)
def test_experts_tokens_are_gathered_where_ranks_hold_equally_many(arguments, cp_mode, refused):
    assert bool(refusals_of(Megatron(**arguments), WlbConfig(cp_mode=cp_mode))) == refused


GROWING: list[dict[str, object]] = [
    {"rampup_batch_size": ["2", "2", "100"], "global_batch_size": 6},
    {"step_batch_size_schedule": "0:2 6400:4", "global_batch_size": 4},
]


@pytest.mark.parametrize("growing", GROWING)
def test_batches_that_grow_are_refused_where_the_learning_rate_counts_iterations(growing):
    assert not refusals_of(Megatron(**growing, train_samples=100), WlbConfig())
    assert not refusals_of(Megatron(**growing, train_iters=9, skip_train=True), WlbConfig())
    (line,) = refusals_of(Megatron(**growing, train_iters=9), WlbConfig())
    assert "--train-iters: " in line and "give --train-samples" in line


BALANCED = {"moe_router_load_balancing_type": ["aux_loss", "none"], "moe_aux_loss_coeff": [0.01, 0.0]}
SETTINGS_REFUSED = [
    ({}, {"log_plans": True}),
    ({}, {"plan_process": "always", "cp_mode": "dynamic"}),
    ({"transformer_impl": "local"}, {"kernels": "fa4"}),
    ({**ALLTOALL, **BALANCED}, {"cp_mode": "dynamic"}),
    ({}, {"cp_mode": "dynamic", "micro_batches_per_window": "2"}),
    ({"hybrid_layer_pattern": "G*"}, {"cp_mode": "dynamic"}),
    ({"hybrid_layer_pattern": "G*"}, {"profile": "p.json"}),
    ({}, {"overlong": "chunk", "chunks": "off"}),
    ({"max_position_embeddings": 64}, {"overlong": "chunk"}),
    ({}, {"sft_mask_data": True}),
    ({}, {"train_epochs": 2, "packing": "original"}),
]
"""Arguments and settings of the rows that refuse the plugin's own settings."""


@pytest.mark.parametrize(("arguments", "settings"), SETTINGS_REFUSED)
def test_settings_that_do_not_fit_are_refused_with_a_cure(arguments, settings):
    without = refusals_of(Megatron(**arguments), WlbConfig())
    refusals = refusals_of(Megatron(**arguments), WlbConfig(**settings))
    (line,) = [line for line in refusals if line not in without]
    assert line.startswith("wlb_megatron: error: --wlb-") and ": " in line


@pytest.mark.parametrize(
    ("losses", "refused"),
    [
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}, False),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01}, False),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}, True),
        ({"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.001}, True),
    ],
)
def test_experts_with_dynamic_groups_have_no_loss_of_their_routers(losses, refused):
    assert bool(refusals_of(Megatron(**ALLTOALL, **losses), WlbConfig(cp_mode="dynamic"))) == refused


def refusals_of(args: argparse.Namespace, config: WlbConfig) -> list[str]:
    try:
        refuse_unsupported(args, config)
    except Refused as refused:
        return str(refused).splitlines()
    return []


def test_every_refusal_has_a_test():
    growing = 1  # a row that is tried with each way of growing batches
    assert len(REFUSALS) == len(REFUSED) + len(TOGETHER) + len(SETTINGS_REFUSED) + growing


def test_apex_from_pypi_is_refused_before_megatron_is_imported(tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    environment = cpu_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "wlb_megatron.pretrain_gpt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "apex" in done.stderr and "pip uninstall apex" in done.stderr
    assert "Traceback" not in done.stderr


NO_BUILDER = """
from megatron.training import argument_utils
from wlb_megatron.plugin import pretrain_gpt
del argument_utils.gpt_config_from_args
pretrain_gpt.main("{name}")
"""


@pytest.mark.megatron
@pytest.mark.parametrize("name", ["pretrain_gpt", "pretrain_hybrid"])
def test_a_megatron_without_a_model_builder_is_refused_with_what_to_run_instead(tmp_path, name):
    """PyPI's 0.18.2."""
    done = run_script(NO_BUILDER.format(name=name), [], tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("wlb_megatron: error:")]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert line.endswith(f"or start a checkout's {name}.py through wlb_megatron.launch")


def _missing(corpus: Path, folder: Path) -> str:
    return f"--data-path {folder}/nothing"


def _truncated(corpus: Path, folder: Path) -> str:
    (folder / "cut.idx").write_bytes(corpus.with_suffix(".idx").read_bytes())
    (folder / "cut.bin").write_bytes(corpus.with_suffix(".bin").read_bytes()[:-10])
    return f"--data-path {folder}/cut"


def _empty(corpus: Path, folder: Path) -> str:
    rewrite_corpus(folder / "empty", [np.empty(0, dtype=np.int32)] * 3)
    return f"--data-path {folder}/empty"


def _given(flags: str) -> Callable[[Path, Path], str]:
    return lambda corpus, folder: f"--data-path {corpus} {flags}"


BAD_INPUT = {
    "missing index": (_missing, "cannot read index"),
    "truncated tokens": (_truncated, "is truncated"),
    "no tokens": (_empty, "no token"),
    "Lmax below 1.25 windows": (_given("--wlb-max-tokens 70 --wlb-chunks off"), "1.25"),
    "context parallel size that does not divide": (_given("--context-parallel-size 3"), "divisible"),
    "no Transformer Engine": (_given("--transformer-impl transformer_engine"), "pip install"),
    "no corpus": (lambda corpus, folder: "", "corpus"),
}


@pytest.mark.megatron
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line_and_leaves_nothing(case, corpus, tmp_path):
    make, words = BAD_INPUT[case]
    made, written = tmp_path / "made", tmp_path / "written"
    made.mkdir()
    written.mkdir()
    out = f"--save {written}/checkpoints --save-interval 1 --tensorboard-dir {written}/board"
    done = launch(flags("--global-batch-size 2 --train-iters 2", make(corpus, made), out), 1)
    assert done.returncode > 0 and "Traceback" not in done.stderr, done.stderr
    said = ("wlb_megatron", "Megatron refuses")
    lines = [line for line in done.stderr.splitlines() if any(words in line for words in said)]
    assert len(lines) == 1 and words in lines[0], done.stderr
    assert list(written.iterdir()) == []


@pytest.mark.megatron
def test_from_bin_and_idx_to_optimizer_steps_through_the_command_a_user_types(corpus):
    """E12: nothing built by hand. Two processes, CP=2; the loss falls on a corpus of one repeated token."""
    prefix = corpus.with_name("repeated")
    rewrite_corpus(prefix, [np.full(length, 7, dtype=np.int32) for length in LENGTHS])
    run = f"--data-path {prefix} --global-batch-size 2 --train-iters 8 --lr 1e-2"
    said = output_of(flags(run, context=2), 2, fresh=True)
    losses = logged_losses(said)
    assert len(losses) == 8
    assert losses[0] > 4 and losses[-1] < 0.5 * losses[0]
    assert "[wlb] iteration 8" in said


def test_the_launchers_help_may_be_cut_short():
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` that has read enough
    done = subprocess.run(
        [sys.executable, "-m", "wlb_megatron.launch", "--help"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and not done.stderr


@pytest.mark.megatron
def test_the_launcher_describes_every_replaced_symbol():
    done = forked_ranks.run(["-m", "wlb_megatron.launch"], ["--describe"], 1, cpu_environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    symbols = "parse_args validate_args pretrain get_forward_backward_func _communicate_shapes"
    for symbol in symbols.split():
        assert symbol in done.stdout


@pytest.mark.megatron
def test_hooks_install_once_do_nothing_with_wlb_off_and_name_a_missing_symbol(tmp_path):
    """E13: installing twice wraps once; a symbol that moved is an error with its name and the version."""
    script = """
import inspect, sys
import megatron.training.arguments as arguments
from wlb_megatron.plugin import hooks
from wlb_megatron.refusals import Refused

def stand_in(symbol):  # with --wlb-off it has to get just what its caller gave
    def original(*args, **kwargs):
        return original, args, kwargs
    original.__signature__ = inspect.signature(symbol)
    return original

rows = [(hook, *hooks.locate(hook)) for hook in hooks.rows() if not hook.always]
stand_ins = [stand_in(hooks._function(getattr(owner, name))) for _, owner, name in rows]
symbols = [getattr(owner, name) for _, owner, name in rows]
for (_, owner, name), symbol, other in zip(rows, symbols, stand_ins):
    setattr(owner, name, property(other) if isinstance(symbol, property) else other)
hooks.install()
sys.argv.append("--wlb-off")
given = object()
for (hook, owner, name), other in zip(rows, stand_ins):
    replaced = hooks._function(getattr(owner, name))
    assert replaced is not other and replaced(given, word=given) == (other, (given,), {"word": given}), hook
    setattr(owner, name, symbols[stand_ins.index(other)])
hooks.install()
once = arguments.parse_args
hooks.install()
assert arguments.parse_args is once
assert not hasattr(getattr(once, hooks.ORIGINAL), hooks.ORIGINAL)
try:
    hooks._locate("megatron.training.arguments:parse_argz")
except Refused as error:
    assert "parse_argz" in str(error) and "0.19.2" in str(error), error
    assert str(type(error)(str(error))) == str(error)  # as a rank prints it that is chosen to
else:
    raise SystemExit("not refused")
"""
    done = run_script(script, [], tmp_path)
    assert done.returncode == 0, done.stderr
