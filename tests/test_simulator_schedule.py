"""Pipeline schedules: by hand, by an independent simulation, and by laws that hold for any times."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_groups import alike, event_ends

from wlb_megatron.pipeline.orders import Step, grouped_orders
from wlb_megatron.pipeline.schedule import Event, Launches, pipeline_ends, pipeline_events, pipeline_graph
from wlb_megatron.simulator.iteration import _ends_by_order


def _timeline(events: list[Event], stage: int) -> list[tuple[str, float, float]]:
    return [
        (f"{'FB'[e.backward]}{e.micro_batch}" + (f".{e.chunk}" if e.chunk else ""), e.start, e.end)
        for e in events
        if e.stage == stage
    ]


def test_two_stages_two_micro_batches_by_hand_and_a_transfer_delays_the_next_stage_alone():
    events = pipeline_events(*alike(2, [1.0, 3.0], [2.0, 4.0]))
    assert _timeline(events, 0) == [("F0", 0, 1), ("F1", 1, 4), ("B0", 4, 6), ("B1", 11, 15)]
    assert _timeline(events, 1) == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 7), ("B1", 7, 11)]
    events = pipeline_events(*alike(2, [1.0, 3.0], [2.0, 4.0]), transfer=0.5)
    assert _timeline(events, 0) == [("F0", 0, 1), ("F1", 1, 4), ("B0", 5, 7), ("B1", 12, 16)]
    assert _timeline(events, 1) == [("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 7.5), ("B1", 7.5, 11.5)]
    # A blocking stage waits for both ends of a transfer.
    events = pipeline_events(*alike(2, [1.0, 3.0], [2.0, 4.0]), transfer=0.5, blocking=True)
    # F0 is sent by 1.5. F1 ends at 4.5 and is coupled with B0's gradient: B0 ends at 3.5 on stage 1, which then
    # sends it and receives F1 in one go, from 4.5 to 5.
    assert _timeline(events, 0) == [("F0", 0, 1), ("F1", 1.5, 4.5), ("B0", 5, 7), ("B1", 12.5, 16.5)]
    assert _timeline(events, 1) == [("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 5, 8), ("B1", 8, 12)]


def test_interleaved_order_and_timeline_of_two_stages_with_two_chunks_by_hand():
    first, last = grouped_orders(2, (1, 1), 2)
    spelled = [["FB"[s.backward] + f"{s.micro_batch}.{s.chunk}" for s in order] for order in (first, last)]
    # Warm-up: stage 0 runs (2 - 0 - 1) * 2 + 2 = 4 forwards (all), stage 1 runs 2.
    assert spelled[0] == ["F0.0", "F1.0", "F0.1", "F1.1", "B0.1", "B1.1", "B0.0", "B1.0"]
    assert spelled[1] == ["F0.0", "F1.0", "F0.1", "B0.1", "F1.1", "B1.1", "B0.0", "B1.0"]
    events = pipeline_events(np.ones((2, 2, 2)), np.ones((2, 2, 2)))
    # Stage 1 runs backwards of its second chunk at 4 and 6, of its first at 7 and 8.
    assert _timeline(events, 0) == [
        *[("F0", 0, 1), ("F1", 1, 2), ("F0.1", 2, 3), ("F1.1", 3, 4)],
        *[("B0.1", 5, 6), ("B1.1", 7, 8), ("B0", 8, 9), ("B1", 9, 10)],
    ]
    assert _timeline(events, 1) == [
        *[("F0", 1, 2), ("F1", 2, 3), ("F0.1", 3, 4), ("B0.1", 4, 5)],
        *[("F1.1", 5, 6), ("B1.1", 6, 7), ("B0", 7, 8), ("B1", 8, 9)],
    ]
    # (m * V + P - 1) * (f + b)
    assert max(e.end for e in events) == (2 * 2 + 1) * 2


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 16), (4, 2)])
def test_equal_micro_batches_leave_a_bubble_of_stages_less_one_over_micro_batches(
    stages, micro_batches, blocking
):
    events = pipeline_events(*alike(stages, [1.0] * micro_batches, [2.0] * micro_batches), blocking=blocking)
    work = 3.0 * micro_batches
    assert (max(e.end for e in events) - work) / work == pytest.approx((stages - 1) / micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 2, 2), (4, 4, 2), (4, 8, 3), (2, 6, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, micro_batches, chunks):
    ones = np.ones((stages, chunks, micro_batches))
    events = pipeline_events(ones, 2 * ones)
    work = 3.0 * micro_batches * chunks
    bubble = (max(e.end for e in events) - work) / work
    assert bubble == pytest.approx((stages - 1) / (micro_batches * chunks))


@st.composite
def _jobs(draw):
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    micro_batches = stages * draw(st.integers(1, 3)) if chunks > 1 else draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 3)), stages, chunks, micro_batches)
    transfer = draw(st.sampled_from([0.0, 0.25, 3.0])) if stages > 1 else 0.0
    return rng.integers(1, 20, shape).astype(float), rng.integers(1, 20, shape).astype(float), transfer


@settings(deadline=None, max_examples=60)
@given(_jobs())
def test_events_are_those_of_an_independent_simulation(job):
    forward, backward, transfer = job
    events = pipeline_events(forward[0], backward[0], transfer=transfer)
    orders = grouped_orders(forward.shape[1], (1,) * forward.shape[3], forward.shape[2])
    expected = event_ends(orders, forward[0], backward[0], transfer)
    assert {(Step(e.micro_batch, e.chunk, e.backward), e.stage): e.end for e in events} == expected


@settings(deadline=None, max_examples=60)
@given(_jobs(), st.booleans())
def test_many_steps_at_once_end_as_each_alone(job, blocking):
    forward, backward, transfer = job
    blocking = blocking and forward.shape[2] == 1
    ends = pipeline_ends(forward, backward, transfer=transfer, blocking=blocking)
    for nth, (f, b) in enumerate(zip(forward, backward, strict=True)):
        events = pipeline_events(f, b, transfer=transfer, blocking=blocking)
        alone = [max(e.end for e in events if e.stage == stage) for stage in range(f.shape[0])]
        assert ends[nth].tolist() == alone


@settings(deadline=None, max_examples=60)
@given(_jobs(), st.booleans())
def test_no_stage_does_two_things_at_once_and_all_work_is_done_once(job, blocking):
    forward, backward, transfer = job
    blocking = blocking and forward.shape[2] == 1
    stages = forward.shape[1]
    events = pipeline_events(forward[0], backward[0], transfer=transfer, blocking=blocking)
    done = sum(e.end - e.start for e in events)
    assert done == pytest.approx(forward[0].sum() + backward[0].sum())
    assert len({(e.stage, e.chunk, e.micro_batch, e.backward) for e in events}) == 2 * forward[0].size
    for stage in range(stages):
        mine = sorted((e for e in events if e.stage == stage), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))


@settings(deadline=None, max_examples=60)
@given(_jobs())
def test_blocking_never_ends_earlier_and_transfers_are_waited_for(job):
    forward, backward, transfer = job
    forward, backward = forward[:, :, :1], backward[:, :, :1]
    free = pipeline_ends(forward, backward, transfer=transfer)
    blocked = pipeline_ends(forward, backward, transfer=transfer, blocking=True)
    assert (blocked >= free - 1e-9).all()
    events = pipeline_events(
        forward[0, :, 0, None], backward[0, :, 0, None], transfer=transfer, blocking=True
    )
    at = {(e.stage, e.micro_batch, e.backward): e for e in events}
    for (stage, m, back), event in at.items():
        before = at.get((stage + 1 if back else stage - 1, m, back))
        if before is not None:
            assert event.start >= before.end + transfer
        if back:
            assert event.start >= at[stage, m, False].end


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 4 pipeline stages"):
        pipeline_graph(4, 6, 2, False)
    with pytest.raises(ValueError, match="at least 1"):
        grouped_orders(0, (1,))


def test_a_step_waits_for_launches_only_where_the_host_has_no_lead():
    def ends(forward: float, backward: float, there: float, back: float, stages: int = 1) -> float:
        times = [np.full((1, stages, 1, 2), ns) for ns in (forward, backward, there, back)]
        return float(pipeline_ends(*times[:2], launches=Launches(*times[2:])).max())

    assert ends(3, 6, 0, 0) == ends(3, 6, 3, 6) == 18  # the device's own time
    assert ends(3, 6, 4, 2) == 19  # only the first forward waits
    assert ends(3, 6, 8, 10) == 8 + 10 + 8 + 10  # the host's time, forward and backward together
    assert ends(3, 6, 4, 2, stages=2) == 4 + 3 + 6 + 3 + 6 + 6  # the second host launches while it waits


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (3, 1), (3, 2)])
def test_steps_of_unlike_groups_are_timed_together_as_one_by_one(stages, chunks):
    """To the last bit. Groups of 3, 2 and 1 micro-batches in any order, 6 of them; without groups, too."""
    random = np.random.default_rng(4)
    orders = [None, (3, 2, 1), (1, 3, 2), (2, 1, 3), (2, 1, 1, 2), (1, 2, 1, 2), (1,) * 6]
    forward, backward, *hosts = random.random((4, len(orders), stages, chunks, 6))
    transfer = random.random(len(orders)) / 10
    together = _ends_by_order(forward, backward, Launches(*hosts), orders, transfer)
    for row, groups in enumerate(orders):
        one = slice(row, row + 1)
        launches = Launches(*(host[one] for host in hosts))
        given = {"transfer": transfer[one], "blocking": chunks == 1, "groups": groups, "launches": launches}
        assert (pipeline_ends(forward[one], backward[one], **given) == together[one]).all()
