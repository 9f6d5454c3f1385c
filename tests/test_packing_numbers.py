"""Plans that choose how many micro-batches they have: every token once, within all limits, by the predicted step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import (
    check_promises,
    delays,
    long_run,
    make_planner,
    resumed,
    run,
    time_per_token,
    token_counts,
    trained,
)
from test_packing_chunks import SIZES as SIZES_IN_CHUNKS
from test_packing_plans import WINDOW, document_lengths, sizes

from wlb_megatron.errors import WlbError
from wlb_megatron.packing.packer import read_per_window
from wlb_megatron.packing.varlen.arrange import most_held
from wlb_megatron.pipeline.step_law import FACTORS
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.workload.cost_model import CostModel

SIZES = sizes(
    pp=st.sampled_from([2, 4]),
    max_tokens=st.integers(WINDOW * 5 // 4, 2 * WINDOW),
    max_delay=st.integers(0, 6),
    thresholds=st.sampled_from(["none", "12", "6,13,24"]),
    micro_batches_per_window=st.sampled_from(["auto", "1", "1.5", "2", "4", "8"]),
)


SPREAD = [(37 * at) % WINDOW + 1 for at in range(60)]
TWO = {"window": WINDOW, "micro_batches": 2}


@settings(max_examples=80, deadline=None)
@given(document_lengths(), SIZES, st.booleans())
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


@pytest.mark.parametrize("kind", [SIZES, SIZES_IN_CHUNKS], ids=["whole documents", "documents in chunks"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=document_lengths().filter(bool), stop=st.integers(1, 8))
def test_a_resumed_run_plans_what_the_first_would_have(kind, data, lengths, stop):
    size = data.draw(kind)
    first, second = (make_planner(lengths, **size, endless=True) for _ in range(2))
    run(first, most=stop)
    assert run(resumed(first, second), most=6) == run(first, most=6)


@settings(max_examples=60, deadline=None)
@given(document_lengths().filter(bool), SIZES)
def test_no_more_tokens_are_held_at_once_than_with_one_micro_batch_a_window(lengths, size):
    planner = make_planner(lengths, **size, endless=True)
    allowed = min(size["micro_batches"], size["pp"]) * size["max_tokens"]
    for plan in run(planner, most=8):
        assert most_held(plan.micro_batches, planner.packer.law) <= allowed


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
