"""Plans with documents in chunks, or with a chosen number of micro-batches: tokens, prefixes, groups, limits, times."""

import re
from collections import defaultdict
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import (
    COST,
    check_promises,
    delays,
    long_run,
    make_planner,
    micro_batches,
    resumed,
    run,
    time_per_token,
    token_counts,
    trained,
)
from test_packing_plans import WINDOW, document_lengths, sizes

from scripts.reproduce.compare import in_flight
from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Rules
from wlb_megatron.documents.lengths import long_tailed
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import ChunkPacker, chunk_counts, cut
from wlb_megatron.packing.factory import plan_job
from wlb_megatron.packing.packer import PackingJob, read_per_window
from wlb_megatron.packing.varlen import arrange
from wlb_megatron.packing.varlen.items import Item
from wlb_megatron.packing.varlen.varlen_packer import VarlenPacker
from wlb_megatron.pipeline.orders import documents_in_chunks, grouped_orders, groups
from wlb_megatron.pipeline.step_law import FACTORS, StepLaw, most_held
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece, Summariser
from wlb_megatron.workload.cost_model import UNITS_PER_TOKEN, CostModel

WINDOW_OF_LAW = 32_768


SIZES = sizes(micro_batches_per_window=st.sampled_from(["auto", "1", "2", "4"]), chunks=st.just("on"))


@st.composite
def beyond(draw: st.DrawFn, longest: int) -> list[int]:
    """Lengths up to several windows, of which some documents have all."""
    lengths = draw(document_lengths()) + draw(st.lists(st.integers(WINDOW, longest), max_size=8))
    return draw(st.permutations([*lengths, longest]))


def columns(plan: IterationPlan) -> list[tuple[MicroBatch, ...]]:
    return list(zip(*plan.micro_batches, strict=True))


def work_of(piece: Piece, cost: CostModel) -> int:
    """By the cost model's formula: the document's up to the piece's end less that up to its start."""
    at = cost.quadratic_at
    begin, end = piece.prefix, piece.prefix + piece.tokens
    return round((piece.tokens + (end * end - begin * begin) / at + cost.per_document) * UNITS_PER_TOKEN)


@settings(max_examples=80, deadline=None)
@given(document_lengths(), SIZES, st.booleans(), st.sampled_from([None, 1, 2, 3, 5, 7, 10]))
def test_every_token_trains_once_with_all_that_it_attends_to_before_it(lengths, size, endless, most):
    if lengths or not endless:
        check_chunks(lengths, size | {"max_tokens": most}, endless, most or WINDOW * 3 // 4)


def test_a_document_of_two_tokens_trains_though_chunks_of_three_need_all_other_micro_batches():
    lengths, cost = [2, 11, 15], CostModel(16.0, 0.0, 100.0)
    job = {"window": 16, "micro_batches": 1, "pp": 2, "chunks": "on", "micro_batches_per_window": "auto"}
    (plan,) = run(make_planner(lengths, **job, max_tokens=3, cost=cost))
    assert len(plan.arrived) == 3 and not plan.waiting
    assert {p.document for column in columns(plan) for m in column for p in m.pieces} == {0, 1, 2}


@pytest.mark.parametrize("share", [0.1, 0.15, 0.2, 0.3])
def test_no_document_of_143_random_corpora_waits_where_lmax_is_this_share_of_a_window(share):
    for seed in range(143):
        dice = np.random.default_rng([9, seed])
        window = int(dice.choice([14, 20, 40]))
        most = int(window * share)
        usual = [1, most // 2 + 1, most, window // 2, window - 1, window]
        lengths = dice.choice(usual, dice.integers(3, 20), p=[0.2, 0.3, 0.2, 0.1, 0.1, 0.1]).tolist()
        cost = CostModel(window * float(dice.choice([0.02, 0.2, 1])), 0.5, float(dice.choice([0, 100])))
        size = {"window": window, "max_tokens": most, "micro_batches_per_window": "auto", "chunks": "on"}
        size |= {"micro_batches": int(dice.integers(1, 3)), "dp": int(dice.integers(1, 5)), "cost": cost}
        size |= {"pp": int(dice.integers(2, 5)), "max_documents": int(dice.choice([1, 3, 4096]))}
        check_chunks(lengths, size, endless=True, capacity=most, iterations=3)


@settings(max_examples=40, deadline=None)
@given(st.data(), SIZES, st.booleans(), st.sampled_from([None, 4, 9]))
def test_documents_of_all_of_a_ranks_share_train_whole_in_one_iteration(data, size, endless, most):
    size["micro_batches"] = min(3, size["micro_batches"])
    longest = WINDOW * size["micro_batches"]
    lengths = data.draw(beyond(longest))
    how = {"overlong": "chunk", "longest": longest, "chunks": "on", "max_tokens": most}
    check_chunks(lengths, size | how, endless, most or WINDOW * 3 // 4)


def check_chunks(
    lengths: list[int], size: dict[str, Any], endless: bool, capacity: int, iterations: int = 12
) -> None:
    plans = run(make_planner(lengths, **size, endless=endless), most=iterations if endless else 10_000)
    arrived: list[Piece] = []
    done: list[Piece] = []
    for plan in plans:
        assert not plan.waiting, "a document is delayed"
        arrived += plan.arrived
        for column in columns(plan):
            groups([micro_batch.pieces for micro_batch in column])  # refuses chunks that are not adjacent
            held: dict[tuple[int, int], int] = defaultdict(int)
            for micro_batch in column:
                too_few_tokens = sum(micro_batch.tokens for micro_batch in column) < len(column)
                ended = not endless and plan is plans[-1]
                assert micro_batch.pieces or ended or too_few_tokens or "longest" in size
                assert micro_batch.tokens <= capacity
                assert len(micro_batch.pieces) <= size["max_documents"]
                works = sum(work_of(piece, size.get("cost", COST)) for piece in micro_batch.pieces)
                assert micro_batch.work == pytest.approx(works, abs=8)
                for piece in micro_batch.pieces:
                    # In order, on one rank, in one iteration: the prefix is what came before, from the first token on.
                    assert piece.prefix == held[piece.epoch, piece.document] == piece.start
                    assert piece.tokens > 0
                for piece in micro_batch.pieces:
                    held[piece.epoch, piece.document] += piece.tokens
            for (_, document), tokens in held.items():
                assert tokens == lengths[document]
            done += [piece for member in column for piece in member.pieces]
    assert token_counts(arrived) == token_counts(done)


@settings(max_examples=100, deadline=None)
@given(document_lengths().filter(bool), SIZES)
def test_a_group_has_one_document_in_chunks_so_groups_are_not_chained(lengths, size):
    for plan in run(make_planner(lengths, **size, endless=True), most=8):
        for column in columns(plan):
            at = 0
            for count in groups([micro_batch.pieces for micro_batch in column]):
                pieces = [piece for micro_batch in column[at : at + count] for piece in micro_batch.pieces]
                documents = [(piece.epoch, piece.document) for piece in pieces]
                assert len({name for name in documents if documents.count(name) > 1}) <= 1
                at += count


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5000), st.integers(2, 9), st.sampled_from([8.0, 500.0, 24576.0]))
def test_chunks_are_of_like_work_and_tile_the_document(tokens, number, at):
    number = min(number, tokens)
    cost = CostModel(at, 3.0)
    item = Item(int(cost.work([tokens])[0]), tokens, 0, 0, Piece(0, 7, 100, 100 + tokens))
    chunks = cut(item, number, cost)
    assert [chunk.piece.prefix for chunk in chunks] == [chunk.piece.start - 100 for chunk in chunks]
    assert [chunk.piece.start for chunk in chunks[1:]] == [chunk.piece.end for chunk in chunks[:-1]]
    assert (chunks[0].piece.start, chunks[-1].piece.end, len(chunks)) == (100, 100 + tokens, number)
    assert all(chunk.tokens > 0 for chunk in chunks)
    assert sum(chunk.work for chunk in chunks) == item.work + (number - 1) * 3 * UNITS_PER_TOKEN
    last = (1 + 2 * tokens / at) * UNITS_PER_TOKEN  # of the last token: chunks end at whole tokens
    even = item.work / number
    if tokens > 4 * number:
        assert all(abs(chunk.work - even) <= 2 * last + 6 * UNITS_PER_TOKEN for chunk in chunks)


def test_a_summary_counts_documents_once_and_their_chunks():
    piece = partial(Piece, 0)
    rows = [[piece(7, 0, 4), piece(1, 0, 2)], [piece(7, 4, 6, 4)], [piece(7, 6, 7, 6), piece(2, 0, 3)]]
    other = [[piece(8, 16, 20)], [piece(8, 20, 22, 4)], [piece(3, 0, 9)]]
    grid = tuple((MicroBatch(tuple(a), 5), MicroBatch(tuple(b), 5)) for a, b in zip(rows, other, strict=True))
    arrived = tuple(
        piece(d, start, end) for d, start, end in ((7, 0, 7), (1, 0, 2), (2, 0, 3), (8, 16, 22), (3, 0, 9))
    )
    summary = Summariser().summarise(IterationPlan(4, arrived, grid, ()))
    assert (summary.documents, summary.documents_in_chunks) == (5, 2)
    assert (summary.chunks, summary.longest_group) == (5, 3)
    assert (summary.tokens, summary.delayed, summary.work) == (27, 0, 6 * 5 / 1024)
    assert documents_in_chunks(rows) == [7, 7, 7] and documents_in_chunks(other) == [8, 8, -1]


def test_documents_give_up_chunks_where_there_are_too_many_and_take_more_where_there_are_too_few():
    assert sorted(chunk_counts([100, 100, 100], [9, 9, 9], 4, 100)) == [1, 1, 2]
    assert sum(chunk_counts([100], [9], 4, 100)) == 4
    assert chunk_counts([100, 1], [90, 1], 2, 30).tolist() == [3, 1], "a micro-batch's tokens ask for three"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 5), st.data())
def test_tokens_held_at_once_are_those_of_the_schedules_order(sizes, stages, data):
    count = sum(sizes)
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    expected = in_flight(grouped_orders(stages, sizes), tokens)[0]
    assert most_held(tokens, sizes, StepLaw(pp=stages)) == expected


def test_a_long_tailed_corpus_gains_half_over_arrival_order_on_four_stages_with_nothing_delayed():
    plain = long_run(50, packing="original", micro_batches_per_window="auto")
    cut = long_run(50, chunks="on", micro_batches_per_window="auto")

    # By brute force, which knows no groups, whose step is never shorter.
    assert time_per_token(plain, 4, 1000) / time_per_token(cut, 4, 1000) >= 1.4
    assert max(batch.tokens for plan in cut for batch in micro_batches(plan)) <= 0.8 * 131072
    assert all(not plan.waiting for plan in cut)
    assert sum(plan.predicted for plan in cut) <= 1.2 * sum(plan.ideal for plan in cut)
    for plan in cut:  # the tokens in flight are about a window a stage
        for column in columns(plan):
            held = most_held([m.tokens for m in column], groups([m.pieces for m in column]), StepLaw(pp=4))
            assert held <= 4 * 131072 * 1.1


def chosen(**how: Any) -> tuple[type, list[str]]:
    lines: list[str] = []
    job = {"window": 131072, "micro_batches": 4, "pp": 4, "cost": CostModel(24576.0, 0.0, 1000.0)}
    job |= {"sample": long_tailed(131072)[:20_000].tolist(), "micro_batches_per_window": "auto"}
    return type(make_planner([1], **job | how, say=lines.append).packer), lines


def test_the_chosen_number_of_micro_batches_is_as_good_as_any_though_not_all_are_filled():
    lengths = long_tailed(WINDOW_OF_LAW, 20_000).tolist()
    steps = {}
    job = {"window": WINDOW_OF_LAW, "micro_batches": 4, "pp": 4, "cost": CostModel(8_000.0, 100.0, 1_000.0)}
    for asked in ("auto", "1", "1.5", "2", "3", "4", "6", "8"):
        planner = make_planner(lengths, **job, endless=True, chunks="on", micro_batches_per_window=asked)
        steps[asked] = [plan.predicted for plan in islice(iter(planner.next_iteration, None), 12)]
    auto = steps.pop("auto")
    assert sum(auto) <= 1.003 * sum(map(min, zip(*steps.values(), strict=True)))


def test_a_step_of_many_windows_has_no_more_micro_batches_than_are_tried_for_each():
    """Where every number holds more at once than it should, one with a micro-batch for each document held least, and
    was taken: up to 290 of them for 16 windows, 23 % more computing than the others have."""
    rules = Rules(131072, "split", 1234, endless=True)
    stream = DocumentStream.of_lengths(long_tailed(131072)[:20_000], rules, name="lengths")
    cost = CostModel(24576.0, 0.0, 1000.0)
    job = {"window": 131072, "micro_batches": 16, "pp": 4, "alignment": 4}
    planner = plan_job(stream, PackingJob(WlbConfig(chunks="on"), cost, **job))
    counts = [len(plan.micro_batches) for plan in islice(iter(planner.next_iteration, None), 12)]
    assert max(counts) <= 8 * 16


@pytest.mark.usefixtures("quick_thresholds")
def test_auto_takes_chunks_where_they_are_predicted_to_pay_and_says_why():
    kind, lines = chosen()
    assert kind is ChunkPacker and "yes (predicted: 1." in lines[0]
    kind, lines = chosen(vpp=2)
    assert kind is ChunkPacker and "yes (predicted: 1." in lines[0]
    kind, lines = chosen(pp=1)
    assert kind is VarlenPacker and "no pipeline" in lines[0]
    kind, lines = chosen(sample=[900] * 1000)
    assert kind is VarlenPacker, "short documents balance whole"
    kind, lines = chosen(no_chunks=[("--flag", "drop it")])
    assert kind is VarlenPacker
    assert re.search(r"not with --flag; chunks would shorten the predicted step by [1-9]\d?%", lines[0])
    _, lines = chosen(no_chunks=[("--flag", "drop it")], sample=[900] * 1000)
    assert lines[0].endswith("not with --flag; chunks would bring nothing)")
    kind, lines = chosen(max_delay=3, thresholds="none")
    assert kind is VarlenPacker and "not with --wlb-max-delay 3" in lines[0], "a given delay acts"
    kind, lines = chosen(max_delay=0, thresholds="49152")
    assert kind is ChunkPacker and "--wlb-thresholds 49152 is not used" in lines[1]


def test_micro_batches_too_short_for_whole_documents_make_auto_take_chunks_where_no_flag_keeps_them_out():
    kind, lines = chosen(pp=1, max_tokens=131072)
    assert kind is ChunkPacker and "131,072 tokens do not hold whole documents" in lines[0]
    with pytest.raises(WlbError, match=r"below 1\.25 windows.*--wlb-chunks on"):
        chosen(max_tokens=131072, no_chunks=[("--flag", "drop it")])
    with pytest.raises(WlbError, match="more than 64 micro-batches: set it to 2048 or more"):
        chosen(max_tokens=2000)
    # Those that are asked for are refused by the flag that keeps them out.
    with pytest.raises(WlbError, match="--wlb-chunks on cannot be combined with --flag: drop it"):
        chosen(chunks="on", no_chunks=[("--flag", "drop it")])
    with pytest.raises(WlbError, match="needs --wlb-packing varlen"):
        chosen(chunks="on", packing="original")
    _, (line,) = chosen(packing="original")
    assert line.startswith("documents in chunks: no (not with --wlb-packing original; ")


SIZES_OF_WHOLE = sizes(
    pp=st.sampled_from([2, 4]),
    max_tokens=st.integers(WINDOW * 5 // 4, 2 * WINDOW),
    max_delay=st.integers(0, 6),
    thresholds=st.sampled_from(["none", "12", "6,13,24"]),
    micro_batches_per_window=st.sampled_from(["auto", "1", "1.5", "2", "4", "8"]),
)

SPREAD = [(37 * at) % WINDOW + 1 for at in range(60)]
TWO = {"window": WINDOW, "micro_batches": 2}


@settings(max_examples=80, deadline=None)
@given(document_lengths(), SIZES_OF_WHOLE, st.booleans())
def test_every_token_trains_once_uncut_within_its_limits_and_its_bound_on_delay(lengths, size, endless):
    if endless and not lengths:
        return
    plans = run(make_planner(lengths, **size, endless=endless), most=12 if endless else 10_000)
    check_promises(plans, size["max_tokens"], most_documents=size["max_documents"], finite=not endless)
    assert max(delays(plans).values(), default=0) <= size["max_delay"]
    for plan in plans:
        assert len({len(row) for row in plan.micro_batches}) == 1, "ranks have unlike numbers of them"
        windows = size["micro_batches"]
        assert len(plan.micro_batches) in {-(-round(f * windows * 100) // 100) for f in (*FACTORS, 64)}


@pytest.mark.parametrize("kind", [SIZES_OF_WHOLE, SIZES], ids=["whole documents", "documents in chunks"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=document_lengths().filter(bool), stop=st.integers(1, 8))
def test_a_resumed_run_plans_what_the_first_would_have(kind, data, lengths, stop):
    size = data.draw(kind)
    first, second = (make_planner(lengths, **size, endless=True) for _ in range(2))
    run(first, most=stop)
    assert run(resumed(first, second), most=6) == run(first, most=6)


@settings(max_examples=60, deadline=None)
@given(document_lengths().filter(bool), SIZES_OF_WHOLE)
def test_no_more_tokens_are_held_at_once_than_with_one_micro_batch_a_window(lengths, size):
    planner = make_planner(lengths, **size, endless=True)
    allowed = min(size["micro_batches"], size["pp"]) * size["max_tokens"]
    for plan in run(planner, most=8):
        assert arrange.most_in_flight(plan.micro_batches, planner.packer.law) <= allowed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"micro_batches_per_window": "1"}, {"micro_batches_per_window": "auto"}),
        ({"micro_batches_per_window": "auto"}, {"micro_batches_per_window": "1"}),
        ({"chunks": "on"}, {"chunks": "off"}),
        ({"chunks": "off"}, {"chunks": "on"}),
    ],
    ids=lambda how: " ".join(*how.items()),
)
def test_a_run_may_be_resumed_with_another_number_of_micro_batches_or_kind_of_packer(before, after):
    """States say nothing of them."""
    job = {"window": WINDOW, "micro_batches": 4, "pp": 4, "thresholds": "12", "endless": True}
    first, second = (make_planner(SPREAD, **job, **how) for how in (before, after))
    done = run(first, most=5)
    done += run(resumed(first, second), most=5)
    pieces = [piece for plan in done for piece in trained(plan)] + list(done[-1].waiting)
    arrived = [piece for plan in done for piece in plan.arrived]
    assert token_counts(pieces) == token_counts(arrived)
    assert "chunks" in before or sorted(pieces) == sorted(arrived)


def over_ideal(plans: list[IterationPlan]) -> float:
    """At equal work: what waits at the end of so few iterations is not the same in both."""
    return sum(plan.predicted for plan in plans) / sum(plan.ideal for plan in plans)


def test_a_long_tailed_corpus_gains_a_third_over_arrival_order_on_four_stages():
    """One micro-batch a window gains 6 %: the bubble is the same, however even the micro-batches are."""
    plain = time_per_token(long_run(60, packing="original"), 4, 1000)
    single, auto = (long_run(60, micro_batches_per_window=number) for number in ("1", "auto"))
    assert plain / time_per_token(auto, 4, 1000) >= 1.25
    assert time_per_token(single, 4, 1000) / time_per_token(auto, 4, 1000) >= 1.2
    assert max(delays(auto).values()) <= 16


def test_many_windows_a_step_are_not_slower_than_one_micro_batch_each():
    single, auto = (long_run(20, micro_batches=32, micro_batches_per_window=n) for n in ("1", "auto"))
    assert over_ideal(auto) <= 1.01 * over_ideal(single)


def test_without_a_pipeline_there_is_one_micro_batch_a_window_and_on_one_pieces_stay_whole():
    one, auto = (run(make_planner(SPREAD, **TWO, micro_batches_per_window=n)) for n in ("1", "auto"))
    assert one == auto
    lengths = [WINDOW, 3, WINDOW - 1, 5, 7, 2] * 4
    plans = run(make_planner(lengths, **TWO, pp=4, micro_batches_per_window="auto"))
    assert sorted(piece for plan in plans for piece in trained(plan)) == [
        Piece(0, at, 0, tokens) for at, tokens in enumerate(lengths)
    ]


def test_what_a_micro_batch_costs_by_itself_keeps_their_number_down():
    for own, *least in (0.0, 0.0, 0.0), (1e4, 0.0, 0.0), (0.0, 1e4, 0.0), (0.0, 0.0, 1e4):
        job = TWO | {"pp": 4, "cost": CostModel(8.0, 0.0, own, tuple(least))}
        plans = run(make_planner(SPREAD, **job, micro_batches_per_window="auto"))
        assert (max(len(plan.micro_batches) for plan in plans) > 2) == (not own + sum(least))


@pytest.mark.parametrize("wrong", ["0", "0.5", "two", "nan", "65", "-1"])
def test_a_wrong_number_of_micro_batches_is_refused_by_its_flag(wrong):
    with pytest.raises(WlbError, match="--wlb-micro-batches-per-window"):
        read_per_window(wrong)
    with pytest.raises(WlbError, match="--wlb-micro-batches-per-window 2 needs --wlb-packing varlen"):
        make_planner([4], window=8, micro_batches=1, packing="original", micro_batches_per_window="2")
