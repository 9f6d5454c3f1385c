"""Every flag of every planning command changes what it prints, or is refused: none is ignored."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import call

from wlb_megatron.analyze.analyze_command import add_analyze
from wlb_megatron.cli import _Parser, main
from wlb_megatron.errors import WlbError
from wlb_megatron.settings_flags import NOT_HERE, add_layout, add_settings
from wlb_megatron.simulator.inspected_job import add_inspected_job
from wlb_megatron.simulator.reproduction import reproduce_command as reproduction

pytestmark = pytest.mark.usefixtures("quick_thresholds")

LENGTHS = "--lengths 300,40,9,64,17,128,33,50,20,8 --window 128"
LAYOUT = "--micro-batches 4 --dp 2 --cp 2 --tp 2 --pp 2 --iterations 3 --warm-up 1 --thresholds 64"
WHERE_ALL_COUNTS = "--model 550M --node 1 --dp-exposed 0.5 --gradient-bytes 400"
NO_HOST = f"{WHERE_ALL_COUNTS} --host-launch 0 --chunks off"
WHOLE = f"{NO_HOST} --micro-batch-cost 0 --quadratic-at 8"
LONG = "--window 131072 --lengths 300000,40000,9000,64000,17000,128000,33000,50000,20000,8000"
CHUNKS = f"{NO_HOST} --chunks auto --pp 4 --dp 1 --vocab-size 512 {LONG}"
WAITING = f"{WHOLE} --pp 1 --dp 1 --iterations 8 --lengths 128,20,30,40,9,8,120,17,20,6,30,12,5,22,31"
SHAPE = "--hidden-size 256 --num-attention-heads 4"
EXPERTS = f"{NO_HOST} --num-experts 4 --chunks on"
FULL = f"{NO_HOST} --recompute full --vocab-size 512 --window 16384 --lengths 300,40,9000,16384,1700,128,330"


ANALYZE = {
    # flag: (value, the flags beside it)
    "lengths": ("300,40", NO_HOST),
    "window": ("256", NO_HOST),
    "micro-batches": ("2", NO_HOST),
    "dp": ("1", NO_HOST),
    "cp": ("4", NO_HOST),
    "tp": ("4", NO_HOST),
    "pp": ("4", NO_HOST),
    "vpp": ("2", NO_HOST),
    "packing": ("original", f"{NO_HOST} --thresholds auto"),
    "sharding": ("per-sequence", NO_HOST),
    "max-tokens": ("240", WAITING),
    "micro-batches-per-window": ("2", WHOLE),
    "micro-batch-cost": ("5000", WHOLE),
    "chunks": ("on", NO_HOST),
    "max-delay": ("0", WAITING),
    "thresholds": ("none", WAITING),
    "batch-spread": ("1", WAITING),
    "release": ("full", WHOLE),
    "balance-batches": ("3", f"{NO_HOST} --packing fixed-greedy --thresholds auto"),
    "quadratic-at": ("16", WHOLE),
    "document-cost": ("500", WHOLE),
    "max-documents": ("3", WHOLE),
    "overlong": ("drop", NO_HOST),
    "regather-keys": ("", NO_HOST),
    "recompute": ("selective", NO_HOST),
    "recompute-method": ("block", f"{FULL} --wlb-recompute off"),
    "recompute-num-layers": ("8", f"{FULL} --wlb-recompute off --recompute-method block"),
    "wlb-recompute": ("off", FULL),
    "memory-margin": ("0.15", f"{FULL} --gpu-memory 2.5"),
    "iterations": ("2", NO_HOST),
    "warm-up": ("3", NO_HOST),
    "seed": ("7", NO_HOST),
    "model": ("7B", NO_HOST),
    "num-layers": ("8", NO_HOST),
    "hybrid-layer-pattern": ("*-*-*-*-*-*-*-*-", NO_HOST),
    "hidden-size": ("512", f"{SHAPE} --host-launch 0 --chunks off"),
    "num-attention-heads": ("8", f"{SHAPE} --host-launch 0 --chunks off"),
    "num-query-groups": ("2", f"{SHAPE} --host-launch 0 --chunks off"),
    "kv-channels": ("128", f"{SHAPE} --host-launch 0 --chunks off"),
    "ffn-hidden-size": ("512", f"{SHAPE} --host-launch 0 --chunks off"),
    "swiglu": ("", f"{SHAPE} --host-launch 0 --chunks off"),
    "vocab-size": ("512", NO_HOST),
    "mtp-num-layers": ("1", f"{FULL} --gpu-memory 2.5"),
    "fine-grained-activation-offloading": ("", f"{CHUNKS} --vpp 2"),
    "cpu-offloading-num-layers": ("1", CHUNKS),
    "num-experts": ("4", NO_HOST),
    "moe-router-topk": ("3", f"{NO_HOST} --num-experts 4"),
    "moe-ffn-hidden-size": ("64", f"{NO_HOST} --num-experts 4"),
    "moe-router-load-balancing-type": ("global_aux_loss", EXPERTS),
    "expert-model-parallel-size": ("2", EXPERTS),
    "expert-tensor-parallel-size": ("4", EXPERTS),
    "use-megatron-fsdp": ("", f"{NO_HOST} --chunks on"),
    "use-torch-fsdp2": ("", f"{NO_HOST} --chunks on"),
    "matmul-rate": ("1e12", NO_HOST),
    "memory-rate": ("1e11", NO_HOST),
    "weight-traffic": ("1e5", NO_HOST),
    "logit-traffic": ("1e5", NO_HOST),
    "nvlink-rate": ("1e6", "--model 550M --host-launch 0 --chunks off"),
    "network-rate": ("1e6", NO_HOST),
    "network-gbps": ("0.016", NO_HOST),
    "node": ("2", NO_HOST),
    "nvlink-latency": ("1", "--model 550M --host-launch 0 --chunks off"),
    "network-latency": ("1", NO_HOST),
    "activation-passes": ("99", NO_HOST),
    "ffn-passes": ("99", NO_HOST),
    "tp-exposed": ("0.5", NO_HOST),
    "dp-exposed": ("1", NO_HOST),
    "host-launch": ("2", f"{WHERE_ALL_COUNTS} --chunks off"),
    "step-overhead": ("1", NO_HOST),
    "gradient-bytes": ("4", NO_HOST),
    "parameter-bytes": ("1000", NO_HOST),
    "optimizer-bytes": ("99", NO_HOST),
    "kernel-table": ("h200", NO_HOST),
}

QUICK = "analyze --no-split --search none"

ELSEWHERE = {
    "analyze": {
        "json": "is how all others are looked at",
        "trace": "test_simulator_schemes.py",
        "profile": "test_simulator_profile.py",
        "gpu-memory": "test_job_flags.py",
        "cp-mode": "test_job_flags.py",
        "no-split": "test_cli_analyze.py",
        "pictures": "test_cli_analyze.py",
        "token-weights": "test_cli_analyze.py",
        "search": "test_search.py",
        "solver-seconds": "bounds a search by the clock, and is refused where there is none, below",
    },
}


def flags_of(add: Any) -> set[str]:
    parser = argparse.ArgumentParser()
    for add_flags in add:
        add_flags(parser)
    return names(parser)


OF_LAUNCH_COMMANDS = {
    *("data-path", "data-args-path", "per-split-data-args-path", "split", "world-size", "global-batch-size"),
    *("train-data-path", "valid-data-path", "test-data-path", "micro-batch-size", "group-query-attention"),
    *(
        "num-layers-per-virtual-pipeline-stage",
        "recompute-activations",
        "sequence-parallel",
        "hidden-dropout",
    ),
    *(
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "untie-embeddings-and-output-weights",
    ),
    *("train-iters", "train-samples", "multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim"),
    *("linear-num-key-heads", "linear-num-value-heads", "linear-key-head-dim", "linear-value-head-dim"),
    "linear-conv-kernel-dim",
    *(
        "qk-pos-emb-head-dim",
        "v-head-dim",
        "moe-shared-expert-intermediate-size",
        "expert-imbalance",
        "moe-layer-freq",
    ),
}
"""See test_launch_command.py."""


def names(parser: argparse.ArgumentParser) -> set[str]:
    return {action.option_strings[-1][2:] for action in parser._actions} - {"help", *OF_LAUNCH_COMMANDS}


def json_of(capsys: pytest.CaptureFixture[str], command: str, flags: str) -> Any:
    code, out, err = call(capsys, *command.split(), *flags.split(), "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_the_table_holds_every_flag_of_analyze() -> None:
    assert flags_of([add_layout, add_settings, add_analyze]) == set(ANALYZE) | set(ELSEWHERE["analyze"])


def test_every_flag_of_analyze_changes_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    before: dict[str, Any] = {}
    idle = []
    for flag, (value, beside) in ANALYZE.items():
        flags = f"{LENGTHS} {LAYOUT} {beside}"
        if beside not in before:
            before[beside] = json_of(capsys, QUICK, flags)["results"]
        if json_of(capsys, QUICK, f"{flags} --{flag} {value}")["results"] == before[beside]:
            idle.append(flag)
    assert not idle


KNOWN = "--model 550M --recompute full --gpu-memory 200"
OWN = "--hidden-size 1024 --num-attention-heads 8 --recompute full --gpu-memory 80"
INSPECT = {
    "lengths": ("30,40", ""),
    "window": ("128", ""),
    "micro-batches": ("4", ""),
    "dp": ("2", ""),
    "cp": ("4", ""),
    "tp": ("8", ""),
    "pp": ("4", "--micro-batch-cost 0 --quadratic-at 8"),
    "vpp": ("2", "--pp 2 --micro-batches-per-window 1.5"),
    "packing": ("original", "--thresholds auto"),
    "sharding": ("per-sequence", ""),
    "max-tokens": ("80", ""),
    "micro-batches-per-window": ("2", ""),
    "micro-batch-cost": ("99999", "--pp 4 --micro-batch-cost 0 --quadratic-at 8"),
    "chunks": ("on", ""),
    "max-delay": ("0", "--thresholds 20"),
    "thresholds": ("20", ""),
    "batch-spread": ("1", "--thresholds 20"),
    "release": ("full", "--thresholds 20"),
    "balance-batches": ("3", "--packing fixed-greedy --thresholds auto"),
    "quadratic-at": ("4", ""),
    "document-cost": ("500", ""),
    "max-documents": ("2", ""),
    "overlong": ("drop", ""),
    "iterations": ("1", ""),
    "model": ("7B", KNOWN),
    "num-layers": ("8", KNOWN),
    "hidden-size": ("2048", OWN),
    "num-attention-heads": ("16", OWN),
    "num-query-groups": ("2", OWN),
    "kv-channels": ("256", OWN),
    "ffn-hidden-size": ("512", OWN),
    "swiglu": ("", OWN),
    "vocab-size": ("512", OWN),
    "recompute": ("selective", KNOWN),
    "recompute-method": ("block", KNOWN),
    "recompute-num-layers": ("2", KNOWN),
    "wlb-recompute": ("off", KNOWN),
    "gpu-memory": ("40", KNOWN),
    "memory-margin": ("0.2", KNOWN),
}


def test_every_flag_of_inspect_changes_its_plans_or_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown = flags_of([add_layout, add_settings, add_inspected_job]) | {"pp", "vpp", "iterations"}
    refused = {"cp-mode": "dynamic", "regather-keys": "", "solver-seconds": "2"}
    assert shown == set(INSPECT) | set(refused)
    base = "--lengths 64,40,9,64,17,28,33,50,100,8,8,8 --window 64 --micro-batches 2 --cp 2 --thresholds 60"
    base += " --chunks off"
    idle = []
    for flag, (value, beside) in INSPECT.items():
        flags = f"{base} {beside}"
        if json_of(capsys, "inspect", f"{flags} --{flag} {value}") == json_of(capsys, "inspect", flags):
            idle.append(flag)
    assert not idle
    for flag, value in refused.items():
        code, _, err = call(capsys, "inspect", *f"{base} --{flag} {value}".split())
        assert (code, err.count("\n")) == (2, 1) and f"--{flag}" in err, flag


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


def test_every_flag_of_reproduce_reaches_what_is_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

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
    base = ["reproduce", "--out", str(tmp_path / "out")]
    assert main(base) == 2
    for flag, value in REPRODUCE.items():
        more = ["--no-stretch"] if flag == "lengths-of" else []
        arguments = [value.format(tmp_path / "lengths.npy")] if value else []
        assert main([*base, f"--{flag}", *arguments, *more]) == 2
    assert len(set(asked)) == len(REPRODUCE) + 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *((f"{{}} --{name.replace('_', '-')}", "only affects training") for name in NOT_HERE[:6:2]),
        (
            "inspect --wlb-token-weights equal",
            "wlb_megatron: error: --wlb-token-weights only affects training",
        ),
        ("{} --micro-batches 2 --global-batch-size 2", "say the same: give one"),
        ("{} --data-path c", "cannot read index c.idx"),
        ("{} --world-size 6 --tp 4", "6 GPUs are not a multiple of --tp 4"),
        ("inspect --num-experts 2", "unrecognized arguments: --num-experts 2 (see wlb-megatron inspect"),
        ("inspect --model 7B", "--model changes nothing without --gpu-memory"),
        (
            "inspect --gpu-memory 80",
            "--gpu-memory changes nothing without a model (--model or --hidden-size)",
        ),
        ("inspect --memory-margin 0.2", "--memory-margin changes nothing without a model"),
        ("inspect --wlb-recompute off", "--wlb-recompute changes nothing without a model"),
        ("inspect --recompute full", "--recompute-granularity changes nothing without a model"),
        (
            "inspect --model 7B --gpu-memory 80 --wlb-recompute off",
            "changes nothing without --recompute-gran",
        ),
        (
            "{} --model 7B --gpu-memory 80 --recompute-method block",
            "changes nothing without --recompute-gran",
        ),
        ("{} --solver-seconds 2", "without --packing fixed-solver or --cp-mode dynamic"),
        ("{} --packing original --thresholds 9", "changes nothing without --packing varlen"),
        ("{} --packing fixed-greedy --max-delay 3", "changes nothing without --packing varlen"),
        ("{} --balance-batches 2", "without --packing fixed-greedy or fixed-solver"),
        ("{} --release full --micro-batches-per-window 2", "changes nothing without --release balance"),
        ("reproduce --lengths-of 64", "seeded lengths"),
    ],
)
def test_what_would_change_nothing_is_refused_in_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("inspect", "analyze") if "{}" in command else ("",):
        words = command.format(name).split()
        layout = ["--out", "d"] if words[0] == "reproduce" else ["--lengths", "9,30", "--window", "64"]
        code, _, err = call(capsys, *words, *layout)
        assert code == 2 and message in err and err.count("\n") == 1, err


def lines_of(capsys: pytest.CaptureFixture[str], flags: str) -> list[str]:
    code, out, err = call(capsys, *flags.split())
    assert (code, err) == (0, "")
    return out.splitlines()


@pytest.mark.parametrize("command", ["analyze --no-split"])
def test_a_corpus_that_predicts_nothing_is_refused_in_one_line_as_in_training(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document has one token, so there is no loss."""
    job = f"{command} --window 16 --micro-batches 2 --iterations 2"
    code, out, err = call(capsys, *f"{job} --lengths 1,0,1,1".split())
    assert (code, out, err.count("\n")) == (2, "", 1) and "nothing to train" in err
    assert not any("nothing to train" in line for line in lines_of(capsys, f"{job} --lengths 1,0,1,2"))


@pytest.mark.parametrize("command", ["analyze --no-split"])
def test_a_step_of_hundreds_of_epochs_is_refused_at_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would go through a corpus of 18 tokens 29,127 times a step, for minutes."""
    code, out, err = call(capsys, *f"{command} --lengths 5,6,7 --window 131072 --micro-batches 4".split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a step of 524,288 tokens is 29,127 times all documents (18 tokens)" in err


def test_inspects_warnings_leave_its_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *["inspect", "--lengths", "1,1", "--window", "16", "--json", "-"])
    assert (code, err.count("\n")) == (0, 1) and "WARNING: nothing to train" in err
    assert json.loads(out)["iterations"]


@pytest.mark.parametrize("command", ["inspect", "analyze --no-split"])
def test_thresholds_and_delay_are_not_ignored_where_documents_train_in_chunks(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"{command} --lengths 9,30,64,20,17,50 --window 64 --micro-batches 4 --pp 2 --iterations 2"
    lines = lines_of(capsys, f"{job} --chunks on --thresholds 20")
    unused = "--thresholds 20 is not used: documents in chunks never wait"
    assert sum(unused in line for line in lines) == 1
    lines = lines_of(capsys, f"{job} --chunks on --batch-spread 1.25")
    assert sum("--batch-spread 1.25 bounds nothing: documents in chunks" in line for line in lines) == 1
    code, _, err = call(capsys, *f"{job} --chunks on --max-delay 3".split())
    assert (code, err.count("\n")) == (2, 1)
    assert (
        "--chunks on cannot be combined with --max-delay 3: documents in chunks never wait; leave it out"
        in err
    )
    lines = lines_of(capsys, f"{job} --max-delay 3")
    assert sum("documents in chunks: no (not with --max-delay 3; chunks would" in line for line in lines) == 1
    assert any("in chunks: yes" in line for line in lines_of(capsys, f"{job} --chunks on --max-delay 0"))


@pytest.mark.parametrize("command", ["analyze --no-split"])
def test_a_gpus_memory_that_sets_nothing_is_warned_of(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"{command} --lengths 9,30,64,20 --window 64 --iterations 1 --gpu-memory 300"

    def warned(flags: str) -> list[str]:
        return [line for line in lines_of(capsys, f"{job} {flags}") if "--gpu-memory" in line]

    assert (
        "sets no Lmax, because the number of tokens per expert" in warned("--num-experts 8 --model 550M")[0]
    )
    assert "sets no Lmax" in warned("--packing original")[0]
    assert not warned("")


def test_messages_name_the_commands_flags(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--lengths 900,4096,300,2000 --window 4096 --pp 2"
    shown = lines_of(capsys, f"analyze --no-split {job} --max-delay 3 --micro-batches 2 --iterations 1")
    assert any(line.startswith("documents in chunks: no (not with --max-delay 3; ") for line in shown)
    _, _, err = call(
        capsys, *f"analyze --no-split {job} --gpu-memory 64 --chunks off --micro-batches 8".split()
    )
    assert "raise --cp or --tp, use --recompute-granularity full, or lower --window" in err


def test_the_help_of_every_flag_says_what_it_is_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: dict[str, argparse.ArgumentParser] = {}

    def stop(self: argparse.ArgumentParser, *_: Any) -> None:
        (commands,) = (
            candidate for candidate in self._actions if isinstance(candidate, argparse._SubParsersAction)
        )
        parsers.update(commands.choices)
        raise WlbError("seen")

    monkeypatch.setattr(_Parser, "parse_args", stop)
    assert main([]) == 2
    assert len(parsers) == 9
    for command, parser in parsers.items():
        for action in parser._actions:
            text = action.help or ""
            where = (command, action.dest, text)
            assert len(text.split("(default")[0].split()) > 1, where
            is_switch = action.nargs == 0 or not action.option_strings
            # of training's settings (path; default: ..) and the like; a folder or a file that has to be given
            assert is_switch or "default" in text or "required" in text or action.metavar, where
