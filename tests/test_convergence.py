"""Benchmarks: the convergence experiment, their table and help, and the documents and rows of the peers' comparison."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.bench.attention.gpu_attention import MODES
from scripts.bench.convergence import convergence, convergence_report, text
from scripts.bench.convergence.controls import CutPacker, SortedPacker, unmasked
from scripts.bench.convergence.convergence_report import report
from scripts.bench.convergence.convergence_run import Trained
from scripts.bench.training import gpu_peers
from scripts.bench.training.gpu_peers import compare
from scripts.bench.training.peer_documents import (
    SEED,
    answers,
    batches_of,
    first_fit,
    in_order,
    write_conversations,
)
from scripts.megatron_job import Losses
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.indexed import MaskedCorpus
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.plan import Piece
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch
from wlb_megatron.sharding.cut import cut
from wlb_megatron.workload.cost_model import CostModel
from wlb_megatron.workload.kernel_table import h100

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_script(monkeypatch):
    """Runs a script's main() with a line of flags."""

    def run(module: Any, line: str) -> None:
        monkeypatch.setattr(sys, "argv", ["script", *line.split()])
        module.main()

    return run


def test_a_source_is_cut_at_definitions_with_their_decorators_and_loses_nothing() -> None:
    source = b"import a\n\n@one\n@two\ndef f():\n    @inner\n    def g(): pass\n\nclass C:\n"
    source += b"    async def h(self): ...\n"
    parts = list(text.definitions(source))
    assert b"".join(parts) == source
    firsts = [part.decode().split("\n")[0] for part in parts]
    assert firsts == ["import a", "@one", "    @inner", "class C:", "    async def h(self): ..."]
    assert list(text.definitions(b"def f(): pass\n")) == [b"def f(): pass\n"]


def test_documents_fit_the_window_come_once_and_stop_at_the_tokens_asked_for(tmp_path: Path) -> None:
    function = "def f():\n    return '" + "x" * 40 + "'\n"
    (tmp_path / "a.py").write_text(function + "def long():\n    '" + "y" * 200 + "'\n" + function)
    (tmp_path / "b.py").write_text(function + function.replace("f(", "g(") + function.replace("f(", "h("))
    files, seen = [tmp_path / "a.py", tmp_path / "b.py"], set[bytes]()
    documents = [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in text.documents(files, 128, seen)]
    assert [document.split("(")[0] for document in documents] == ["def f", "def g", "def h"]

    few = list(text.up_to(text.documents(files, 128, set()), len(function) + 2, hashlib.blake2b()))
    assert len(few) == 2 and all(document[-1] == 256 for document in few)


def test_a_text_with_too_few_tokens_is_refused_in_one_line_that_names_both_numbers(
    tmp_path, monkeypatch, run_script
):
    function = "def f():\n    return '" + "x" * 62 + "'\n"
    for name in "fghi":
        (tmp_path / f"{name}.py").write_text(function.replace("f()", f"{name}()"))
    tokens = len(function) + 1  # end-of-document included

    line = f"{tmp_path / 'corpus'} --text {tmp_path} --window 1000 --held-out {tokens} --train"
    with pytest.raises(SystemExit) as end:
        run_script(text, f"{line} 1050")
    assert str(end.value) == (
        f"--text {tmp_path} has too few tokens in documents below the window: {3 * tokens} of the 1,050 asked for train"
    )
    run_script(text, f"{line} {3 * tokens}")
    assert json.loads((tmp_path / "corpus" / "facts.json").read_text())["train"]["documents"] == 3

    failed = argparse.Namespace(returncode=1)
    monkeypatch.setattr(convergence.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"^1$"):
        run_script(convergence, f"--out {tmp_path / 'out'}")


def test_the_sorted_control_trains_every_token_of_64_batches_once_shortest_first() -> None:
    packer = SortedPacker(PackingJob(WlbConfig(), CostModel(1000.0, 0.0), window=64, micro_batches=2))
    lengths = np.random.default_rng(0).permutation(np.arange(1, 128))  # 8128 tokens: 63.5 batches
    arrived = [Piece(0, at, 0, int(length)) for at, length in enumerate(lengths)]
    trained: list[Piece] = []
    for iteration in range(64):
        grid, put_back = packer.pack(iteration, [] if iteration else arrived, 2)
        assert not put_back
        trained += [piece for row in grid for micro_batch in row for piece in micro_batch.pieces]
    covered = np.zeros(len(lengths), dtype=int)
    np.add.at(covered, [piece.document for piece in trained], [piece.tokens for piece in trained])
    assert covered.tolist() == lengths.tolist() and not packer.waiting
    order = [int(lengths[piece.document]) for piece in trained]
    assert order == sorted(order)


def test_the_cut_control_trains_plains_pieces_in_other_micro_batches() -> None:
    from wlb_megatron.packing.baselines import OriginalPacker

    generator = np.random.default_rng(0)
    job = PackingJob(WlbConfig(), CostModel(12.0, 0.0), window=64, micro_batches=4)
    packers = OriginalPacker(job), CutPacker(job)
    for iteration in range(20):
        lengths = [52, 52, 52, 52, 52] if iteration == 10 else generator.integers(1, 65, 9).tolist()
        arrived = [Piece(0, 100 * iteration + at, 0, length) for at, length in enumerate(lengths)]
        grids = (packer.pack(iteration, arrived, 4).grid for packer in packers)
        plain, cut = ([micro_batch for (micro_batch,) in grid] for grid in grids)
        pieces, others = (sorted(piece for one in each for piece in one.pieces) for each in (plain, cut))
        assert pieces == others
        assert max(one.work for one in cut) <= max(one.work for one in plain)
        assert all(one.pieces and one.tokens <= 128 for one in cut)


def test_without_masks_a_micro_batch_is_one_document() -> None:
    from wlb_megatron.sharding.attention_calls import attention_layout

    (shard,) = cut([np.array([5, 3, 8])], 1, "adaptive", h100())
    planned: Any = argparse.Namespace(shard=shard)
    layout: Any = None
    batch = LoadedMicroBatch(planned, layout, attention_layout(shard, 0))
    changed = unmasked(batch)
    (whole,) = cut([np.array([16])], 1, "adaptive", h100())
    assert changed.attention.positions.tolist() == list(range(16))
    assert str(changed.attention.diagonals) == str(attention_layout(whole, 0).diagonals)


def test_what_training_tokens_see_counts_chunks_prefixes_and_marks_what_a_cut_hides() -> None:
    trained = Trained()
    # A whole document, one in two chunks, and the end of one that was cut at 4.
    trained.add([Piece(0, 0, 0, 3), Piece(0, 1, 0, 2), Piece(0, 1, 2, 4, 2), Piece(0, 2, 4, 5)])
    assert trained.figures() == {"after_a_cut": 1 / 8, "earlier_tokens_seen": (0 + 1 + 2 + 0 + 1 + 2 + 3) / 8}


@pytest.mark.parametrize(("count", "quantile"), [(4, 3.182), (6, 2.571), (24, 2.069), (1000, 1.962)])
def test_the_interval_is_students(count: int, quantile: float) -> None:
    assert convergence_report.interval(0.01, count) == pytest.approx(0.01 * quantile, rel=0.01)


class Ranks:
    """Stands for warm ranks; `run` is a test's."""

    def __init__(self, *_: Any) -> None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


def made_run(arm: str, seed: int, loss: float) -> dict[str, Any]:
    run = {"arm": arm, "seed": seed, "held_out_loss": loss, "corpus": "x", "tokens": 1, "seconds": 2}
    run |= {"length_up_to": [64, 1024], "tokens_by_length": [10, 20], "token_delay": 0.5, "imbalance": 1.1}
    return run | {"loss_by_length": [loss + 1, loss - 1]}


def test_losses_are_compared_with_plain_of_the_same_seed_and_half_written_lines_left_out(tmp_path, capsys):
    losses = {"plain": {1: 1.0, 2: 2.0, 3: 3.0}, "wlb": {1: 1.1, 2: 2.2, 4: 9.0}}
    runs = [made_run(arm, seed, loss) for arm, by_seed in losses.items() for seed, loss in by_seed.items()]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(run) + "\n" for run in runs) + '{"arm": "wl')
    read = convergence_report.read_runs([path, tmp_path / "none.jsonl"])
    differences, by_length = convergence_report.paired(read, "wlb")
    assert differences == pytest.approx([0.1, 0.2])
    assert by_length == pytest.approx(np.array([[0.1, 0.1], [0.2, 0.2]]))
    report(read, tmp_path / "out")
    assert "+0.1500" in capsys.readouterr().out
    assert len((tmp_path / "out" / "convergence.csv").read_text().splitlines()) == 7
    assert (tmp_path / "out" / "convergence.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit, match="other documents"):
        other = tmp_path / "other.jsonl"
        other.write_text(json.dumps({**made_run("plain", 9, 1.0), "corpus": "y"}) + "\n")
        convergence_report.read_runs([path, other])


def test_no_run_goes_on_from_a_start_that_failed_and_a_later_call_trains_that_start_as_before(
    tmp_path, monkeypatch, run_script
):

    jobs: list[str] = []
    started: list[int] = []
    failing = ["start-1"]

    class Started(Ranks):
        def start(self) -> None:
            started.append(len(jobs))

        def run(self, kind: str, job: list[str], log: Path, limit: float) -> int:
            name, flags = job[1], job[3:]
            jobs.append(Path(job[2]).stem)
            log.write_text("")
            if name in failing or not name.startswith("start-"):
                return 1
            folder = Path(flags[flags.index("--save") + 1])
            folder.mkdir()
            (folder / "latest_checkpointed_iteration.txt").write_text("4")
            return 0

    def call(options: str = "") -> str:
        jobs.clear()
        with pytest.raises(SystemExit) as end:
            run_script(convergence, f"--out {tmp_path} --starts 3 --seeds 1 --arms cut {options}")
        return str(end.value)

    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "facts.json").write_text('{"digest": "x"}')
    monkeypatch.setattr(convergence, "WarmRanks", Started)
    assert "over" in call("--seconds -1 --workers 5") and not jobs
    assert started == [0, 0, 0]  # all that have a job, before the first one
    assert call().startswith("failed: start-1-1002;")
    assert jobs == ["start-0-1001", "start-1-1002", "start-2-1003"]
    failing.clear()
    (tmp_path / "start-1").mkdir()  # half of a checkpoint
    assert call().startswith("failed: plain-1, cut-1;")
    assert jobs == ["start-1-1002", "plain-1", "cut-1"]
    assert "begun with --start-iterations 1024: give that" in call("--start-iterations 8") and not jobs


@pytest.mark.megatron
def test_runs_are_kept_and_their_loss_is_megatrons_own_over_the_held_out_documents(tmp_path, run_script):
    sources = str(Path(text.__file__).parents[3] / "wlb_megatron")
    sizes = "--window 256 --train 4000 --held-out 5000 --start 4000"
    run_script(text, f"{tmp_path / 'corpus'} --text {sources} {sizes}")
    flags = f"--out {tmp_path} --seeds 1 --arms cut unmasked --iterations 2 --seq-length 256"
    flags += " --starts 1 --start-iterations 4"
    run_script(convergence, flags)
    lines = (tmp_path / "runs.jsonl").read_text()
    runs = [json.loads(line) for line in lines.splitlines()]
    assert [run["arm"] for run in runs] == ["plain", "cut", "unmasked"]
    for run in runs:
        losses = Losses()
        for line in (tmp_path / f"{run['arm']}-1.log").read_text().splitlines():
            losses.read(line)
        assert run["held_out_loss"] == pytest.approx(losses.validation[2], rel=1e-5)
        facts = json.loads((tmp_path / "corpus" / "facts.json").read_text())["held-out"]
        # A last token predicts nothing.
        assert sum(run["tokens_by_length"]) == facts["tokens"] - facts["documents"]
    plain, cut, unmasked = runs
    start = Losses()
    for line in (tmp_path / "start-0-1001.log").read_text().splitlines():
        start.read(line)
    # From the trained weights, not from scratch; another stream of documents.
    assert plain["training"][0] == pytest.approx(start.validation[4], abs=0.2)
    assert plain["training"][0] < start.training[1] - 0.5
    # The same pieces in other micro-batches: the same losses, also after an update, in fp32.
    assert cut["training"] == pytest.approx(plain["training"], rel=1e-6)
    assert cut["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-6)
    assert cut["imbalance"] < plain["imbalance"]
    assert cut["after_a_cut"] == plain["after_a_cut"] > 0
    # Same first weights and documents: only what a token sees differs.
    assert plain["training"][0] != unmasked["training"][0]
    assert plain["training"][0] == pytest.approx(unmasked["training"][0], abs=0.05)
    run_script(convergence, flags)
    assert (tmp_path / "runs.jsonl").read_text() == lines


# --- other benchmarks: their table and help, and the comparison with peers ---


def test_the_help_of_a_gpu_benchmark_needs_neither_torch_nor_a_gpu() -> None:
    script = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformer_engine"] = None  # importing them fails
sys.argv = ["gpu_attention", "real", "--help"]
runpy.run_module("scripts.bench.attention.gpu_attention", run_name="__main__")
"""
    help_of_real = [sys.executable, "-c", script]
    done = subprocess.run(help_of_real, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "comma list of mixes" in done.stdout


def test_each_mode_of_the_gpu_benchmark_is_a_function_of_its_module() -> None:
    for module, function in MODES.values():
        text = (ROOT / "scripts" / "bench" / "attention" / f"{module}.py").read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, (module, function)


def test_the_benchmarks_table_names_modules_that_are_there() -> None:
    folder, count = "", 0
    for line in (ROOT / "scripts" / "bench" / "README.md").read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1] if line.startswith("| ") else ""
        if heads := re.findall(r"`python -m (scripts\.bench\.\w+)\.`", first):
            (folder,) = heads
        elif folder:
            for name in re.findall(r"`([\w.]+)[^`]*`", first):
                stem, script, _ = name.partition(".sh")
                path = f"{folder}.{stem}".replace(".", "/") + (script or ".py")
                assert (ROOT / path).is_file(), line
                count += 1
    assert count >= 10


def test_a_peers_losses_are_compared_where_the_reference_of_its_layout_has_them() -> None:
    losses = {"sft-cp2": [2.0, 1.5, 1.0], "sft-dp2": [2.0]}
    losses["reference-cp2"] = [2.25, float("nan"), 1.125, 9.0]
    compared = compare("sft-cp2", losses)
    assert (compared["loss_off_most"], compared["loss_off_mean"]) == (0.25, 0.1875)
    assert str(compare("sft-dp2", losses)["loss_off_most"]) == "nan"


def test_peers_are_compared_with_a_reference_that_ran_later_and_keep_rows_that_were_not_run_again(
    tmp_path, monkeypatch, run_script
):

    class Trained(Ranks):
        def run(self, kind: str, job: list[str], log: Path, limit: float) -> int:
            loss = 2.0 if "--sft" in job else 2.5
            timed = "iteration 1/ 1 | elapsed time per iteration (ms): 10.0"
            log.write_text(f"{timed} | lm loss: {loss} | grad norm: 1.0\n")
            return 0

    monkeypatch.setattr(gpu_peers, "WarmRanks", Trained)
    monkeypatch.setattr(gpu_peers, "write_corpus", lambda *_: gpu_peers.Corpus(4))
    peers = tmp_path / "peers.csv"

    def rows(options: str) -> dict[str, tuple[str, str]]:
        folders = f"--megatron {tmp_path} --main {tmp_path} --out {tmp_path}"
        run_script(gpu_peers, f"{folders} --warm-up 0 --iterations 1 --runs {options}")
        return {row["run"]: (row["call"], row["loss_off_most"]) for row in gpu_peers.read_rows(peers)}

    first = {"sft-cp2": ("1", "0.5"), "reference-cp2": ("1", "0.0")}
    assert rows("sft-cp2 reference-cp2") == first
    again = f"ours-cp2 sft-cp2 --earlier {peers}"
    assert rows(f"{again} --seconds 5") == first  # no time for any run
    assert rows(again) == {**first, "ours-cp2": ("2", "0.0"), "sft-cp2": ("2", "0.5")}
    with pytest.raises(SystemExit, match="measured with --layers 4: give that"):
        rows(f"{again} --layers 2")


def test_documents_for_peers_fill_each_steps_windows_in_the_order_that_the_plugin_takes_them() -> None:
    batches = list(batches_of([3, 20, 90], 128, 2, 3))
    assert [[sum(pack) for pack in batch] for batch in batches] == [[128, 128]] * 3
    assert len({sum(map(len, batch)) for batch in batches}) == 1
    wanted = [length for batch in batches for pack in batch for length in pack]
    assert all(length % 8 == 0 for length in wanted)
    order, placed = in_order(wanted, 128)
    stream = DocumentStream.of_lengths(placed, Rules(128, seed=SEED, endless=True))
    taken = [piece for _ in wanted if (piece := stream.next()) is not None]
    assert [piece.tokens for piece in taken] == wanted
    assert [piece.document for piece in taken] == order.tolist()


def test_conversations_for_peers_lie_in_the_packs_of_first_fit_and_are_counted_by_pack(tmp_path):
    assert first_fit([60, 50, 61, 7, 64], 128, 4) == [[60, 50, 7], [61, 64]]
    assert first_fit([61, 63], 125, 4) == [[61], [63]]  # of 64 tokens each
    kinds = answers(np.random.default_rng(0), 4000)
    assert kinds[0] == 0 and 0.19 < kinds.mean() < 0.81
    items = write_conversations(tmp_path / "c", np.array([16, 40, 90, 128]), 128, 10)
    assert all(np.sum(-(-items.lengths[items.packs == pack] // 4) * 4) <= 128 for pack in range(10))
    corpus = MaskedCorpus(tmp_path / "c", Rules(128, "drop"))
    order = np.load(tmp_path / "c.order.npy")
    assert corpus.index.lengths[order].tolist() == items.lengths.tolist()
    assert corpus.counts[order].tolist() == items.targets.tolist() and items.targets.all()
    held = np.flatnonzero((items.packs == 1) | (items.packs == 2))
    of_packs = (items.lengths[held].sum(), items.targets[held].sum(), len(held))
    assert items.sums(1, 3, packed=True) == of_packs
    assert items.sums(int(held[0]), int(held[-1]) + 1, packed=False) == of_packs
