"""Through Megatron's own loop: documents in chunks train what the single process trains with whole ones."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from megatron_combinations import (
    BY_DOCUMENT_ALONE,
    CHUNKS,
    CP,
    CP2,
    EP,
    FOUR,
    FP8_DELAYED,
    FULL,
    MOE,
    OVERLAPS,
    PP,
    PP2,
    RECOMPUTE,
    REHEARSED,
    SP,
    TP,
    VPP,
    WHOLE,
)
from megatron_runs import check_alike, flags, launch, numbers, train, write_corpus

from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plugin.flags.versions import megatron_version

pytestmark = pytest.mark.megatron

ITERATIONS = 3
TRAINED = f"--global-batch-size 8 --train-iters {ITERATIONS} --wlb-max-delay 0"
SELECTIVE = "--recompute-granularity selective --wlb-regather-keys"
WINDOWS = "--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable"
MLA = """--multi-latent-attention --no-rope-fusion --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 4 --v-head-dim 8"""
PP4_OF_2 = f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"
ROWS = {
    "PP2": (2, PP2, ""),
    "PP4": (4, f"{PP} 4", FOUR),
    "PP2xCP2": (4, f"{PP2} {CP2}", ""),
    "TP2xPP2+SP": (4, f"{PP2} {SP}", ""),
    "DP2xPP2, overlaps": (4, f"{PP2} {OVERLAPS}", ""),
    "PP2, full recompute, routers' losses by document": (2, f"{PP2} {FULL}", BY_DOCUMENT_ALONE),
    "PP2xCP2, selective recompute, keys sent again": (4, f"{PP2} {CP2} {SELECTIVE}", ""),
    "PP2xCP2, windows, sinks": (4, f"{PP2} {CP2}", WINDOWS),
    "PP2, MLA": (2, PP2, MLA),
    "DP2xCP2 on one stage, overlaps": (4, f"{CP2} {OVERLAPS}", ""),
    "DP2xPP2, FP8 delayed: the largest values of all ranks": (4, PP2, FP8_DELAYED),
    "PP2, FP8 delayed, full recompute: each micro-batch's scales": (2, f"{PP2} {FULL}", FP8_DELAYED),
    "EP2xPP2, ranks that share experts in step, routers' losses by document": (
        *(4, f"{PP2} {EP}", BY_DOCUMENT_ALONE),
    ),
    "PP2 of 2 chunks, CP2, full recompute": (4, f"{VPP} {CP2} {FULL}", FOUR),
    "PP4 of 2 chunks, no p2p overlap": (4, PP4_OF_2, "--num-layers 8"),
    "DP2, PP2 of 2 chunks, overlaps, transfers beside": (
        *(4, f"{VPP} {OVERLAPS} --overlap-p2p-communication-warmup-flush", FOUR),
    ),
    "PP2xCP2, MTP of 2": (4, f"{PP2} {CP2}", "--mtp-num-layers 2"),
    "PP2 of 2 chunks, MTP of 2 in one layer, full recompute": (
        *(2, f"{VPP} {FULL}", f"{FOUR} --mtp-num-layers 2 --mtp-use-repeated-layer"),
    ),
    "EP2, PP2 of 2 chunks, routers' losses by document, MTP": (
        *(4, f"{VPP} {EP}", f"{FOUR} {BY_DOCUMENT_ALONE} --mtp-num-layers 1"),
    ),
}


def run(corpus: Path, out: Path, processes: int, more: str, **environment: str) -> list[dict[str, Any]]:
    return train(flags(f"--data-path {corpus}", TRAINED, more), processes, out, **environment)


def chunks_of_a_document(ranks: list[dict[str, Any]]) -> int:
    """The most pieces in which one document came, over the first rank's iterations."""
    most = 0
    for iteration in range(ITERATIONS):
        micro_batches = {number: pieces for at, number, pieces, _ in ranks[0]["documents"] if at == iteration}
        pieces = [p for pieces in micro_batches.values() for p in pieces if p[1] >= 0]
        names = [tuple(piece[:2]) for piece in pieces]
        most = max(most, *(names.count(name) for name in names))
    return most


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_gradients_equal_the_single_process(name, corpus, single, tmp_path):
    processes, layout, model = ROWS[name]
    ranks = run(corpus, tmp_path, processes, f"{layout} {model} {CHUNKS}")
    assert chunks_of_a_document(ranks) >= 2
    check_alike(single(TRAINED, model, WHOLE), ranks, ITERATIONS, numbers(ranks))
    last = max(rank["place"]["pp"] for rank in ranks)
    for rank in ranks:
        # As many deferred losses as losses; hidden states and logits go with their micro-batch.
        assert len(rank["kept"]) - ITERATIONS == (len(rank["losses"]) if rank["place"]["pp"] == last else 0)
        assert not any(rank["kept"])
        assert set(rank["waits"]) == {False}  # the host does not wait for the device after a transfer


@pytest.mark.skipif(megatron_version() < "0.19", reason="its check for GPUs cannot be replaced")
def test_offloaded_activations_come_back_in_the_order_of_the_backwards(corpus, single, tmp_path):
    ranks = run(corpus, tmp_path, 2, f"{FOUR} {PP2} {CHUNKS}", WORKER_OFFLOADS="1")
    assert chunks_of_a_document(ranks) >= 2
    check_alike(single(TRAINED, FOUR, WHOLE), ranks, ITERATIONS, numbers(ranks))
    for rank in ranks:
        groups: list[list[int]] = []
        documents: set[Any] = set()
        for _, number, pieces, _ in rank["documents"]:
            held = {tuple(piece[:2]) for piece in pieces if piece[1] >= 0}
            if number and held & documents:
                groups[-1].insert(0, number)
            else:
                groups.append([number])
            documents = held
        order = [at for group in groups for at in group]
        assert [at for at, _ in itertools.groupby(rank["reloads"])] == order


@pytest.mark.parametrize("what", ["class", "hook"])
def test_a_model_that_changes_its_losses_trains_with_them(what, corpus, tmp_path):
    """Its losses stay in the forward: a deferred loss would come after the change."""
    whole = run(corpus, tmp_path / "whole", 1, WHOLE, WORKER_DOUBLES="class")
    chunks = run(corpus, tmp_path / "chunks", 1, CHUNKS, WORKER_DOUBLES=what)
    assert chunks_of_a_document(chunks) >= 2
    check_alike(whole, chunks, ITERATIONS, numbers(chunks))


@pytest.mark.parametrize("what", ["patch", "patch in place"])
def test_a_change_of_losses_that_was_not_seen_beforehand_ends_the_job_with_a_line(what, corpus, tmp_path):
    """Lost with the change, every loss was 0, and the first stage waited for gradients that never came."""
    arguments = flags(f"--data-path {corpus}", TRAINED, PP2, CHUNKS)
    done = launch(arguments, 2, out=tmp_path / "out", timeout=60, WORKER_DOUBLES=what)
    assert done.returncode == 1
    changed = "the model's output was changed after its forward"
    lines = [line for line in done.stderr.splitlines() if changed in line]
    assert lines and all("error: rank 1 on " in line and "--wlb-chunks off" in line for line in lines)


@pytest.mark.parametrize("layout", [PP2, VPP])
def test_a_document_of_four_windows_trains_whole_as_in_a_window_of_its_length(layout, tmp_path):
    """Windows of 64 on two stages, after a rehearsal with keys of such a document, against windows of 256 on one."""
    corpus, log, traced = tmp_path / "long", tmp_path / "log.jsonl", tmp_path / "trace.json"
    write_corpus(corpus, [30, 256, 64, 5, 300, 17, 130, 61, 200, 44])
    base = f"--data-path {corpus} --train-iters {ITERATIONS} --wlb-quadratic-at 80 {FOUR}"
    whole = "--seq-length 256 --max-position-embeddings 256 --global-batch-size 1 --wlb-chunks off --wlb-max-delay 0"
    alone = train(flags(base, whole, "--wlb-max-tokens 1024"), 1, tmp_path / "single")
    chunks = f"{layout} --max-position-embeddings 512 --global-batch-size 4 --wlb-overlong chunk"
    chunks += " --wlb-micro-batch-cost 2 --wlb-rehearsal always"
    reports = f"--wlb-log {log} --wlb-trace {traced} --wlb-trace-iteration 2"
    ranks = train(flags(base, chunks, reports), 2, tmp_path / "ranks")
    trained = [[entry[0], *piece] for entry in alone[0]["documents"] for piece in entry[2]]
    assert 256 in {end - start for _, _, _, start, end in trained}
    assert chunks_of_a_document(ranks) >= 6
    check_alike(alone, ranks, ITERATIONS, numbers(ranks))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    check_log_and_trace(lines, json.loads(traced.read_text()), ranks[0]["documents"])


def check_log_and_trace(
    lines: list[dict[str, Any]], trace: dict[str, Any], documents: list[tuple[Any, ...]]
) -> None:
    for number, line in enumerate(lines):
        micro_batches = {index: pieces for at, index, pieces, _ in documents if at == number}
        pieces = Counter(piece[1] for pieces in micro_batches.values() for piece in pieces)
        chunks = {document: count for document, count in pieces.items() if document >= 0 and count > 1}
        assert (line["documents_in_chunks"], line["chunks"]) == (len(chunks), sum(chunks.values()))
        assert line["documents"] == len([document for document in pieces if document >= 0])
        assert line["longest_group"] == max(line["chunk_groups"]) == max(chunks.values())
        assert len(line["chunks_of"]) == line["micro_batches"] == sum(line["chunk_groups"])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in events:
        document = event["args"].get("document_in_chunks", -1)
        assert document == lines[1]["chunks_of"][event["args"]["micro_batch"]]
        assert ("(" in event["name"]) == (document >= 0)
    letters = {e["args"]["document_in_chunks"]: e["name"][-3:] for e in events if "(" in e["name"]}
    assert len({*letters.values()}) == len(letters) == len(trace["otherData"]["legend"]) >= 1


# As many micro-batches as the plan wants.


FREE_ITERATIONS = 4
EXPERTS = MOE.replace("aux_loss --moe-aux-loss-coeff 0.01", "none")
FREE_ROWS = {
    "PP2": (2, PP2, "", 2),
    "PP2xCP2": (4, f"{PP2} --context-parallel-size 2", "", 2),
    "PP2xVPP2, an odd number of windows": (2, f"{VPP} {REHEARSED}", f"{FOUR} --global-batch-size 7", 4),
    "DP2xPP2": (4, PP2, "", 7),
    "EP2xPP2": (4, f"{PP2} --expert-model-parallel-size 2", EXPERTS, 7),
}
"""Processes, layout, model, and what a micro-batch costs by itself (tokens), so that their number changes."""
FREE_TRAINED = f"--global-batch-size 8 --train-iters {FREE_ITERATIONS} --wlb-max-delay 0 --wlb-max-tokens 256"
FREE = "--wlb-micro-batches-per-window auto --wlb-quadratic-at 80 --wlb-micro-batch-cost"


@pytest.mark.parametrize("name", FREE_ROWS)
def test_as_many_micro_batches_as_the_plan_wants_train_what_one_a_window_trains(
    name, corpus, single, tmp_path
):
    """Nothing is delayed, so that an iteration trains the same documents whatever the pipeline."""
    processes, layout, model, cost = FREE_ROWS[name]
    arguments = flags(f"--data-path {corpus}", FREE_TRAINED, model, f"{layout} {FREE} {cost}")
    ranks = train(arguments, processes, tmp_path)
    counts = numbers(ranks)
    check_alike(single(FREE_TRAINED, model), ranks, FREE_ITERATIONS, counts)
    assert max(counts) > (7 if "VPP" in name else 8 // (2 if name in ("DP2xPP2", "EP2xPP2") else 1))
    if "VPP" in name:
        assert all(number % 2 == 0 for number in counts)
    else:
        assert len(set(counts)) > 1, f"{counts}: the number never changes"


# Steps in groups of micro-batches, backwards last first.


GROUPS = {
    "PP4, full recompute": (4, f"{PP} 4 {RECOMPUTE} uniform", "1,3,2"),
    "PP2xCP2, selective recompute": (4, f"{PP} 2 {CP} 2 --recompute-granularity selective", "6"),
    "TP2xPP2, sequence parallel": (4, f"{TP} 2 {PP} 2 --sequence-parallel", "4,2"),
    "DP2xPP2, distributed optimizer, overlaps": (4, f"{PP} 2 {OVERLAPS}", "1,2;3"),
    "DP2, distributed optimizer, overlaps": (2, OVERLAPS, "1,2;2,1"),
    "one stage": (1, "", "2,1,3"),
}
GROUPED = f"{FOUR} --global-batch-size 6 --train-iters {ITERATIONS}"


@pytest.mark.parametrize("layout", GROUPS)
def test_a_step_in_groups_equals_the_single_process_and_is_traced_as_it_ran(layout, corpus, single, tmp_path):
    processes, extra, sizes = GROUPS[layout]
    traced = tmp_path / "trace.json"
    reported = f"--wlb-trace {traced} --wlb-trace-iteration 2"
    arguments = flags(f"--data-path {corpus}", GROUPED, extra, reported)
    ranks = train(arguments, processes, tmp_path, WORKER_GROUPS=sizes)
    check_alike(single(GROUPED), ranks, ITERATIONS)
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    for data, text in enumerate(sizes.split(";")):
        first, *others = map(int, text.split(","))  # of the first iteration
        orders = grouped_orders(max(rank["place"]["pp"] for rank in ranks) + 1, [*others, first])
        mine = [event for event in events if event["pid"] == data]
        rows = sorted({event["tid"] for event in mine})  # stage by stage, the ranks of each
        for at, row in enumerate(rows):
            ran = sorted((event["ts"], event["name"]) for event in mine if event["tid"] == row)
            order = orders[at * len(orders) // len(rows)]
            planned = ["FB"[step.backward] + str(step.micro_batch) for step in order]
            assert [name for _, name in ran] == planned
