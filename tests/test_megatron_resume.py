"""Stop and resume through Megatron's own checkpoints: the same documents in the same order, whatever the layout."""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_combinations import BY_DOCUMENT
from megatron_runs import (
    LENGTHS,
    flags,
    launch,
    logged_losses,
    mean_losses,
    output_of,
    read_ranks,
    refusal_of,
    train,
    without_plugin,
    write_corpus,
)
from test_megatron_layouts import trained
from torch.distributed.checkpoint import FileSystemReader

from scripts import kill_resume
from wlb_megatron.plugin.flags.versions import megatron_version

pytestmark = pytest.mark.megatron

PLAIN = "--global-batch-size 4 --train-iters 4 --split 80,20,0 --num-layers 4"
RUN = f"{PLAIN} --eval-iters 2 --eval-interval 2"
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Four iterations at once, CP=2."""
    return train(flags(f"--data-path {corpus}", RUN, context=2), 2, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """The checkpoint of a run that stopped after two of them, planned by a process of its own, with prefetching
    workers; saved beside training."""
    folder = tmp_path_factory.mktemp("stopped")
    stops = f"--save {folder}/checkpoints --num-workers 2 --exit-interval 2 --save-interval 2 --async-save"
    arguments = flags(f"--data-path {corpus}", RUN, stops, "--wlb-plan-process always", context=2)
    train(arguments, 2, folder / "out")
    return folder / "checkpoints"


@pytest.mark.parametrize(
    ("processes", "parallel", "more"),
    [(2, {"context": 2}, ""), (4, {"context": 2}, ""), (4, {"tensor": 2, "pipeline": 2}, TWO_CHUNKS)],
    ids=["the same layout", "DP2xCP2", "TP2, two virtual stages on each of PP2"],
)
def test_a_resumed_run_trains_what_the_uninterrupted_one_does(
    processes, parallel, more, corpus, whole, stopped, tmp_path
):
    """F7, F8, F9: training documents by id, and the losses on them, from the iteration after the checkpoint's."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(stopped, checkpoints)
    arguments = flags(f"--data-path {corpus} --load {checkpoints}", RUN, more, **parallel)
    ranks = train(arguments, processes, tmp_path / "out")
    expected = [entry for entry in trained(whole) if entry[0] >= 2]
    assert {iteration for iteration, _ in expected} == {2, 3}
    chunks = 2 if more else 1  # the worker notes a micro-batch in each of a stage's
    assert trained(ranks) == [entry for entry in expected for _ in range(chunks)]
    assert mean_losses(ranks, 2) == pytest.approx(mean_losses(whole, 4)[2:], rel=1e-6)


def test_a_skipped_iterations_documents_are_given_out_and_not_trained_at_resume_too(corpus, whole, tmp_path):
    """Megatron's iteration 2 of 4 is skipped. The checkpoint after the third resumes with the fourth, on DP=2."""
    saved = f"--save {tmp_path}/saved --save-interval 3 --ckpt-format torch"
    arguments = f"{RUN} --data-path {corpus} {saved} --iterations-to-skip 2"
    said = output_of(flags(arguments, "--num-workers 1", context=2), 2, out=tmp_path / "skipped")
    assert re.findall(r"consumed samples: +(\d+)", said) == ["4", "12", "16"]
    skipped = [piece for iteration, piece in trained(whole) if iteration == 1]
    tokens = sum(piece[3] - piece[2] for piece in skipped)
    assert f"its {len(skipped)} documents, {tokens} tokens, are used up and not trained" in said
    others = [entry for entry in trained(whole) if entry[0] != 1]
    assert trained(read_ranks(tmp_path / "skipped", 2)) == others
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    ranks = train(flags(arguments, f"--load {tmp_path}/saved"), 2, tmp_path / "resumed")
    assert trained(ranks) == [entry for entry in trained(whole) if entry[0] == 3]


@pytest.mark.parametrize("fresh_order", [False, True])
def test_one_command_begins_from_a_release_checkpoint_and_goes_on_when_it_is_queued_again(
    corpus, whole, stopped, tmp_path, fresh_order
):
    """Megatron begins at iteration 0 with 8 samples consumed. Without the flag the order goes on; with it every corpus
    begins an epoch, once."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(stopped, checkpoints)
    (checkpoints / "iter_0000002").rename(checkpoints / "release")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("release")
    arguments = flags(
        f"--data-path {corpus} --load {checkpoints} --save {checkpoints} --save-interval 1",
        *(RUN, "--train-iters 2 --exit-interval 1 --no-load-optim --no-load-rng"),
        "--override-opt-param-scheduler" + " --wlb-fresh-order" * fresh_order,
        context=2,
    )
    pieces, said = [], ""
    for start in ("first", "second"):
        said += output_of(arguments, 2, out=tmp_path / start)
        pieces += trained(read_ranks(tmp_path / start, 2))
    counted = re.findall(r"consumed samples: +(\d+)", said)
    assert counted == ["12", "16"]
    if fresh_order:
        assert "takes up the document order at sample 8: as --wlb-fresh-order asks" in said
        assert "the document order taken up at sample 8 goes on" in said
        assert len({piece for _, piece in pieces}) == len(pieces)
    else:
        assert "the document order goes on at sample 8" in said
        assert pieces == [entry for entry in trained(whole) if entry[0] >= 2]


def test_a_count_of_samples_that_is_not_the_plans_ends_the_job_with_one_line(corpus, tmp_path):
    """Something adds 4 samples to Megatron's count in the second iteration."""
    done = launch(flags(f"--data-path {corpus}", RUN), 2, out=tmp_path, WORKER_MISCOUNT="1")
    assert done.returncode != 0
    assert len(logged_losses(done.stdout)) == 1
    (line,) = [line for line in done.stderr.splitlines() if "the plan has trained" in line]
    assert "8 samples with this iteration, Megatron counts 8 and a global batch of 4" in line


def test_whole_documents_stay_whole_until_a_flag_says_otherwise(corpus, tmp_path):
    """As in checkpoints from before chunks ran over virtual stages, with multi-token prediction, and with seq_aux_loss.
    A new run of these flags trains in chunks."""
    job = flags(
        f"--data-path {corpus} --save {tmp_path}/saved --save-interval 1 --exit-interval 1",
        f"--num-layers 4 --global-batch-size 4 --train-iters 2 {TWO_CHUNKS} {BY_DOCUMENT}",
        "--wlb-quadratic-at 20 --wlb-micro-batch-cost 1",
        "--mtp-num-layers 1" if megatron_version() >= "0.19" else "",  # wheels before build none
        pipeline=2,
    )
    said = output_of([*job, "--wlb-chunks", "off"], 2, out=tmp_path / "first")
    assert "no (not with --wlb-chunks off; chunks would shorten the predicted step by" in said
    cut = {}
    for name, more in (("resumed", ["--load", str(tmp_path / "saved")]), ("new", [])):
        said = output_of([*job, *more], 2, out=tmp_path / name)
        kept = r"documents stay whole, as the run began; --wlb-chunks on .*: 1\.\d+ times as fast"
        stays = re.search(kept, said)
        assert bool(stays) == (name == "resumed")
        seen = read_ranks(tmp_path / name, 2)[0]["documents"]
        pieces = {piece for _, _, pieces, _ in seen for piece in pieces if piece[1] >= 0}
        cut[name] = len(pieces) - len({piece[:2] for piece in pieces})
    assert cut["new"] > 0 and cut["resumed"] == 0


def test_a_changed_corpus_is_refused_with_what_changed(stopped, tmp_path):
    write_corpus(tmp_path / "other", [*LENGTHS, 12])
    refused = refusal_of(flags(f"--load {stopped} --data-path {tmp_path}/other", RUN, context=2), 2)
    assert "cannot resume the document stream" in refused and "or add --wlb-fresh-order" in refused


def test_a_changed_blend_window_and_packing_are_taken_up_and_go_on_when_queued_again(
    corpus, whole, stopped, tmp_path
):
    """Annealing and context extension after iteration 2. What waited trains first, the corpus begins an epoch: with
    what trained before, each of its tokens once an epoch. The same command goes on from its own checkpoint."""
    write_corpus(tmp_path / "other", [7, 90, 33, 120, 5, 64, 50] * 4, seed=1)
    out, saved = tmp_path / "changed", tmp_path / "saved"
    arguments = flags(
        f"--data-path 0.6 {corpus} 0.4 {tmp_path}/other",
        *(RUN, f"--seq-length 128 --save {saved} --save-interval 3"),
        "--wlb-packing original --wlb-fresh-order --wlb-plan-process always",
        context=2,
    )
    said = output_of([*arguments, "--load", str(stopped)], 2, out=out)
    assert "takes up the document order at sample 8: the saved plan has windows of 64 tokens" in said
    assert "corpora: 1 begin an epoch, 1 are new" in said
    ranks = read_ranks(out, 2)
    before = [piece for iteration, piece in trained(whole) if iteration < 2]
    after = [piece for _, piece in trained(ranks)]
    mine = [piece for piece in before + after if piece[1] < len(LENGTHS)]
    tokens = [(*piece[:2], at) for piece in mine for at in range(piece[2], piece[3])]
    assert len(tokens) == len(set(tokens)) and len(tokens) > sum(p[3] - p[2] for p in before)
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    said = output_of([*arguments, "--load", str(saved)], 2, out=tmp_path / "again")
    assert "the document order taken up at sample 8 goes on" in said
    again = read_ranks(tmp_path / "again", 2)
    assert trained(again) == [entry for entry in trained(ranks) if entry[0] == 1]


def test_evaluation_twice_sees_the_same_documents_and_does_not_advance_training(corpus, whole, tmp_path):
    """E9: --eval-iters 0 trains the same documents in the same order, and equal weights evaluate equally; F2: at
    CP=2 as at CP=1."""
    ranks = train(flags(f"--data-path {corpus}", PLAIN, context=2), 2, tmp_path / "out")
    assert trained(ranks) == trained(whole)
    values = []
    for context in (2, 1):
        frozen = flags(f"--data-path {corpus}", RUN, "--lr 0 --min-lr 0", context=context)
        said = output_of(frozen, context, out=tmp_path / f"cp{context}")  # known weights
        values.append(re.findall(r"lm loss value: (\S+)", said))
        assert len(values[-1]) >= 2 and len(set(values[-1][:2])) == 1
        assert len(logged_losses(said)) == 4
    assert float(values[0][0]) == pytest.approx(float(values[1][0]), rel=1e-6)


# Checkpoints of runs without the plugin, with it, and without it again: the same keys, weights and counts.


STOCK_RUN = "--global-batch-size 4 --save-interval 2 --split 1,0,0 --override-opt-param-scheduler"


@dataclass(frozen=True)
class Chain:
    """Folders of checkpoints, and logs, by run."""

    saved: dict[str, Path]
    logs: dict[str, str]

    def numbers(self, run: str, pattern: str) -> list[float]:
        return [float(value) for value in re.findall(pattern, self.logs[run])]


@pytest.fixture(scope="module")
def chain(corpus, tmp_path_factory):
    """Without the plugin two iterations, saved in Megatron's torch format; with it two more, saved as torch_dist;
    without it one more. `tuned`: another run with the plugin from the first one's weights alone, at rate 0."""
    out = tmp_path_factory.mktemp("chain")
    saved: dict[str, Path] = {}
    logs: dict[str, str] = {}

    def run(name: str, samples: int, more: str, load: str = "", stock: bool = False) -> None:
        saved[name] = out / name
        samples_and_folder = f"--data-path {corpus} --train-samples {samples} --save {saved[name]}"
        arguments = flags(STOCK_RUN, samples_and_folder, more, f"--load {saved[load]}" if load else "")
        arguments = without_plugin(arguments) if stock else arguments
        logs[name] = output_of(arguments, 1, out=out / f"{name} seen", stock=stock)

    run("first", 8, "--ckpt-format torch", stock=True)
    run("with", 16, "--wlb-fresh-order", load="first")
    run("without", 20, "", load="with", stock=True)
    still = "--lr 0 --min-lr 0 --weight-decay 0 --ckpt-format torch"
    run("tuned", 4, f"--finetune --no-load-optim --no-load-rng {still}", load="first")
    return Chain(saved, logs)


def weights(folder: Path, iteration: int) -> dict[str, Any]:
    path = folder / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    model: dict[str, Any] = torch.load(path, weights_only=False)["model"]
    return model


def distributed(folder: Path, iteration: int) -> dict[str, Any]:
    """Shapes of the tensors of a torch_dist checkpoint by key; None for what is no tensor."""
    metadata = FileSystemReader(folder / f"iter_{iteration:07d}").read_metadata()
    return {key: getattr(value, "size", None) for key, value in metadata.state_dict_metadata.items()}


def test_a_run_goes_on_with_the_plugin_and_without_it_again(chain):
    """Longer training at a resume stretches the learning rate: it falls by 1e-3 over all samples."""
    for name, samples, all_samples in (("first", [4, 8], 8), ("with", [12, 16], 16), ("without", [20], 20)):
        assert chain.numbers(name, r"consumed samples: +(\d+)") == samples
        rates = [1e-3 * (1 - n / all_samples) for n in samples]
        assert chain.numbers(name, r"learning rate: (\S+)") == pytest.approx(rates, abs=1e-9)
        assert all(math.isfinite(loss) for loss in chain.numbers(name, r"lm loss: (\S+)"))
    assert "at iteration 2" in chain.logs["with"] and "at iteration 4" in chain.logs["without"]


def test_keys_and_shapes_are_those_of_a_run_without_the_plugin(chain):
    ours, theirs = distributed(chain.saved["with"], 4), distributed(chain.saved["without"], 5)
    assert ours == theirs
    assert sum(size is not None for size in ours.values()) > 20


def test_finetuning_takes_the_weights_alone_to_the_last_bit(chain):
    before, after = weights(chain.saved["first"], 2), weights(chain.saved["tuned"], 1)
    assert before.keys() == after.keys()
    tensors = [name for name, value in before.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 8
    for name in tensors:
        assert torch.equal(before[name], after[name]), name
    assert chain.numbers("tuned", r"consumed samples: +(\d+)") == [4]


def test_three_kills_change_neither_the_document_order_nor_a_bit_of_the_losses(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kill_resume.py", "3", "--seed", "3", "--iterations", "24"])
    kill_resume.main()
    assert "3 kills, each resumed: documents and losses equal" in capsys.readouterr().out
