"""Promises of every packer, for any lengths: each token once, nothing empty, nothing above its limits, resumable."""

import json
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from packing_oracle import (
    COST,
    QUICK_PACKINGS,
    ListStream,
    check_promises,
    delays,
    make_planner,
    resumed,
    run,
    token_counts,
    trained,
)

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plan import Piece
from wlb_megatron.registry import PACKERS

WINDOW = 24


@st.composite
def document_lengths(draw: st.DrawFn, longest: int = WINDOW) -> list[int]:
    """Lengths that make packing hard: tiny, middling, just above half a window, whole windows, in any mixture."""
    kind = st.sampled_from([(1, 2), (1, longest), (longest // 2, longest // 2 + 2), (longest - 1, longest)])
    lengths: list[int] = []
    for low, high in draw(st.lists(kind, min_size=1, max_size=3)):
        lengths += draw(st.lists(st.integers(low, high), max_size=60))
    return draw(st.permutations(lengths))


def sizes(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Settings of a planner with windows of 24 tokens."""
    usual = {"micro_batches": st.integers(1, 6), "dp": st.integers(1, 3), "pp": st.sampled_from([1, 2, 4])}
    usual |= {"window": st.just(WINDOW), "max_documents": st.sampled_from([2, 5, 4096])}
    return st.fixed_dictionaries(usual | more)


SIZES = sizes(micro_batches=st.integers(1, 4), max_documents=st.sampled_from([1, 2, 5, 4096]))


def limits(size: dict[str, Any]) -> dict[str, int]:
    """As check_promises() takes them."""
    return {"bins": size["micro_batches"] * size["dp"], "most_documents": size["max_documents"]}


varlen_settings = st.fixed_dictionaries(
    {
        "packing": st.sampled_from([name for name in QUICK_PACKINGS if not PACKERS[name].fixed_windows]),
        "max_tokens": st.integers(WINDOW * 5 // 4, 3 * WINDOW),
        "max_delay": st.integers(0, 6),
        "thresholds": st.sampled_from(["auto", "none", "12", "6,13,24", "1"]),
        "batch_spread": st.sampled_from(["auto", "none", "1", "1.2"]),
    }
)


@pytest.mark.parametrize("endless", [False, True], ids=["to a stream's end", "of an endless stream"])
@settings(max_examples=105, deadline=None)
@given(document_lengths(), SIZES, varlen_settings)
def test_varlen_trains_every_token_once_uncut_within_its_limits_and_its_bound_on_delay(
    endless, lengths, size, chosen
):
    """An endless stream never gives an empty micro-batch."""
    assume(lengths or not endless)
    plans = run(make_planner(lengths, **size, **chosen, endless=endless), most=12 if endless else 10_000)
    assert len(plans) == 12 or not endless
    check_promises(plans, chosen["max_tokens"], **limits(size), finite=not endless)
    late = delays(plans)
    assert endless or sorted(late) == [Piece(0, i, 0, n) for i, n in enumerate(lengths)], "a document was cut"
    assert max(late.values(), default=0) <= chosen["max_delay"]


@settings(max_examples=150, deadline=None)
@given(
    document_lengths().filter(bool),
    SIZES,
    varlen_settings,
    st.sampled_from([0, 1, 3, 1000]),
    st.sampled_from(["1", "2", "auto"]),
)
def test_only_documents_that_the_bound_on_delay_demands_exceed_the_batch_spread_and_such_steps_are_counted(
    lengths, size, chosen, max_delay, per_window
):
    chosen |= {"max_delay": max_delay, "micro_batches_per_window": per_window}
    planner = make_planner(lengths, **size, **chosen, endless=True, chunks="off")
    plans = run(planner, most=12)
    percent = {"auto": 150, "1": 100, "1.2": 120, "none": 10**9}[chosen["batch_spread"]]
    batch = size["micro_batches"] * size["dp"] * WINDOW
    above = [plan for plan in plans if 100 * sum(p.tokens for p in trained(plan)) > percent * batch]
    assert planner.above_spread == len(above)
    assert not above or max_delay < 1000
    for plan in above:  # with a delay of 0 each document is due as it arrives
        assert max_delay == 0 or not set(trained(plan)) & set(plan.arrived)


def test_a_batch_spread_evens_steps_and_counts_those_in_chunks_that_exceed_it():
    lengths = [3, 24, 1, 7, 20, 2, 5, 11] * 9

    def tokens(spread: str, chunks: str) -> tuple[float, int]:
        job = {"window": 24, "micro_batches": 4, "pp": 4, "batch_spread": spread, "chunks": chunks}
        planner = make_planner(lengths, **job, endless=True)
        plans = run(planner, most=40)
        return max(sum(p.tokens for p in trained(plan)) for plan in plans) / 96, planner.above_spread

    (free, uncounted), (bound, above) = tokens("none", "off"), tokens("1.25", "off")
    assert free > 1.3 and bound <= 1.25 and uncounted == above == 0
    most, above = tokens("1.01", "on")
    assert most > 1.01 and above > 0, "no document in chunks waits"


@pytest.mark.parametrize("packing", [name for name in QUICK_PACKINGS if PACKERS[name].fixed_windows])
@settings(max_examples=50, deadline=None)
@example(  # the last document arrived in iteration 2, and arrived again in 4
    lengths=[1] * 12 + [2] * 9 + [1],
    size={"window": 24, "micro_batches": 1, "dp": 1, "pp": 1, "max_documents": 1},
)
@example(  # ten pieces, as one is cut anew: more than the two windows they came from may hold
    lengths=[4, 1, 1, 1, 17, 1, 3, 4, 14],
    size={"window": 24, "micro_batches": 1, "dp": 3, "pp": 1, "max_documents": 5},
)
@given(lengths=document_lengths(), size=SIZES)
def test_fixed_windows_train_every_token_once_and_are_full(packing, lengths, size):
    plans = run(make_planner(lengths, **size, packing=packing))
    check_promises(plans, WINDOW, **limits(size))
    if size["max_documents"] == 4096:
        for plan in plans[:-1]:
            assert all(b.tokens == WINDOW for row in plan.micro_batches for b in row)


@settings(max_examples=60, deadline=None)
@given(document_lengths(), st.integers(1, 4), st.integers(0, 6))
def test_iteration_k_takes_documents_until_the_total_reaches_k_plus_1_global_batches(
    lengths, bins, max_delay
):
    taken = 0
    job = {"window": WINDOW, "micro_batches": bins, "max_tokens": 3 * WINDOW, "max_delay": max_delay}
    planner = make_planner(lengths, **job)
    for plan in run(planner):
        before = taken
        taken += sum(piece.tokens for piece in plan.arrived)
        goal = (plan.iteration + 1) * bins * WINDOW
        if taken < sum(lengths):
            assert taken >= goal
            assert taken - plan.arrived[-1].tokens < goal, "took more than the document that crosses"
            assert before < goal


def regrouped(bins: int) -> st.SearchStrategy[int]:
    return st.sampled_from([dp for dp in range(1, bins + 1) if bins % dp == 0])


@settings(max_examples=120, deadline=None)
@given(
    st.data(),
    document_lengths().filter(bool),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(0, 9),
    varlen_settings,
)
def test_a_run_resumed_at_any_iteration_in_any_layout_trains_the_same_documents(
    data, lengths, bins, stop, chosen
):
    packings = [chosen, *({"packing": name} for name in QUICK_PACKINGS if name != "varlen")]
    packing = data.draw(st.sampled_from(packings))

    def planner() -> Planner:
        dp = data.draw(regrouped(bins))
        pp = data.draw(st.sampled_from([1, 4]))
        layout = {"micro_batches": bins // dp, "dp": dp, "pp": pp}
        return make_planner(lengths, window=WINDOW, **layout, endless=True, **packing)

    whole = run(planner(), most=12)
    first = planner()
    run(first, most=stop)
    rest = run(resumed(first, planner()), most=12 - stop)
    for expected, plan in zip(whole[stop:], rest, strict=True):
        assert plan.iteration == expected.iteration
        assert plan.arrived == expected.arrived
        assert trained(plan) == trained(expected)
        assert plan.waiting == expected.waiting


def test_a_state_of_other_settings_is_refused_and_says_what_changed():
    lengths = [5, 20, 7, 24] * 10
    saved = make_planner(lengths, window=WINDOW, micro_batches=2, max_delay=4)
    saved.next_iteration()
    for changed, words in (
        ({"max_delay": 5}, "max_delay was 4, is 5"),
        ({"max_tokens": 48}, "max_tokens was 36, is 48"),
        ({"thresholds": "12"}, "thresholds was"),
        ({"packing": "original"}, "packing was 'varlen', is 'original'"),
    ):
        other = make_planner(lengths, window=WINDOW, micro_batches=2, **({"max_delay": 4} | changed))
        with pytest.raises(ValueError, match=words):
            other.load_state(saved.state())
    with pytest.raises(ValueError, match="global batches of 2, this run has 3: keep --global-batch-size"):
        make_planner(lengths, window=WINDOW, micro_batches=3, max_delay=4).load_state(saved.state())
    with pytest.raises(ValueError, match="version 7"):
        saved.load_state(saved.state() | {"version": 7})


def test_an_lmax_set_by_no_flag_comes_with_the_state_where_it_fits():
    def packer(alignment: int, fits: int) -> Any:
        job = {"window": 40, "micro_batches": 4, "alignment": alignment, "adopt_max_tokens": fits}
        return make_packer(PackingJob(WlbConfig(), COST, **job))

    state = json.loads(json.dumps(packer(4, 1000).state()))
    assert state["settings"]["max_tokens"] == 60
    other = packer(8, 64)
    assert other.max_tokens == 56  # 60 is no multiple of 8
    other.load_state(state)
    assert other.max_tokens == 60 and other.state() == state  # with end padding it has 64 tokens at most
    with pytest.raises(ValueError, match=r"up to 60 tokens, but 56 fit the memory.*--wlb-max-tokens 60"):
        packer(8, 63).load_state(state)
    with pytest.raises(ValueError, match="max_tokens was 60, is 56"):
        packer(8, 0).load_state(state)


def test_thresholds_found_on_a_sample_come_with_the_state():
    def packer(sample: list[int] | None) -> Any:
        return make_packer(PackingJob(WlbConfig(), COST, window=WINDOW, micro_batches=4, sample=sample))

    saved = packer([3] * 400 + [20] * 40)
    state = json.loads(json.dumps(saved.state()))
    other = packer(None)
    other.load_state(state)
    assert other.state() == state


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"max_tokens": 29, "chunks": "off"},
            "max_tokens of 29 is below 1.25 windows \\(30 tokens\\).*to 30 or more, or train in chunks",
        ),
        (
            {"max_tokens": 33, "alignment": 24, "chunks": "off"},
            "max_tokens of 33 \\(24 tokens in multiples of 24\\) is.* to 48 or more",
        ),
        (
            {"alignment": 24},
            "^1.5 windows \\(24 tokens in multiples of 24\\) is below .*set --wlb-max-tokens to 48",
        ),
        ({"thresholds": "8,8"}, "thresholds '8,8' are not auto, none"),
        ({"thresholds": "short"}, "thresholds 'short' are not auto, none"),
        ({"packing": "best"}, "unknown packing 'best': choose .*original"),
        ({"alignment": 16}, "window of 24 tokens is not a multiple of 16"),
        *(
            ({"batch_spread": text}, f"--wlb-batch-spread '{text}' is neither auto, none, nor a number")
            for text in ("0.9", "nan", "wide", "-1", "inf")
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        make_planner([4], window=WINDOW, micro_batches=1, **changed)


def test_pieces_put_back_are_offered_again_first():
    # Lmax takes one of these documents a micro-batch; nine tenths of a window arrive too fast to wait.
    lengths = [22] * 200
    job = {"micro_batches": 1, "max_tokens": 36, "max_delay": 2, "thresholds": "none"}
    planner = make_planner(lengths, window=WINDOW, **job)
    plans = run(planner)
    assert [piece.document for plan in plans for piece in trained(plan)] == list(range(200))
    assert max(delays(plans).values()) <= 2
    assert max(len(plan.waiting) for plan in plans) <= 3
    assert planner.put_back > 0


def test_an_empty_stream_gives_no_iteration_and_a_finite_ones_last_give_out_all_that_waits():
    packer = make_packer(PackingJob(WlbConfig(), COST, window=WINDOW, micro_batches=2))
    assert Planner(ListStream([]), packer, global_tokens=48).next_iteration() is None
    plans = run(make_planner([24] * 3 + [1] * 40, window=WINDOW, micro_batches=2, thresholds="24"))
    assert not plans[-1].waiting
    assert token_counts([p for plan in plans for p in trained(plan)]).total() == 112
