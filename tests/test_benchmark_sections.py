"""Benchmarks of backends: what they sum up from rows, and what is left of a part that is cut short."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COLUMNS = (
    "unsharded_ms",
    "unsharded_own_ms",
    "exposed_ms",
    "ideal_ms",
    "tile_ms",
    "launch_ms",
    "exchange_ms",
)


def row(mix: str, sharding: str, chosen: int, ms: float, window: int = 1024, **more: Any) -> dict[str, Any]:
    figures = {
        "window": window,
        "mix": mix,
        "cp": 2,
        "sharding": sharding,
        "calls": 2,
        "chosen": chosen,
        "ms": ms,
    }
    return figures | dict.fromkeys(COLUMNS, 0.0) | {"imbalance_ms": 0.0, "exposed_ms": 0.0} | more


def test_regret_is_what_was_chosen_over_the_fastest_way_of_the_same_cell() -> None:
    from scripts.bench.attention.attention_regret import regrets

    rows = [
        row("a", "hybrid", 1, 3.0),
        row("a", "per-document", 0, 2.0),
        row("b", "hybrid", 1, 4.0),
        row("b", "per-document", 0, 5.0),
        row("a", "hybrid", 1, 1.0, window=512),
    ]
    as_read = [{name: str(value) for name, value in figures.items()} for figures in rows]
    expected = {(1024, "a", 2): 0.5, (1024, "b", 2): 0.0, (512, "a", 2): 0.0}
    assert regrets(rows) == regrets(as_read) == expected


def test_backends_are_compared_where_both_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from scripts.bench.attention.attention_regret import against, report

    first = [row("a", "hybrid", 1, 2.0), row("b", "hybrid", 1, 2.0), row("c", "hybrid", 1, 1.0)]
    second = [row("a", "hybrid", 1, 4.0), row("b", "per-document", 1, 16.0), row("b", "hybrid", 0, 1.0)]
    against(first, "one", second, "other")
    assert "1024 CP=2: 2 mixes, one 4.000x other, least 2.000 (a)" in capsys.readouterr().out
    rows = [row("a", "hybrid", 1, 2.5, exposed_ms=0.5, unsharded_ms=3.0, unsharded_own_ms=2.0)]
    report(rows, [], [1024, 512], [2], "one")
    printed = capsys.readouterr().out
    assert "75.0% of unsharded / CP (50.0% of its own" in printed and "512 CP" not in printed


def test_a_part_cut_short_keeps_its_rows_and_leaves_no_process(tmp_path: Path) -> None:
    from scripts.bench.attention.fa4.fa4_sections import Sections

    work, out = tmp_path / "work", tmp_path / "out"
    for folder in (work / "nvlink", out):
        folder.mkdir(parents=True)
    sections = Sections(argparse.Namespace(out=out, lines=3), work, time.monotonic() + 60)
    script = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
Path(sys.argv[1], "child").write_text(str(child.pid))
partial = Path(sys.argv[1], "nvlink", "partial")
partial.write_text("mix,ms\\none,1.5\\n")
partial.rename(partial.with_name("backends.csv"))
time.sleep(60)
"""
    sections._start("nvlink", [sys.executable, "-c", script, str(work)], {})
    while not (work / "nvlink" / "backends.csv").exists():
        time.sleep(0.05)
    sections._wait(0.1)
    assert (out / "nvlink.csv").read_text() == "mix,ms\none,1.5\n"
    child = int((work / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # killed; what it was is gone once its new parent has waited for it
            if (Path("/proc") / str(child) / "stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            os.kill(child, 0)
            time.sleep(0.05)


ROOT = Path(__file__).resolve().parents[1]


def test_the_help_of_a_gpu_benchmark_needs_neither_torch_nor_a_gpu() -> None:
    script = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformer_engine"] = None  # importing them fails
sys.argv = ["gpu_attention", "share", "--help"]
runpy.run_module("scripts.bench.attention.gpu_attention", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "comma list of mixes" in done.stdout


def test_each_mode_of_the_gpu_benchmark_is_a_function_of_its_module() -> None:
    from scripts.bench.attention.gpu_attention import MODES

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
    assert count > 20


def test_ranks_that_hold_the_same_documents_are_a_group_of_megatrons_plan() -> None:
    from scripts.bench.dynamic.megatron_schedules import _plan, pad
    from wlb_megatron.dynamic.blocks import Stage
    from wlb_megatron.dynamic.plan import Group, StepPlan

    stage = Stage.of(2, 2, 96)
    made = _plan([[[2, 0], [2, 0], [1], [3]], [[4], [4], [4], [4]]], stage)
    first = (Group(0, 2, (0, 2)), Group(2, 1, (1,)), Group(3, 1, (3,)))
    assert made == StepPlan(4, (first, (Group(0, 4, (4,)),)))
    with pytest.raises(ValueError, match="ranks 1 to 2"):
        _plan([[[0], [1], [1], [2]]], stage)
    assert pad([1, 8, 9], 8) == [8, 8, 16]


def test_flexsps_prices_of_a_batch_are_ours_at_every_degree() -> None:
    from scripts.bench.dynamic.bench_dynamic import costs, stage_of
    from scripts.bench.dynamic.flexsp_plans import fitted

    cost, lengths = costs(stage_of(192 * 1024)), [300, 2000, 2000, 9000, 70000]
    prices = fitted(cost, lengths)
    ours = cost.prices(lengths).sum(axis=1) * 32 / 1e6
    for size, own_ms in zip(cost.sizes, ours, strict=True):
        # As FlexSP's cost model adds up: 4 x 2 tensors of 32 layers, 2 bytes an element, in MB over GB/s.
        computed = sum(prices["alpha1"] * s * s + prices["alpha2"] * s for s in lengths) / size
        moved = 4 * 2 * 32 * 4096 * sum(lengths) * 2 / 1024 / 1024 / size / prices["bandwidth"][size]
        assert computed + moved == pytest.approx(own_ms, rel=0.1 if size == 1 else 1e-6)


def test_flexsps_groups_lie_on_aligned_ranks_and_hold_each_document_once() -> None:
    from scripts.bench.dynamic.flexsp_plans import step_plan
    from wlb_megatron.dynamic.plan import Group

    made = step_plan([[(16, [1]), (32, [2, 0]), (16, [3])], [(64, [4])]], [10, 20, 30, 40, 50])
    assert made.micro_steps[0] == (Group(0, 32, (0, 2)), Group(32, 16, (1,)), Group(48, 16, (3,)))
    assert made.micro_steps[1] == (Group(0, 64, (4,)),)
    for steps, tokens, message in (
        ([[(64, [0])]], [10, 20], "each of 2 once"),
        ([[(2, [0])]], [20000], "20000 tokens on 2 GPUs"),
        ([[(64, [0]), (2, [1])]], [10, 20], "66 GPUs"),
    ):
        with pytest.raises(ValueError, match=message):
            step_plan(steps, tokens)


def test_a_peers_losses_are_compared_where_the_reference_of_its_layout_has_them() -> None:
    from scripts.bench.training.gpu_peers import compare

    losses = {
        "sft-cp2": [2.0, 1.5, 1.0],
        "sft-dp2": [2.0],
        "reference-cp2": [2.25, float("nan"), 1.125, 9.0],
    }
    compared = compare("sft-cp2", losses)
    assert (compared["loss_off_most"], compared["loss_off_mean"]) == (0.25, 0.1875)
    assert str(compare("sft-dp2", losses)["loss_off_most"]) == "nan"


def test_peers_are_compared_with_a_reference_that_ran_later_and_keep_rows_that_were_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.bench.training import gpu_peers

    class Ranks:
        def __init__(self, *_: Any) -> None: ...
        def start(self) -> None: ...
        def close(self) -> None: ...
        def run(self, kind: str, job: list[str], log: Path, limit: float) -> int:
            loss = 2.0 if "--sft" in job else 2.5
            log.write_text(
                f"iteration 1/ 1 | elapsed time per iteration (ms): 10.0 | lm loss: {loss} | grad norm: 1.0\n"
            )
            return 0

    monkeypatch.setattr(gpu_peers, "WarmRanks", Ranks)
    monkeypatch.setattr(gpu_peers, "write_corpus", lambda *_: gpu_peers.Corpus(4))
    peers = tmp_path / "peers.csv"

    def rows(*options: str) -> dict[str, tuple[str, str]]:
        folders = ["--megatron", str(tmp_path), "--main", str(tmp_path), "--out", str(tmp_path)]
        given = [*folders, "--warm-up", "0", "--iterations", "1", "--runs", *options]
        monkeypatch.setattr(sys, "argv", ["gpu_peers", *given])
        gpu_peers.main()
        return {row["run"]: (row["call"], row["loss_off_most"]) for row in gpu_peers.read_rows(peers)}

    first = {"sft-cp2": ("1", "0.5"), "reference-cp2": ("1", "0.0")}
    assert rows("sft-cp2", "reference-cp2") == first
    again = ["ours-cp2", "sft-cp2", "--earlier", str(peers)]
    assert rows(*again, "--seconds", "5") == first  # no time for any run
    assert rows(*again) == {**first, "ours-cp2": ("2", "0.0"), "sft-cp2": ("2", "0.5")}
    with pytest.raises(SystemExit, match="measured with --layers 4: give that"):
        rows(*again, "--layers", "2")


def test_documents_for_peers_fill_each_steps_windows_in_the_order_that_the_plugin_takes_them() -> None:
    from scripts.bench.training.peer_documents import SEED, batches_of, in_order
    from wlb_megatron.documents.corpus import Rules
    from wlb_megatron.documents.stream import DocumentStream

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


def test_conversations_for_peers_lie_in_the_packs_of_first_fit_and_are_counted_by_pack(
    tmp_path: Path,
) -> None:
    from scripts.bench.training.peer_documents import answers, first_fit, write_conversations
    from wlb_megatron.documents.target_masks import Kept, MaskedCorpus

    assert first_fit([60, 50, 61, 7, 64], 128, 4) == [[60, 50, 7], [61, 64]]
    assert first_fit([61, 63], 125, 4) == [[61], [63]]  # of 64 tokens each
    kinds = answers(np.random.default_rng(0), 4000)
    assert kinds[0] == 0 and 0.19 < kinds.mean() < 0.81
    items = write_conversations(tmp_path / "c", np.array([16, 40, 90, 128]), 128, 10)
    assert all(np.sum(-(-items.lengths[items.packs == pack] // 4) * 4) <= 128 for pack in range(10))
    corpus = MaskedCorpus(tmp_path / "c", Kept(128, "drop"))
    order = np.load(tmp_path / "c.order.npy")
    assert corpus.index.lengths[order].tolist() == items.lengths.tolist()
    assert corpus.counts[order].tolist() == items.targets.tolist() and items.targets.all()
    held = np.flatnonzero((items.packs == 1) | (items.packs == 2))
    of_packs = (items.lengths[held].sum(), items.targets[held].sum(), len(held))
    assert items.sums(1, 3, packed=True) == of_packs
    assert items.sums(int(held[0]), int(held[-1]) + 1, packed=False) == of_packs
