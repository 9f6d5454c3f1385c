"""Every flag of every planning command changes what it prints, or is refused: none is ignored."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest

from scripts.commands import run_script
from scripts.corpus import add_corpus
from scripts.reproduce import __main__ as reproduction
from wlb_megatron.analyze.analyze_command import add_analyze
from wlb_megatron.arguments import NOT_HERE, add_layout, add_settings
from wlb_megatron.cli import CommandParser, _add_inspected_job, main
from wlb_megatron.errors import WlbError

pytestmark = pytest.mark.usefixtures("quick_thresholds")

LENGTHS = "--lengths 300,40,9,64,17,128,33,50,20,8 --window 128"
LAYOUT = "--micro-batches 4 --dp 2 --cp 2 --tp 2 --pp 2 --iterations 3 --warm-up 1 --thresholds 64"
WHERE_ALL_COUNTS = "--model 550M --node 1 --dp-exposed 0.5 --gradient-bytes 400"
ONE_NODE = "--model 550M --host-launch 0 --chunks off"
NO_HOST = f"{WHERE_ALL_COUNTS} --host-launch 0 --chunks off"
WHOLE = f"{NO_HOST} --micro-batch-cost 0 --quadratic-at 8"
LONG = "--window 131072 --lengths 300000,40000,9000,64000,17000,128000,33000,50000,20000,8000"
CHUNKS = f"{NO_HOST} --chunks auto --pp 4 --dp 1 --vocab-size 512 {LONG}"
WAITING = f"{WHOLE} --pp 1 --dp 1 --iterations 8 --lengths 128,20,30,40,9,8,120,17,20,6,30,12,5,22,31"
SHAPE = "--hidden-size 256 --num-attention-heads 4 --host-launch 0 --chunks off"
EXPERTS = f"{NO_HOST} --num-experts 4"
FULL = f"{NO_HOST} --recompute full --vocab-size 512 --window 16384 --lengths 300,40,9000,16384,1700,128,330"


def values(table: dict[str, str]) -> dict[str, tuple[str, str]]:
    """By flag, the value that changes a result, and the flags beside it."""
    return {
        (words := part.split())[0]: (" ".join(words[1:]), beside)
        for beside, flags in table.items()
        for part in flags.split("--")[1:]
    }


ANALYZE = values(
    {
        # the flags beside: those that change a result there
        NO_HOST: """--lengths 300,40 --window 256 --micro-batches 2 --dp 1 --cp 4 --tp 4 --pp 4 --vpp 2
            --sharding per-sequence --chunks on --overlong drop --regather-keys --recompute selective
            --iterations 2 --warm-up 3 --seed 7 --model 7B --num-layers 8 --vocab-size 512
            --hybrid-layer-pattern *-*-*-*-*-*-*-*- --num-experts 4 --matmul-rate 1e12 --memory-rate 1e11
            --weight-traffic 1e5 --logit-traffic 1e5 --network-rate 1e6 --network-gbps 0.016 --node 2
            --network-latency 1 --activation-passes 99 --ffn-passes 99 --tp-exposed 0.5 --dp-exposed 1
            --step-overhead 1 --gradient-bytes 4 --parameter-bytes 1000 --optimizer-bytes 99
            --kernel-table h200""",
        f"{NO_HOST} --thresholds auto": "--packing original",
        f"{NO_HOST} --chunks on": "--use-megatron-fsdp --use-torch-fsdp2",
        WHOLE: """--micro-batches-per-window 2 --micro-batch-cost 5000 --quadratic-at 16
            --document-cost 500 --max-documents 3""",
        WAITING: "--max-tokens 240 --max-delay 0 --thresholds none --batch-spread 1",
        f"{FULL} --wlb-recompute off": "--recompute-method block",
        f"{FULL} --wlb-recompute off --recompute-method block": "--recompute-num-layers 8",
        FULL: "--wlb-recompute off",
        f"{FULL} --gpu-memory 2.5": "--memory-margin 0.15 --mtp-num-layers 1",
        SHAPE: """--hidden-size 512 --num-attention-heads 8 --num-query-groups 2 --kv-channels 128
            --ffn-hidden-size 512 --swiglu""",
        f"{CHUNKS} --vpp 2": "--fine-grained-activation-offloading",
        CHUNKS: "--cpu-offloading-num-layers 1",
        EXPERTS: "--moe-router-topk 3 --moe-ffn-hidden-size 64 --expert-passes 99 --expert-rows 99999",
        f"{EXPERTS} --chunks on": """--moe-router-load-balancing-type global_aux_loss
            --expert-model-parallel-size 2 --expert-tensor-parallel-size 4""",
        ONE_NODE: "--nvlink-rate 1e6 --nvlink-latency 1",
        f"{WHERE_ALL_COUNTS} --chunks off": "--host-launch 2",
    }
)

QUICK = "analyze --no-split --search none"

ELSEWHERE = {
    "json": "is how all others are looked at",
    "profile": "test_simulator_profile.py",
    "gpu-memory": "test_job_flags.py",
    "qk-layernorm": "is of memory alone: test_recompute_memory.py",
    "cp-mode": "test_job_flags.py",
    "no-split": "test_cli_analyze.py",
    "pictures": "test_cli_analyze.py",
    "token-weights": "test_cli_analyze.py",
    "search": "test_search.py",
}


def flags_of(*add_flags_to: Any) -> set[str]:
    parser = argparse.ArgumentParser()
    for add_flags in add_flags_to:
        add_flags(parser)
    return names(parser)


OF_LAUNCH_COMMANDS = """data-path data-args-path per-split-data-args-path split world-size global-batch-size
    train-data-path valid-data-path test-data-path micro-batch-size group-query-attention
    num-layers-per-virtual-pipeline-stage
    recompute-activations sequence-parallel hidden-dropout use-distributed-optimizer overlap-grad-reduce
    overlap-param-gather no-gradient-accumulation-fusion untie-embeddings-and-output-weights train-iters
    train-samples multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim linear-num-key-heads
    linear-num-value-heads linear-key-head-dim linear-value-head-dim linear-conv-kernel-dim qk-pos-emb-head-dim
    v-head-dim moe-shared-expert-intermediate-size expert-imbalance moe-layer-freq moe-grouped-gemm
    moe-permute-fusion"""
"""See test_launch_command.py."""


def names(parser: argparse.ArgumentParser) -> set[str]:
    offered = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = {action.option_strings[-1][2:] for action in offered}
    return flags - {"help", *OF_LAUNCH_COMMANDS.split()}


def test_the_table_holds_every_flag_of_analyze():
    assert flags_of(add_analyze) == set(ANALYZE) | set(ELSEWHERE)


@pytest.mark.parametrize(
    "beside",
    sorted({beside for _, beside in ANALYZE.values()}),
    ids=lambda beside: " ".join(flag for flag, (_, others) in ANALYZE.items() if others == beside)[:80],
)
def test_every_flag_of_analyze_changes_what_is_simulated(beside, reported):
    line = f"{QUICK} {LENGTHS} {LAYOUT} {beside}"
    before = reported(line)["results"]
    for flag, (value, others) in ANALYZE.items():
        if others == beside:
            assert reported(f"{line} --{flag} {value}")["results"] != before, f"{flag} changed nothing"


KNOWN = "--model 550M --recompute full --gpu-memory 200"
OWN = "--hidden-size 1024 --num-attention-heads 8 --recompute full --gpu-memory 80"
FREE_MICRO_BATCHES = "--pp 4 --micro-batch-cost 0 --quadratic-at 8"
INSPECT = values(
    {
        "": """--lengths 30,40 --window 128 --micro-batches 4 --dp 2 --cp 4 --tp 8 --sharding per-sequence
            --max-tokens 80 --micro-batches-per-window 2 --chunks on --thresholds 20 --quadratic-at 4
            --document-cost 500 --max-documents 2 --overlong drop --iterations 1""",
        "--micro-batch-cost 0 --quadratic-at 8": "--pp 4",
        "--pp 2 --micro-batches-per-window 1.5": "--vpp 2",
        "--thresholds auto": "--packing original",
        FREE_MICRO_BATCHES: "--micro-batch-cost 99999",
        "--thresholds 20": "--max-delay 0 --batch-spread 1",
        KNOWN: """--model 7B --num-layers 8 --recompute selective --recompute-method block
            --recompute-num-layers 2 --wlb-recompute off --gpu-memory 40 --memory-margin 0.2""",
        OWN: """--hidden-size 2048 --num-attention-heads 16 --num-query-groups 2 --kv-channels 256
            --ffn-hidden-size 512 --swiglu --qk-layernorm --vocab-size 512""",
    }
)


def test_every_flag_of_inspect_changes_its_plans_or_is_refused(reported, refused):
    shown = flags_of(add_layout, add_settings, _add_inspected_job) | {"pp", "vpp", "iterations"}
    none = {"cp-mode": "dynamic", "regather-keys": ""}
    assert shown == set(INSPECT) | set(none)
    base = "inspect --window 64 --micro-batches 2 --cp 2 --thresholds 60 --chunks off"
    base += " --lengths 64,40,9,64,17,28,33,50,100,8,8,8"
    for flag, (value, beside) in INSPECT.items():
        assert reported(f"{base} {beside} --{flag} {value}") != reported(f"{base} {beside}"), flag
    for flag, value in none.items():
        assert f"--{flag}" in refused(f"{base} --{flag} {value}")


REPRODUCE = {
    "lengths": "{}",
    "lengths-of": "64",
    "no-stretch": "",
    "iterations": "7",
    "seed": "7",
    "micro-batches-per-window": "2",
    "no-large-job": "",
    "kernel-table": "h200",
    "network-gbps": "0.016",
    **{name: ANALYZE[name][0] for name in ANALYZE if name.replace("-", "_") in vars(reproduction.REPRODUCED)},
}


def test_every_flag_of_reproduce_reaches_what_is_reproduced(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    reproduction.add_reproduce(parser)
    assert names(parser) - set(REPRODUCE) == {"out", "profile"}
    np.save(tmp_path / "lengths.npy", np.array([300_000, 400_000]))
    asked: list[Any] = []

    def stop(inputs: Any, tick: Any, finished: Any, *, large: bool) -> Any:
        asked.append((str(inputs), large))
        raise ValueError("seen")

    monkeypatch.setattr(reproduction, "reproduce", stop)
    monkeypatch.setattr(reproduction, "_need", lambda _: None)
    base = ["--out", str(tmp_path / "out")]
    assert reproduction.main(base) == 2
    for flag, value in REPRODUCE.items():
        more = ["--no-stretch"] if flag == "lengths-of" else []
        arguments = [value.format(tmp_path / "lengths.npy")] if value else []
        assert reproduction.main([*base, f"--{flag}", *arguments, *more]) == 2
    assert len(set(asked)) == len(REPRODUCE) + 1


JOBS = {
    "inspect": "--lengths 9,30,64 --window 64",
    "analyze": "--lengths 9,30,64 --window 64",
    "profile": "--out p.json",
}
TRAINING = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --global-batch-size 8"


REFUSED = """
# lengths
inspect --lengths 4,-12 => document 1 has a negative length (-12)
inspect --lengths 4,,12 => cannot read lengths '4,,12': '' is not an integer
inspect --lengths 4,x => cannot read lengths '4,x': 'x' is not an integer below 2**63; give integers with
inspect --lengths [4,12] => '[4' is not an integer
inspect --lengths '1e3;4' => '1e3;4' is not an integer
inspect --lengths '' => cannot read lengths ''
inspect --lengths 4.5 => cannot read lengths '4.5': '4.5' is not an integer
inspect --lengths 99999999999999999999 => cannot read lengths
inspect --lengths 0,0 => no token to train on in 2 documents
analyze --lengths 0 => no token to train on
inspect --lengths 99999999999 => document 0 has more than 2147483647 tokens
# numbers that are none, or out of range
inspect --window 0 => --window: '0' is not a whole number from 1 to 1073741824
analyze --window 0 => is not a whole number from 1
inspect --window many => --window: 'many' is not a whole number from 1 to 1073741824
inspect --window 99999999999999999999 => --window: '99999999999999999999' is not a whole number
inspect --cp 0 => --cp: '0' is not a whole number from 1 to 65536
inspect --dp 99999999999999999999 => --dp: '99999999999999999999' is not
analyze --pp 0 => is not a whole number from 1
inspect --micro-batches 99999999999999999999 => --micro-batches: '99999999999999999999' is not
inspect --max-delay -1 => --max-delay: '-1' is not a whole number from 0 to 1048576
inspect --max-tokens 99999999999999999999 => --max-tokens: '99999999999999999999' is not a whole number from 1 to
inspect --document-cost nan => --document-cost: 'nan' is not a number from 0 to
inspect --document-cost inf => --document-cost: 'inf' is not a number from 0 to
inspect --quadratic-at nan => --quadratic-at: 'nan' is not a number from 1 to
inspect --quadratic-at 1e-320 => --quadratic-at: '1e-320' is not a number from 1 to
inspect --thresholds nan => wlb_megatron: error: --thresholds 'nan' are not auto
analyze --iterations 0 => --iterations: '0' is not a whole number from 1
analyze --iterations -1 => is not a whole number from 1
analyze --seed -2 => --seed: '-2' is not a whole number from -1
analyze --matmul-rate nan => --matmul-rate: 'nan' is not a number from 0
analyze --matmul-rate 0 => wlb_megatron: error: --matmul-rate must be positive, got 0.0
analyze --tp-exposed 2 => wlb_megatron: error: --tp-exposed is a share from 0 to 1, got 2.0
analyze --step-overhead -1 => --step-overhead: '-1' is not a number from 0
analyze --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size -1 => is not a whole number from 1
profile --budget nan => --budget: 'nan' is not a number from 0
profile --num-attention-heads 0 => --num-attention-heads: '0' is not a whole number
# sizes that do not fit each other
inspect --max-tokens 17 --chunks off => wlb_megatron: error: --max-tokens of 17 is below 1.25 windows
{} --max-tokens 65 --chunks off => set --max-tokens to 80 or more
analyze --hidden-size 100 --num-attention-heads 3 => --hidden-size 100 is not a multiple of
analyze --num-query-groups 5 => --num-attention-heads 32 is not a multiple of --num-query-groups 5
{} --world-size 6 --tp 4 => the number of GPUs, 6, is not a multiple of --tp 4
analyze --pp 5 => --num-layers 32 cannot be divided over --pp 5: choose a divisor of 32, or of 34
analyze --pp 4 --vpp 3 => --num-layers 32 cannot be divided over --pp 4 x --vpp 3
{} --vpp 2 => --vpp 2 changes nothing without --pp above 1
analyze --tp 3 => --num-attention-heads 32 is not a multiple of the tensor-parallel size 3
profile --tp 3 => --num-attention-heads 32 is not a multiple of the tensor-parallel size 3
analyze --tp 8 --num-attention-heads 48 --num-query-groups 12 --kv-channels 128 => neither a multiple nor a
analyze --tp 2 --ffn-hidden-size 1001 => --ffn-hidden-size 1001 is not a multiple of --tp 2
analyze --cp 3 => --window of 64 tokens is not a multiple of 3
analyze --kernel-table b900 => no kernel table b900: give h100, h200,
analyze --num-experts 3 --expert-model-parallel-size 2 --dp 2 => --num-experts 3 is not a multiple of
analyze --num-experts 4 --expert-model-parallel-size 4 --dp 2 => 2 ranks (--tp x --cp x --dp) are not a multiple
analyze --num-experts 4 --expert-tensor-parallel-size 4 => 1 ranks (--tp x --cp x --dp) are not a multiple
analyze --num-experts 2 --moe-router-topk 3 => --moe-router-topk 3 is above --num-experts 2
# choices, places and commands that there are not
inspect --packing best => invalid choice: 'best' (choose from 'original', 'varlen')
inspect --sharding best => invalid choice: 'best'
inspect --unknown 1 => unrecognized arguments: --unknown
{} --data-path c => cannot read index c.idx
analyze --pictures /dev/null/pictures => cannot write to
# flags that would change nothing, or that only training has
{} --rehearsal always => only affects training
{} --fresh-order => only affects training
{} --regather-keys banana => unrecognized arguments: banana
inspect --wlb-token-weights equal => wlb_megatron: error: --wlb-token-weights only affects training
inspect --regather-keys --iterations 1 => --regather-keys
{} --micro-batches 2 --global-batch-size 2 => say the same: give one
inspect --num-experts 2 => unrecognized arguments: --num-experts 2 (see wlb-megatron inspect
inspect --model 7B => --model changes nothing without --gpu-memory
inspect --gpu-memory 80 => --gpu-memory changes nothing without a model (--model or --hidden-size)
inspect --memory-margin 0.2 => --memory-margin changes nothing without a model
inspect --wlb-recompute off => --wlb-recompute changes nothing without a model
inspect --recompute full => --recompute-granularity changes nothing without a model
inspect --model 7B --gpu-memory 80 --wlb-recompute off => changes nothing without --recompute-gran
{} --model 7B --gpu-memory 80 --recompute-method block => changes nothing without --recompute-gran
{} --packing original --thresholds 9 => changes nothing without --packing varlen
{} --packing original --max-delay 3 => changes nothing without --packing varlen
analyze --moe-router-topk 2 => --moe-router-topk needs --num-experts
# what cannot be trained
analyze --num-experts 4 --moe-router-load-balancing-type aux_loss --cp-mode dynamic => a router's loss
inspect --cp-mode dynamic => use wlb-megatron analyze
# one token each: there is no loss
analyze --lengths 1,0,1,1 --micro-batches 2 => nothing to train
# launch commands
analyze -- TRAINING => give --world-size before --
analyze --world-size 3 -- TRAINING => --global-batch-size 8 is not a multiple of the data-parallel size 3
analyze --world-size 1 --micro-batches 2 -- TRAINING => say the same: give one
analyze --world-size 1 --lr 1 -- TRAINING => unrecognized arguments: --lr 1
analyze --world-size 1 -- make TRAINING => no training script
analyze --world-size 2 --dp 1 -- TRAINING => --dp 1 is not what --world-size 2 says (2)
"""
"""What a command is given beside its job, and words of the line that it ends with; {}: inspect and analyze."""
CASES = [tuple(row.split(" => ")) for row in REFUSED.splitlines() if " => " in row]
# Flags that only training has.
CASES += [(f"{{}} --{name.replace('_', '-')}", "only affects training") for name in NOT_HERE[1:6:2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(f"inspect --lengths 4,{5000 * '9'}", "cannot read lengths '4,999", id="a long number"),
        (
            "analyze --hidden-size 96 --num-attention-heads 32 --num-query-groups 5",
            "--num-attention-heads 32 is not a multiple of --num-query-groups 5",
        ),
        (  # it would go through the corpus that often a step, for minutes
            "analyze --lengths 5,6,7 --window 131072 --micro-batches 4",
            "a step of 524,288 tokens is 29,127 times all documents (18 tokens)",
        ),
        *CASES,
    ],
)
def test_what_cannot_be_or_would_change_nothing_is_refused_in_one_line(line, message, refused):
    for name in ("inspect", "analyze") if "{}" in line else (line.split()[0],):
        words = line.replace("TRAINING", TRAINING).format(name).removeprefix(name)
        assert message in refused(f"{name} {JOBS[name]} {words}")


@pytest.mark.parametrize("line", ["", "inspect", "plan"])
def test_a_missing_or_unknown_command_is_one_line(line, refused):
    refused(line)


def test_a_corpus_with_one_loss_is_no_more_refused_and_inspects_warnings_leave_its_json_alone(
    command, printed
):
    job = "analyze --no-split --window 16 --micro-batches 2 --iterations 2 --lengths 1,0,1,2"
    assert "nothing to train" not in printed(job)
    code, out, err = command("inspect --lengths 1,1 --window 16 --json -")
    assert (code, err.count("\n")) == (0, 1) and "WARNING: nothing to train" in err
    assert json.loads(out)["iterations"]


@pytest.mark.parametrize("name", ["inspect", "analyze --no-split"])
def test_thresholds_and_delay_are_not_ignored_where_documents_train_in_chunks(name, printed, refused):
    job = f"{name} --lengths 9,30,64,20,17,50 --window 64 --micro-batches 4 --pp 2 --iterations 2"
    for flags, words in {
        "--chunks on --thresholds 20": "--thresholds 20 is not used: documents in chunks never wait",
        "--chunks on --batch-spread 1.25": "--batch-spread 1.25 bounds nothing: documents in chunks",
        "--max-delay 3": "documents in chunks: no (not with --max-delay 3; chunks would",
    }.items():
        assert sum(words in line for line in printed(f"{job} {flags}").splitlines()) == 1
    line = "--chunks on cannot be combined with --max-delay 3: documents in chunks never wait; leave it out"
    assert line in refused(f"{job} --chunks on --max-delay 3")
    assert "in chunks: yes" in printed(f"{job} --chunks on --max-delay 0")


def test_a_gpus_memory_that_sets_nothing_is_warned_of(printed):
    job = "analyze --no-split --lengths 9,30,64,20 --window 64 --iterations 1 --gpu-memory 300"

    def warned(flags: str) -> list[str]:
        return [line for line in printed(f"{job} {flags}").splitlines() if "--gpu-memory" in line]

    experts = warned("--num-experts 8 --model 550M")[0]
    assert "sets no Lmax, because the number of tokens per expert" in experts
    assert "sets no Lmax" in warned("--packing original")[0]
    assert not warned("")


def test_messages_name_the_commands_flags(printed, refused):
    job = "analyze --no-split --lengths 900,4096,300,2000 --window 4096 --pp 2"
    shown = printed(f"{job} --max-delay 3 --micro-batches 2 --iterations 1").splitlines()
    assert any(line.startswith("documents in chunks: no (not with --max-delay 3; ") for line in shown)
    assert "raise --cp or --tp, use --recompute-granularity full, or lower --window" in refused(
        f"{job} --gpu-memory 64 --chunks off --micro-batches 8"
    )


def test_the_help_of_every_flag_says_what_it_is_and_its_default(monkeypatch):
    parsers: dict[str, argparse.ArgumentParser] = {}

    def stop(self: argparse.ArgumentParser, *_: Any) -> None:
        (commands,) = (
            candidate for candidate in self._actions if isinstance(candidate, argparse._SubParsersAction)
        )
        parsers.update(commands.choices)
        raise WlbError("seen")

    monkeypatch.setattr(CommandParser, "parse_args", stop)
    assert main([]) == 2 == reproduction.main([]) == run_script("corpus", add_corpus, [])
    assert len(parsers) == 7
    for command, parser in parsers.items():
        for action in parser._actions:
            text = action.help or ""
            if text == argparse.SUPPRESS:  # taken for the last time
                continue
            where = (command, action.dest, text)
            assert len(text.split("(default")[0].split()) > 1, where
            is_switch = action.nargs == 0 or not action.option_strings
            # of training's settings (path; default: ..) and the like; a folder or a file that has to be given
            assert is_switch or "default" in text or "required" in text or action.metavar, where
