"""Faults reported against packers elsewhere, each as the small case that shows it."""

import heapq
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import (
    QUICK_PACKINGS,
    check_promises,
    delays,
    items_of,
    make_job,
    make_planner,
    micro_batches,
    run,
    trained,
)

from scripts.lengths import lognormal, paper_like
from scripts.reproduce.solver import BatchesPlanner, FixedSolverPacker
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.packer import decode, encode
from wlb_megatron.packing.varlen.items import Bins, Item
from wlb_megatron.plan import Piece, Waiting
from wlb_megatron.sharding.slots import padding
from wlb_megatron.workload.cost_model import CostModel


def plan_stream(
    lengths: list[int], window: int, *, overlong: str = "split", **settings: object
) -> list[list[Piece]]:
    """Pieces trained in each iteration, through the project's own document stream."""
    stream = DocumentStream.of_lengths(lengths, Rules(window, overlong))
    job = {"window": window, "micro_batches": 1, "micro_batches_per_window": "auto"} | settings
    return [trained(plan) for plan in run(make_planner(stream, **job))]


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_documents_without_tokens_reach_no_plan_and_those_of_one_are_packed(packing):
    rows = plan_stream([0, 1, 0, 2], 8, packing=packing)
    assert [piece for row in rows for piece in row] == [Piece(0, 1, 0, 1), Piece(0, 3, 0, 2)]
    (pieces,) = plan_stream([1] * 8, 8, packing=packing)
    assert len(pieces) == 8


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_eighty_thousand_tiny_documents_never_meet_in_one_launch(packing):
    job = {"window": 131_072, "micro_batches": 4, "packing": packing, "max_documents": 4096}
    planner = make_planner([16] * 80_000, **job)
    plans = run(planner)
    assert max(len(b.pieces) for plan in plans for b in micro_batches(plan)) == 4096
    assert sum(len(trained(plan)) for plan in plans) == 80_000
    assert max(len(plan.waiting) for plan in plans) < 80_000 // 2


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_running_totals_go_on_beyond_2_to_the_31(packing):
    planner = make_planner([5, 9, 16, 3] * 50, window=16, micro_batches=4, endless=True, packing=packing)
    run(planner, most=3)
    state = json.loads(json.dumps(planner.state()))
    shift = (2**31 + 5) // 64 + 1
    state["iteration"] += shift
    state["samples"] += shift * 4
    state["taken"] += shift * 64
    kept = state["packer"]
    kept["waiting"] = encode(Waiting(piece, entry + shift) for piece, entry in decode(kept["waiting"]))
    later = make_planner([5, 9, 16, 3] * 50, window=16, micro_batches=4, endless=True, packing=packing)
    later.load_state(state)
    assert later.taken > 2**31 + 5
    for plan, expected in zip(run(later, most=5), run(planner, most=5), strict=True):
        assert plan.iteration == expected.iteration + shift
        assert plan.micro_batches == expected.micro_batches


def test_a_micro_batch_is_full_by_its_own_count_of_tokens():
    # No document is padded: 12 of 9 tokens are 108, padded once to 112, the cap; a 13th would be too many.
    job = {"window": 88, "micro_batches": 1, "alignment": 8, "max_tokens": 112}
    planner = make_planner([9] * 13, **job, thresholds="none")
    plans = run(planner)
    assert [len(trained(plan)) for plan in plans] == [10, 3]
    bins = Bins(1, 112, 4096)
    assert len(bins.add_all([Item(9, 9, i, 0, Piece(0, i, 0, 9)) for i in range(13)])) == 1
    assert bins.tokens == [108]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 48), max_size=80), st.sampled_from([1, 2, 6, 8, 24]), st.integers(60, 130))
def test_a_micro_batch_padded_to_its_multiple_never_exceeds_the_cap(lengths, alignment, most):
    most = max(most, 60 + alignment)
    planner = make_planner(lengths, window=48, micro_batches=2, alignment=alignment, max_tokens=most)
    for plan in run(planner):
        for micro_batch in micro_batches(plan):
            assert micro_batch.tokens + padding(micro_batch.tokens, alignment) <= most


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [("split", [(0, 16), (16, 17), (0, 16)]), ("truncate", [(0, 16), (0, 16)]), ("drop", [(0, 16)])],
)
def test_a_document_of_the_window_is_taken_and_one_token_more_is_policy(overlong, expected):
    rows = plan_stream([17, 16], 16, overlong=overlong)
    assert sorted((p.start, p.end) for row in rows for p in row) == sorted(expected)


def test_documents_that_fill_a_micro_batch_alone_leave_none_empty():
    plans = run(make_planner([40, 40, 40] * 6, window=51, micro_batches=1, dp=2, max_tokens=64))
    check_promises(plans, 64, bins=2)


def test_documents_are_spread_evenly_over_micro_batches_and_too_few_leave_the_last_to_padding():
    (plan,) = run(make_planner([4] * 9, window=9, micro_batches=4, thresholds="none"))
    assert sorted(len(b.pieces) for b in micro_batches(plan)) == [2, 2, 2, 3]
    (plan,) = run(make_planner([4] * 3, window=8, micro_batches=4))
    assert sorted(len(b.pieces) for b in micro_batches(plan)) == [0, 1, 1, 1]
    assert [b.work for b in micro_batches(plan) if not b.pieces] == [0]


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_remainders_are_carried_on_rather_than_trained_in_a_short_micro_batch(packing):
    lengths = lognormal(10_000, seed=1, mean=900, max_tokens=8192)
    job = {"window": 8192, "micro_batches": 4, "packing": packing, "cost": CostModel(1e9)}
    plans = run(make_planner(lengths.tolist(), **job))
    fill = [b.tokens / 8192 for plan in plans[:-2] for b in micro_batches(plan)]
    assert np.mean(fill) >= 0.99
    if packing != "varlen":
        assert min(fill) == 1.0


def slow_fill(items: list[Item], count: int, capacity: int) -> tuple[list[int], list[int]]:
    """The paper's rule by looking at every bin for every item: (work, tokens) of each bin."""
    work, tokens = [0] * count, [0] * count
    for item in items:
        for loads in (work, tokens):
            at = loads.index(min(loads))
            if tokens[at] + item.tokens <= capacity:
                work[at] += item.work
                tokens[at] += item.tokens
                break
    return work, tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=120), st.integers(1, 9), st.integers(100, 400))
def test_filling_by_heaps_equals_looking_at_every_bin(lengths, count, capacity):
    items = items_of(lengths, CostModel(30))
    bins = Bins(count, capacity, 4096)
    bins.add_all(items)
    assert (bins.work, bins.tokens) == slow_fill(items, count, capacity)


def test_filling_takes_a_bounded_number_of_heap_steps_an_item(monkeypatch):
    # All above half of the capacity, the worst case of first-fit: a linear scan would look at 4,000 bins each.
    steps = 0

    def counted(heap: list, row: object) -> object:
        nonlocal steps
        steps += 1
        return replace(heap, row)

    replace = heapq.heapreplace
    monkeypatch.setattr(heapq, "heapreplace", counted)
    bins = Bins(4000, 100, 4096)
    bins.add_all(Item(60, 60, i, 0, Piece(0, i, 0, 60)) for i in range(8000))
    assert steps <= 3 * 8000


def test_packing_makes_no_curriculum_of_lengths():
    lengths = paper_like(40_000, seed=2).tolist()
    plans = run(make_planner(lengths, window=131072, micro_batches=4, cost=CostModel(24576)))[8:-8]
    mean = np.array([np.mean([p.tokens for p in trained(plan)]) for plan in plans])
    assert abs(np.corrcoef(mean[1:], mean[:-1])[0, 1]) < 0.25
    assert max(delays(plans).values()) <= 16


def test_ranks_are_even_in_sum_and_in_largest():
    job = {"window": 131072, "micro_batches": 4, "dp": 2, "pp": 4, "cost": CostModel(24576)}
    plans = run(make_planner(paper_like(20_000, seed=4).tolist(), **job))[4:-4]
    over_ranks, over_micro_batches = [], []
    for plan in plans:
        columns = [[b.work for b in column] for column in zip(*plan.micro_batches, strict=True)]
        sums = [sum(column) for column in columns]
        over_ranks.append(max(sums) / np.mean(sums))
        over_micro_batches.append(max(max(column) / np.mean(column) for column in columns))
    assert np.mean(over_ranks) < 1.01
    assert np.mean(over_micro_batches) < 1.05


def test_both_caps_hold_tokens_and_documents_whatever_balance_wants():
    # Short documents weigh little: evening the work alone would put far more tokens beside the long ones.
    lengths = ([4000] + [10] * 400) * 30
    plans = run(make_planner(lengths, window=4000, micro_batches=2, max_tokens=5000, cost=CostModel(100)))
    tokens = [b.tokens for plan in plans for b in micro_batches(plan)]
    assert max(tokens) <= 5000
    assert max(tokens) / np.mean(tokens) < 1.5


def test_work_is_not_tokens_and_many_tiny_documents_are_not_free():
    job = {"micro_batches": 2, "thresholds": "none"}
    (plan,) = run(make_planner([1024, *[512] * 4], window=1536, cost=CostModel(512), **job))
    assert sorted(sorted(p.tokens for p in b.pieces) for b in micro_batches(plan)) == [[512] * 3, [512, 1024]]
    # By tokens, 400 documents of 20 go beside one of 8000, none beside two; at a cost of 30 each, 119 do.
    cost = CostModel(quadratic_at=1e6, per_document=30)
    (plan,) = run(make_planner([8000] * 3 + [20] * 400, window=16000, cost=cost, **job))
    documents = sorted(len(b.pieces) for b in micro_batches(plan))
    assert documents == [121, 282]


def test_a_solver_that_does_not_count_documents_never_leaves_a_window_empty_or_too_full():
    job = make_job(window=8, micro_batches=2, cost=CostModel(4.0), max_documents=2)
    for seed in range(50, 60):
        lengths = np.random.default_rng(seed).integers(1, 3, 40)
        stream = DocumentStream.of_lengths(lengths, Rules(window=8, seed=seed, endless=True))
        packer = FixedSolverPacker(job, batches=2, seconds=0.05)
        planner = BatchesPlanner(stream, packer, global_tokens=16, batches=2)
        for _ in range(6):
            plan = planner.next_iteration()
            assert plan is not None
            assert all(1 <= len(m.pieces) <= 2 for row in plan.micro_batches for m in row)


def test_pieces_that_wait_are_saved_in_few_bytes_and_damage_is_told():
    pieces = [Waiting(Piece(3, 7 * i, i % 2, 500 + i), 2**31 + 5) for i in range(1000)]
    saved = encode(pieces)
    assert decode(saved) == pieces
    assert len(saved) < 8 * 1000
    assert decode(encode([])) == []
    with pytest.raises(ValueError, match="packing state is damaged"):
        decode(saved[:-8])


def warnings_and_share(lengths: list[int], window: int, **settings: Any) -> tuple[list[str], float]:
    """The warnings for these documents, and the share of the tokens asked for that trains in 40 iterations."""
    lines: list[str] = []
    job = {"window": window, "micro_batches": 4, "cost": CostModel(window * 0.7), "sample": lengths}
    job |= {"chunks": "off", "micro_batches_per_window": "auto", "say": lines.append} | settings
    planner = make_planner(lengths, endless=True, **job)
    for _ in range(40):
        planner.next_iteration()
    return [line for line in lines if line.startswith("WARNING")], planner.trained / (40 * 4 * window)


def test_documents_that_cannot_be_paired_under_lmax_are_told_at_start_and_either_cure_trains_all():
    (line,), share = warnings_and_share([262] * 60, 328)
    assert "about 80% of the tokens asked for" in line and "--wlb-max-tokens to 524 " in line
    assert share == pytest.approx(0.8, abs=0.01)
    for cure in ({"max_tokens": 524}, {"micro_batches_per_window": "1.5"}):
        warnings, share = warnings_and_share([262] * 60, 328, **cure)
        assert warnings == [] and share > 0.99
    for lengths in ([164] * 60, list(range(1, 329))):  # pairs fit; long ones beside short ones
        assert warnings_and_share(lengths, 328)[0] == []


@pytest.mark.parametrize("packing", QUICK_PACKINGS)
def test_tiny_documents_that_the_cap_leaves_out_are_told_and_do_not_pile_up(packing):
    (line,), share = warnings_and_share([1] * 50, 100, packing=packing, max_documents=5)
    assert "at most 5.0% of the tokens asked for" in line and "--wlb-max-documents to 101" in line
    assert share == 0.05
    planner = make_planner(
        [1] * 50, window=100, micro_batches=4, endless=True, packing=packing, max_documents=5, chunks="off"
    )
    for plan in run(planner, most=8):
        assert len(plan.arrived) <= 20 and not planner.put_back
    assert warnings_and_share([1] * 50, 100, packing=packing, max_documents=101)[0] == []
