"""Benchmarks: their table and help, and the documents, rows and losses of the comparison with peers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_help_of_a_gpu_benchmark_needs_neither_torch_nor_a_gpu() -> None:
    script = """
import runpy, sys
sys.modules["torch"] = sys.modules["transformer_engine"] = None  # importing them fails
sys.argv = ["gpu_attention", "real", "--help"]
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
    assert count >= 10


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
