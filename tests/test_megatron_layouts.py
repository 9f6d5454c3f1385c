"""The whole model through Megatron's own schedule: every layout computes what the single process computes."""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from megatron_combinations import CHUNKS, CP2, CPU, MOE, RECOMPUTE, Combination
from megatron_runs import (
    LENGTHS,
    check_alike,
    flags,
    output_of,
    rewrite_corpus,
    train,
    whole_gradients,
    write_corpus,
)

from wlb_megatron.plugin.flags.versions import megatron_version

pytestmark = pytest.mark.megatron

BREADTH = f"--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable --no-rope-freq 2 {RECOMPUTE} uniform"
LAYOUTS = {row.name: row for row in CPU} | {
    "DP2xCP2, keys sent again": Combination("", 4, f"{CP2} --wlb-regather-keys"),
    "CP2, windows, sinks, full recompute": Combination("", 2, CP2, BREADTH),
}
RUN = "--global-batch-size 4 --train-iters 2"


def test_micro_batches_differ_in_length_and_hold_several_documents(single):
    (rank,) = single(RUN)
    sizes = {sum(end - start for _, _, start, end in pieces) for _, _, pieces, _ in rank["documents"]}
    assert len(sizes) > 2
    assert max(len(pieces) for _, _, pieces, _ in rank["documents"]) > 2


@pytest.mark.parametrize(
    ("layout", "sharding"),
    [
        *((name, "per-document") for name in ("TP2", "CP2", "PP2", "CP2xPP2", "DP2xCP2, keys sent again")),
        ("CP2, windows, sinks, full recompute", "per-document"),
        *(("CP2", "per-sequence"), ("CP2xPP2", "adaptive"), ("torch FSDP2, DP2xCP2", "adaptive")),
        ("VPP2 on PP2, DP2, distributed optimizer", "adaptive"),
        # All in the warm-up: activations wrap from the last stage to the first.
        ("VPP2 on PP4 = micro-batches", "adaptive"),
        *(("MTP of 1, MoE, TP2+SP, CP2", "adaptive"), ("FP8 delayed, full recompute, DP2xPP2", "adaptive")),
    ],
)
def test_losses_and_gradients_equal_the_single_process(layout, sharding, corpus, single, tmp_path):
    """A few rows of the table in megatron_combinations.py; scripts/check_combinations.py runs all of them."""
    row = LAYOUTS[layout]
    arguments = flags(f"--data-path {corpus}", RUN, row.model, row.flags, f"--wlb-sharding {sharding}")
    ranks = train(arguments, row.processes, tmp_path)
    check_alike(single(RUN, row.model), ranks, 2)
    chunks = 2 if "VPP2" in layout else 1  # the worker notes a micro-batch in each of a stage's
    assert trained(ranks) == [entry for entry in trained(single(RUN, row.model)) for _ in range(chunks)]
    assert any(name.endswith("softmax_offset") for name in whole_gradients(ranks)) == ("sinks" in layout)


def trained(ranks: list[dict[str, Any]]) -> list[tuple[int, tuple[int, ...]]]:
    """(iteration, piece) of everything trained, from the first rank of each data-parallel group."""
    firsts = [rank for rank in ranks if not any(rank["place"][axis] for axis in ("tp", "cp", "pp"))]
    return sorted(
        (iteration, piece)
        for rank in firsts
        for iteration, _, pieces, _ in rank["documents"]
        for piece in pieces
        if piece[1] >= 0
    )


def test_a_rehearsal_of_the_longest_micro_batches_leaves_no_trace(corpus, single, tmp_path):
    """Its losses come first in the record (4 micro-batches); after it, training is that of the run without."""
    arguments = flags(f"--data-path {corpus}", RUN, "--wlb-rehearsal always", pipeline=2)
    ranks = train(arguments, 2, tmp_path)
    assert ranks[0]["documents"][0][0] == -1 and sum(entry[0] == -1 for entry in ranks[0]["documents"]) == 4
    tokens = sum(end - start for _, _, start, end in ranks[0]["documents"][0][2])
    assert tokens == 96  # Lmax of 1.5 windows of 64
    for rank in ranks:
        rank["documents"] = [entry for entry in rank["documents"] if entry[0] >= 0]
    assert trained(ranks) == trained(single(RUN))
    check_alike(single(RUN), ranks, 2)


def test_logged_losses_are_means_over_the_planned_micro_batches_and_leave_out_the_rehearsal(corpus):
    """Routers' and multi-token losses, too: Megatron adds them up until it logs them, and divides by the micro-batches
    that its own calculator has. In more micro-batches, or in chunks, the same documents have nearly the same balance,
    and the same mean over tokens of all other losses."""
    routers = MOE.replace(
        "aux_loss --moe-aux-loss-coeff 0.01", "aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.01"
    )
    model = f"{routers} --moe-z-loss-coeff 0.01 --mtp-num-layers 1"
    losses = []
    for how in ("never 1 off", "always 1 off", "never 2 off", "never 2 on"):
        rehearsal, per_window, chunks = how.split()
        plans = f"--wlb-rehearsal {rehearsal} --wlb-micro-batches-per-window {per_window} --wlb-max-delay 0"
        arguments = flags(f"--data-path {corpus}", RUN, model, plans, f"--wlb-chunks {chunks}")
        losses.append(losses_of(output_of(arguments, 1)))
    names = "lm loss", "load_balancing_loss", "global_load_balancing_loss", "z_loss", "mtp_1 loss"
    assert {name for name, _ in losses[0]} >= {*names}
    assert losses[1] == losses[0]
    first = len(losses[0]) // 2  # of these are the first of two iterations, before any weight has changed
    for at, ((name, value), *others) in enumerate(zip(losses[0], *losses[2:], strict=True)):
        by_token = at < first and not name.endswith("balancing_loss")
        for same, other in others:
            assert name == same and other == pytest.approx(value, rel=2e-6 if by_token else 0.25), name


def losses_of(log: str) -> list[tuple[str, float]]:
    """Names and values of all losses that Megatron logs, in order."""
    found = re.findall(r"\| ([a-z_0-9 ]*loss): ([0-9.E+-]+)", log)
    return [(name, float(value)) for name, value in found]


ROUTERS = MOE.replace("aux_loss --moe-aux-loss-coeff", "aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01")
LOGGED = f"{ROUTERS} --moe-z-loss-coeff 0.01 --num-layers 4 --global-batch-size 4 --train-iters 1"
LOGGED += " --wlb-micro-batches-per-window 1 --wlb-chunks off --wlb-max-delay 0"
EXPERTS = {
    "in all layers": "--mtp-num-layers 2" if megatron_version() >= "0.19" else "",  # wheels before build none
    "in the first half": "--moe-layer-freq [1,1,0,0]",
}


@pytest.fixture(scope="module")
def logged(corpus, tmp_path_factory):
    """Runs one step; the losses in its log by name."""

    @cache
    def run(experts: str, processes: int, more: str = "", **parallel: int) -> dict[str, float]:
        arguments = flags(f"--data-path {corpus}", LOGGED, EXPERTS[experts], more, **parallel)
        out = tmp_path_factory.mktemp("logged")
        return dict(losses_of(output_of(arguments, processes, out=out)))

    return run


@pytest.mark.parametrize(
    ("experts", "parallel", "more"),
    [
        ("in all layers", {"context": 4}, ""),
        ("in all layers", {"tensor": 2, "pipeline": 2}, "--sequence-parallel"),
        ("in all layers", {"pipeline": 2}, "--expert-model-parallel-size 2"),
        ("in the first half", {"context": 2, "pipeline": 2}, ""),
    ],
)
def test_every_loss_in_the_log_is_that_of_the_single_process(experts, parallel, more, logged):
    """Ranks hold unequally many tokens that predict something or are routed: a mean of their means is another. The last
    stage, which logs, may have no experts."""
    single, ranks = logged(experts, 1), logged(experts, 4, more, **parallel)
    assert {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"} < single.keys()
    assert ranks == pytest.approx(single, rel=2e-6)


def test_logged_losses_by_token_and_by_document_are_those_of_whole_documents_where_these_are_in_chunks(
    logged,
):
    """A document's loss is logged once, with its last chunk. Another balancing loss depends on the micro-batches."""
    name, by_micro_batch = "in the first half", "load_balancing_loss"
    whole, chunks = logged(name, 1), logged(name, 2, f"{CHUNKS} {RECOMPUTE} uniform", pipeline=2)
    assert chunks[by_micro_batch] != pytest.approx(whole[by_micro_batch], rel=1e-3)
    assert chunks | {by_micro_batch: 0} == pytest.approx(whole | {by_micro_batch: 0}, rel=2e-6)
    assert "seq_load_balancing_loss" in whole


def logits_by_document(ranks: list[dict[str, Any]]) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
    """{piece: {position: logits}} of all that was trained."""
    by_document: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for (_, _, pieces, rows), logits in zip(rank["documents"], rank["logits"], strict=True):
            at = 0
            for index, start, end in rows:
                for position in range(start, end):
                    by_document.setdefault(pieces[index], {})[position] = logits[at + position - start, 0]
                at += end - start
    return by_document


@pytest.mark.parametrize("sharding", ["per-document", "per-sequence"])
def test_one_changed_token_changes_its_own_document_alone(sharding, tmp_path):
    documents = write_corpus(tmp_path / "before", LENGTHS)

    def logits(corpus: str) -> dict[tuple[int, ...], dict[int, torch.Tensor]]:
        data = f"--data-path {tmp_path}/{corpus} --wlb-sharding {sharding}"
        run = f"--global-batch-size 2 --train-iters 1 {data}"
        ranks = train(flags(run, context=2), 2, tmp_path / f"{corpus} seen", WORKER_LOGITS="1")
        return logits_by_document(ranks)

    before = logits("before")
    together = [piece for piece in before if piece[1] >= 0]
    assert len(together) > 4
    changed = max(together, key=lambda piece: piece[3] - piece[2])
    place = (changed[3] - changed[2]) // 2
    document = documents[changed[1]] = documents[changed[1]].copy()
    document[changed[2] + place] = (document[changed[2] + place] + 1) % 127
    rewrite_corpus(tmp_path / "after", documents)
    after = logits("after")
    assert before.keys() == after.keys()
    for piece, by_position in before.items():
        same = [torch.equal(value, after[piece][at]) for at, value in sorted(by_position.items())]
        if piece == changed:
            assert all(same[:place]) and not any(same[place:])  # and causal within the document
        else:
            assert all(same), piece
    assert np.any([piece != changed for piece in together])
