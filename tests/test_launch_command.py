"""A launch command of training, pasted after --: the commands read from it what they need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import ROOT, bash_blocks
from test_documents_indexed import write_index

from wlb_megatron import cli
from wlb_megatron.cli import MEGATRON, PASSED_OVER, Launch, read_launch
from wlb_megatron.documents.blend import part_corpora
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.simulator.job_flags import read_job
from wlb_megatron.workload.model import ONE_KERNEL

pytestmark = pytest.mark.usefixtures("quick_thresholds")

JOB = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --global-batch-size 8"


@pytest.fixture
def analyzed(reported):
    return lambda flags: reported(f"analyze --no-split --iterations 2 --warm-up 1 {flags}")


def test_the_readmes_command_is_predicted_as_it_is_pasted(tmp_path, analyzed, reported):
    lengths = np.random.default_rng(3).integers(100, 20000, 600)
    write_index(tmp_path / "corpus_text_document.idx", lengths)
    lines = [line for block in bash_blocks(ROOT / "README.md") for line in block.splitlines()]
    (pasted,) = [line for line in lines if "--train-iters 10000" in line]
    pasted = pasted.replace("~/data/corpus", str(tmp_path / "corpus"))
    shown = analyzed(f"-- {pasted}")
    np.save(tmp_path / "train.npy", lengths[:594])  # --split 990,10,0
    short = (
        f"--lengths {tmp_path / 'train.npy'} --window 65536 --micro-batches 8 --tp 2 --cp 2 --pp 2 --recompute full "
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
        "--swiglu"
    )
    same = analyzed(short)
    assert shown["results"] == same["results"] and shown["layout"] == same["layout"]
    assert shown["documents"] == 594
    planned = [
        reported(f"inspect --iterations 1 {flags}")
        for flags in (f"--gpu-memory 80 -- {pasted}", f"{short} --gpu-memory 80", f"-- {pasted}")
    ]
    assert planned[0] == planned[1]
    assert "recomputed" in planned[2]["iterations"][0]["micro_batches"][0]


def test_inspect_reads_of_a_launch_command_what_it_has_no_flag_for(command, refused):
    """Experts; keys that are gathered again change no plan, and other flags are passed over."""
    own = f"inspect --lengths 20,30,64,9 --world-size 4 --iterations 1 -- {JOB}"
    job = f"{own} --num-experts 8 --wlb-regather-keys --lr 1e-4 --fp8-format hybrid"
    code, out, err = command(f"{job} --expert-model-parallel-size 4")
    assert code == 0 and "note: --fp8-format" in out, err
    assert "--num-experts 8 is not a multiple" in refused(f"{job} --expert-model-parallel-size 3")
    code, out, err = command(f"{own} --pipeline-model-parallel-size 2 --hybrid-layer-pattern G-*-G-*-")
    assert code == 0 and "documents in chunks: no (not with gated delta nets" in out, err


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("--num-layers 2", Launch(("--num-layers", "2"))),
        ("torchrun --nproc-per-node 8 --nnodes=2 p.py --a 1", Launch(("--a", "1"), 16)),
        ("torchrun --nproc_per_node=4 -m wlb_megatron.launch x/p.py --a", Launch(("--a",), 4)),
        (
            "OMP=1 python -m torch.distributed.run --nproc-per-node 2 -m wlb_megatron.launch p.py",
            Launch((), 2, {"OMP": "1"}),
        ),
        (
            "env A=1 B=x=y torchrun --rdzv-endpoint=c p.py --a C=2",
            Launch(("--a", "C=2"), 1, {"A": "1", "B": "x=y"}),
        ),
        ("torchrun --nproc-per-node gpu p.py --a", Launch(("--a",))),
        ("python p.py --a", Launch(("--a",))),
        ("srun -N 2 python -m wlb_megatron.launch p.py --a", Launch(("--a",))),
    ],
)
def test_a_command_is_split_at_its_script(command, launch):
    assert read_launch(command.split()) == launch


def test_the_environment_says_whether_one_kernel_multiplies_all_experts(command, monkeypatch):
    """Set in the command or around it, and only with --moe-grouped-gemm. Else one line says what it would gain."""
    monkeypatch.delenv(ONE_KERNEL, raising=False)
    own = "analyze --no-split --search none --iterations 2 --lengths 20,30,64 --kernel-table h200 --"
    job = f"torchrun --nproc-per-node 2 p.py {JOB} --pipeline-model-parallel-size 2"
    experts = f"{job} --num-experts 64 --moe-router-topk 2"
    steps, chunks = [], set()
    for number, (before, flags) in enumerate(
        [("", "--moe-grouped-gemm"), ("env {}=1", "--moe-grouped-gemm"), ("{}=1", ""), ("{}=0", "")]
    ):
        code, out, err = command(f"{own} {before.format(ONE_KERNEL)} {experts} {flags}")
        assert code == 0, err
        missing = f"set --moe-permute-fusion and {ONE_KERNEL}=1 with --moe-grouped-gemm"
        assert out.count(missing) == (number != 1)
        steps += re.findall(r"step, ms.*", out)
        chunks |= {*re.findall("documents in chunks.*", out)}
        if number == 0:
            gain = float(re.search(r"predicted to be ([\d.]+) times", out)[1])  # type: ignore[index]
    assert steps[0] == steps[2] == steps[3] != steps[1] and gain > 1.05
    assert len(chunks) == 1, "ranks plan alike though their environments differ"
    monkeypatch.setenv(ONE_KERNEL, "1")
    _, out, _ = command(f"{own} {experts} --moe-grouped-gemm")
    assert steps[1] in out
    _, out, _ = command(f"{own} {experts} --moe-grouped-gemm --moe-permute-fusion")
    assert "predicted to be" not in out
    _, out, _ = command(f"{own} {job}")
    assert ONE_KERNEL not in out


def test_each_flag_that_is_read_or_noted_is_one_of_megatrons() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    import argparse

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = parser._option_string_actions
    assert not MEGATRON - known.keys()
    assert len(PASSED_OVER.keys() & known.keys()) >= len(PASSED_OVER) - 2  # of other releases


def test_a_flag_before_the_command_counts_more(analyzed):
    job = f"{JOB} --tensor-model-parallel-size 2 --data-path not_here"
    own = "--lengths 20,30,64,9,40 --world-size 8"
    assert analyzed(f"{own} -- {job}")["layout"]["dp"] == 4
    assert analyzed(f"{own} --tp 1 -- {job}")["layout"]["tp"] == 1


def test_a_micro_batch_of_two_windows_is_predicted_as_one_of_twice_the_window(analyzed, refused, tmp_path):
    """The same documents, none longer than a window. Without a mask the two windows still do not see each other."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(2).integers(100, 4096, 300))
    flags = f"--lengths {tmp_path / 'lengths.npy'} --pp 2 --model 550M"
    own = analyzed(f"{flags} --window 4096 --micro-batches 4 --micro-batch-size 2")
    twice = analyzed(f"{flags} --window 8192 --micro-batches 2")
    times = [[side["step_ms"] for side in shown["results"].values()] for shown in (own, twice)]
    assert times[0] == times[1] and own["max_tokens"] == twice["max_tokens"]
    assert own["speedup_over_unmasked"] < twice["speedup_over_unmasked"]
    assert "not a multiple of --micro-batch-size 2" in refused(
        f"analyze {flags} --window 4096 --micro-batches 3 --micro-batch-size 2"
    )


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("*-*-|*-*-/*-", "--ffn-hidden-size 512 --num-layers 4 --mtp-num-layers 1"),
        ("*--*-*|*-|*-|*-", "--ffn-hidden-size 512 --num-layers 6 --num-virtual-stages-per-pipeline-rank 2"),
        ("*---|*---", "--ffn-hidden-size 1536 --num-layers 2"),
        ("*E|*E", "--ffn-hidden-size 512 --num-layers 2 --num-experts 4"),
    ],
)
def test_a_hybrid_models_pattern_is_predicted_as_the_gpt_model_of_its_layers(analyzed, pattern, same):
    rest = f"--lengths {','.join(map(str, range(1, 90)))} --world-size 2 -- "
    rest += "--hidden-size 256 --num-attention-heads 4 --seq-length 64 --global-batch-size 8 "
    rest += "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
    experts = "--num-experts 4" if "E" in pattern else ""
    hybrid = f"--ffn-hidden-size 512 --recompute-num-layers 2 --hybrid-layer-pattern {pattern} {experts}"
    assert analyzed(f"{rest} {hybrid}") == analyzed(f"{rest} {same}")


def test_gated_delta_nets_add_work_by_token_and_leave_out_chunks(command, refused):
    """Three nets and four MLPs to a layer with attention: X is as much longer as the weights of a layer are more."""
    job = "analyze --lengths 20,30,64 --world-size 2 --search none --iterations 1 -- --hidden-size 256"
    job += " --num-attention-heads 4 --seq-length 64 --global-batch-size 8 --pipeline-model-parallel-size 2"
    job += " --ffn-hidden-size 512 --linear-num-key-heads 2"
    job += " --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 64"
    says = {}
    for pattern in ("*-|*-", "G-G-G-*-|G-G-G-*-"):
        code, out, _ = command(f"{job} --hybrid-layer-pattern {pattern}")
        assert code == 0
        says[pattern] = int(re.search(r"work = d \+ d\*d/([\d,]+)", out)[1].replace(",", ""))  # type: ignore[index]
    attention, mlp = 256 * 256 * 4, 2 * 256 * 512
    net = 256 * (2 * 64 + 3 * 256 + 2 * 4) + 4 * (2 * 64 + 256) + 4 * 256 * 32
    ratio = (attention + 4 * mlp + 3 * net) / (attention + mlp)
    assert says["G-G-G-*-|G-G-G-*-"] == pytest.approx(says["*-|*-"] * ratio, abs=2)
    assert "documents in chunks: no (not with gated delta nets" in out
    usual, asked = (job.replace("--ffn-hidden-size 512", ffn) for ffn in ("", "--ffn-hidden-size 1024"))
    nets = "--hybrid-layer-pattern G-G-*-"
    assert command(f"{usual} {nets}") == command(f"{asked} {nets}")
    shown = refused(f"analyze --lengths 20,30 --window 64 --model 7B {nets}")
    assert "--hybrid-layer-pattern with G needs --hidden-size" in shown


def test_what_the_prediction_leaves_out_is_noted(command):
    own = "analyze --no-split --iterations 1 --lengths 20,30,64 --world-size 1 --"
    more = "--fp8-format hybrid --lr 1e-4 --profile --wlb-log x --wlb-graph-seconds=5 --wlb-packng original"
    more += " --seq-lenght 8"
    code, out, _ = command(f"{own} {JOB} {more}")
    assert code == 0 and out.count("note: ") == 4
    assert "note: --seq-lenght is not predicted: did you mean seq-length?" in out
    assert "note: --fp8-format is not predicted: times are of bf16" in out
    assert "note: --graph-seconds does nothing from this release on" in out
    assert "note: --packng is not predicted: did you mean wlb-packing?" in out


def test_a_command_that_does_not_say_all_is_refused_in_one_line(refused):
    own, no_window = "analyze --world-size 1", JOB.replace("--seq-length 64", "")
    assert "no documents: give --lengths, or the job's --data-path" in refused(f"{own} -- {JOB}")
    assert "--seq-length (or --window) is required" in refused(f"{own} --lengths 8,9 -- {no_window}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hybrid-layer-pattern *E*E", "--hybrid-layer-pattern with E: it has experts"),
        ("--hybrid-layer-pattern *-*-||*-*-", "with nothing between two |: a stage"),
        ("--hybrid-layer-pattern **", "--hybrid-layer-pattern ** is not predicted"),
        ("--hybrid-layer-pattern *-|*-|*- --pipeline-model-parallel-size 2", "has 3 parts, no multiple"),
    ],
)
def test_a_command_that_training_refuses_is_not_predicted(flags, message, refused):
    assert message in refused(f"analyze --world-size 2 --lengths 8,9 -- {JOB} {flags}")


def test_a_blend_is_packed_in_the_order_of_training(tmp_path, monkeypatch):
    """The pieces are those of a stream over the same corpora and weights, whichever flag names them."""
    random = np.random.default_rng(5)
    lengths = [random.integers(1, 64, 90), random.integers(1, 20, 50)]
    paths = [str(tmp_path / name) for name in "ab"]
    for path, tokens in zip(paths, lengths, strict=True):
        write_index(Path(f"{path}.idx"), tokens)
    words = f"0.3 {paths[0]} 0.7 {paths[1]}"
    (tmp_path / "words").write_text(words)
    (tmp_path / "parts").write_text(json.dumps({"train": words.split(), "valid": [], "test": []}))
    planned: list[Any] = []

    def plan(args: Any, documents: Any, config: Any) -> None:
        planner = read_job(args, documents).planner(documents, config)
        planned.append([piece for _ in range(9) for piece in planner.next_iteration().arrived])
        raise WlbError("seen")

    monkeypatch.setattr(cli, "run_analyze", plan)
    for form, split in {
        f"--data-path {words} --split 80,10,10": "80,10,10",
        f"--data-path {words}": "969,30,1",
        f"--data-args-path {tmp_path / 'words'} --split 80,10,10": "80,10,10",
        f"--train-data-path {words}": None,
        f"--per-split-data-args-path {tmp_path / 'parts'}": None,
    }.items():
        job = f"{JOB} {form} --seed 7 --wlb-packing original".split()
        assert cli.main(["analyze", "--world-size", "1", "--", *job]) == 2
        corpora = part_corpora(paths, lengths, [0.3, 0.7], split)
        stream = DocumentStream(corpora, Rules(64, seed=7, endless=True))
        arrived = planned.pop()
        assert len(arrived) > 200 and arrived == [stream.next() for _ in arrived]
