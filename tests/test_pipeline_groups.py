"""Groups of micro-batches whose backwards run last first: their order, their memory, their time."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.reproduce.compare import in_flight
from wlb_megatron.pipeline.orders import Step, grouped_orders, groups, joined_groups, running_order
from wlb_megatron.pipeline.schedule import pipeline_events
from wlb_megatron.pipeline.step_law import step_time
from wlb_megatron.plan import Piece

_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=16).map(tuple)


def alike(stages: int, *ways: list[float]) -> list[np.ndarray]:
    """Times of micro-batches on equal stages of one model chunk."""
    return [np.broadcast_to(np.array(way, dtype=float), (stages, 1, len(way))) for way in ways]


def _spelled(order: list[Step]) -> str:
    return " ".join("FB"[step.backward] + str(step.micro_batch) for step in order)


def _bounds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and end of each micro-batch's group."""
    bounds = []
    for size in sizes:
        bounds += [(len(bounds), len(bounds) + size)] * size
    return bounds


def check_last_first(backwards: list[int], bounds: list[tuple[int, int]]) -> None:
    for first, second in pairwise(backwards):
        same = bounds[first] == bounds[second]
        assert second == first - 1 if same else bounds[second][0] == bounds[first][1]


def test_groups_of_two_and_one_by_hand_and_of_one_as_megatrons_own_1f1b():
    assert [_spelled(order) for order in grouped_orders(2, (2, 1))] == [
        "F0 F1 F2 B1 B0 B2",
        "F0 F1 B1 F2 B0 B2",
    ]
    assert [_spelled(order) for order in grouped_orders(3, (1,) * 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), _sizes)
def test_backwards_of_a_group_follow_all_its_forwards_and_run_last_first_on_every_stage(stages, sizes):
    bounds, orders = _bounds(sizes), grouped_orders(stages, sizes)
    for order in orders:
        assert [step.micro_batch for step in order if not step.backward] == list(range(sum(sizes)))
        backwards = [step.micro_batch for step in order if step.backward]
        assert sorted(backwards) == list(range(sum(sizes)))
        check_last_first(backwards, bounds)
        for m, (_, end) in enumerate(bounds):
            done = order[: order.index(Step(m, 0, True))]
            assert sum(not step.backward for step in done) >= end


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), _sizes, st.data())
def test_tokens_in_flight_are_those_counted_by_hand(stages, sizes, data):
    total = sum(sizes)
    tokens = data.draw(st.lists(st.integers(1, 1000), min_size=total, max_size=total))
    orders = grouped_orders(stages, sizes)
    expected = []
    for order in orders:
        held = [
            {step.micro_batch for step in order[:at] if not step.backward}
            - {step.micro_batch for step in order[:at] if step.backward}
            for at in range(len(order) + 1)
        ]
        expected.append(max(sum(tokens[m] for m in now) for now in held))
    assert in_flight(orders, tokens) == expected
    most = [min(total, stages - stage - 1 + max(sizes)) for stage in range(stages)]
    assert in_flight(orders, [1] * total) == most


def _megatron_waits(stage: int, stages: int, sizes: tuple[int, ...]) -> list[list[tuple[str, int, int]]]:
    """What a stage waits for together, as forward_backward_pipelining_without_interleaving sends and receives.

    A transfer is (direction, sending stage, its number in that direction).
    """
    total = sum(sizes)
    warm_up = min(total, stages - stage - 1 + max(sizes) - 1)
    counts = {"send F": 0, "receive F": 0, "send B": 0, "receive B": 0}
    waits: list[list[tuple[str, int, int]]] = []

    def wait(*ways: str) -> None:
        together = []
        for way in ways:
            send, forward = way.startswith("send"), way.endswith("F")
            other = stage + (1 if send == forward else -1)
            if 0 <= other < stages:
                together.append((way[-1], stage if send else other, counts[way]))
                counts[way] += 1
        if together:
            waits.append(together)

    for _ in range(warm_up):
        wait("receive F")
        wait("send F")
    if warm_up < total:
        wait("receive F")
    for at in range(total - warm_up):
        wait("send F", "receive B")
        wait(*(["send B"] if at == total - warm_up - 1 else ["send B", "receive F"]))
    for _ in range(warm_up):
        wait("receive B")
        wait("send B")
    return waits


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_no_stage_waits_for_ever_in_megatrons_own_loop_with_coupled_transfers(stages, sizes):
    while sum(sizes) > 40:
        sizes.pop() if len(sizes) > 1 else sizes.__setitem__(0, 40)
    waits = [_megatron_waits(stage, stages, tuple(sizes)) for stage in range(stages)]
    at = [0] * stages
    sides: dict[tuple[str, int, int], set[int]] = {}
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while at[stage] < len(waits[stage]):
                for transfer in waits[stage][at[stage]]:
                    sides.setdefault(transfer, set()).add(stage)
                if any(len(sides[transfer]) < 2 for transfer in waits[stage][at[stage]]):
                    break
                at[stage] += 1
                moved = True
    assert at == [len(mine) for mine in waits]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), _sizes, st.booleans(), st.integers(0, 2**32))
def test_step_time_is_the_end_of_the_last_event(stages, sizes, blocking, seed):
    rng = random.Random(seed)
    forward, backward = ([rng.randint(1, 10**12) for _ in range(sum(sizes))] for _ in range(2))
    events = pipeline_events(*alike(stages, forward, backward), blocking=blocking, groups=sizes)
    assert blocking or step_time(forward, backward, stages, sizes) == max(e.end for e in events)
    done = {(e.stage, e.micro_batch, e.backward): e for e in events}
    assert len(done) == len(events) == 2 * stages * sum(sizes)
    for (stage, m, back), event in done.items():
        before = [(stage + (1 if back else -1), m, back), (stage, m, False) if back else None]
        assert all(event.start >= done[other].end for other in before if other in done)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("sizes", [(1,) * 8, (4, 4), (1, 3, 2, 1, 1), (1, 1, 1, 5), (8,)])
def test_equal_micro_batches_have_the_bubble_of_1f1b_whatever_their_groups(sizes, blocking):
    events = pipeline_events(*alike(4, [1.0] * 8, [2.0] * 8), blocking=blocking, groups=sizes)
    assert max(event.end for event in events) == 3 * (8 + 3)


@st.composite
def _interleaved(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """Stages, model chunks, and groups of at least as many micro-batches as stages."""
    stages, chunks = draw(st.integers(2, 6)), draw(st.integers(2, 4))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    return stages, chunks, (*sizes, *(1 for _ in range(stages - sum(sizes))))


def event_ends(
    orders: list[list[Step]], forward: np.ndarray, backward: np.ndarray, transfer: float = 0.0
) -> dict[tuple[Step, int], float] | None:
    """When each (step, stage) ends; None where stages wait for ever.

    The model is cut into stages x chunks parts in a row. A forward waits for the part before, a backward for the part
    after, the last part's for its own forward. forward, backward: times [stage, chunk, micro-batch].
    """
    stages, chunks, _ = forward.shape
    at, free = [0] * stages, [0.0] * stages
    done: dict[tuple[Step, int], float] = {}
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        moved = False
        for stage, (place, order) in enumerate(zip(at, orders, strict=True)):
            if place == len(order):
                continue
            m, chunk, backwards = order[place]
            part, way = chunk * stages + stage, transfer
            if backwards and part == stages * chunks - 1:
                needed, way = (Step(m, chunk, False), stage), 0.0
            else:
                part += 1 if backwards else -1
                needed = Step(m, part // stages, backwards), part % stages
            if part < 0 or needed in done:
                begin = max(free[stage], 0.0 if part < 0 else done[needed] + way)
                times = backward if backwards else forward
                free[stage] = done[order[place], stage] = begin + times[stage, chunk, m]
                at[stage] += 1
                moved = True
        if not moved:
            return None
    return done


def _ones(stages: int, chunks: int, sizes: tuple[int, ...]) -> np.ndarray:
    return np.ones((stages, chunks, sum(sizes)))


@settings(deadline=None, max_examples=100)
@given(_interleaved())
def test_interleaved_stages_never_wait_for_ever_and_run_backwards_of_a_group_last_first(job):
    stages, chunks, sizes = job
    bounds, orders = _bounds(sizes), grouped_orders(stages, sizes, chunks)
    ones = _ones(stages, chunks, sizes)
    assert event_ends(orders, ones, ones) is not None
    for order in orders:
        assert len(order) == len(set(order)) == 2 * chunks * sum(sizes)
        for chunk in range(chunks):
            forwards = [s.micro_batch for s in order if s.chunk == chunk and not s.backward]
            assert forwards == [*range(sum(sizes))]
            check_last_first([s.micro_batch for s in order if s.chunk == chunk and s.backward], bounds)


@settings(deadline=None, max_examples=100)
@given(_interleaved())
def test_a_lead_shorter_by_one_forward_leaves_a_backward_without_its_forward(job):
    stages, chunks, sizes = job
    plan = running_order(stages, sizes, chunks)
    if plan.lead >= len(plan.table):
        return
    # All stages run the same forwards, and the same backwards.
    order = grouped_orders(stages, sizes, chunks)[0]
    forwards, backwards = ([step for step in order if step.backward == back] for back in (False, True))
    orders = []
    for stage in range(stages):
        ahead = plan._replace(lead=plan.lead - 1).ahead(stages, stage)
        order = forwards[:ahead]
        for n, step in enumerate(backwards):
            order += [*forwards[ahead + n : ahead + n + 1], step]
        orders.append(order)
    last = orders[-1]
    ones = _ones(stages, chunks, sizes)
    assert event_ends(orders, ones, ones) is None
    assert any(last.index(step) > last.index(step._replace(backward=True)) for step in forwards)


def test_interleaved_groups_of_one_are_megatrons_own_order():
    for stages, chunks, count in ((2, 2, 4), (4, 2, 8), (4, 3, 16)):
        orders = grouped_orders(stages, (1,) * count, chunks)
        leads = [next(at for at, step in enumerate(order) if step.backward) - 1 for order in orders]
        assert leads == [2 * (stages - p - 1) + (chunks - 1) * stages for p in range(stages)]
    blocks = running_order(2, (2, 3), 2)
    assert blocks.table == ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (4, 0), (2, 1), (3, 1), (4, 1))
    assert (blocks.turns, blocks.lead) == ((1, 0, 4, 3, 2), 5)


@settings(deadline=None, max_examples=60)
@given(_interleaved(), st.integers(0, 2**32))
def test_an_interleaved_steps_time_is_that_of_its_stages_one_step_after_another(job, seed):
    stages, chunks, sizes = job
    rng = random.Random(seed)
    forward, backward = ([rng.randint(1, 10**12) for _ in range(sum(sizes))] for _ in range(2))
    grids = [_ones(stages, chunks, sizes) * np.array(times, float) for times in (forward, backward)]
    events = pipeline_events(*grids, groups=sizes)
    ends = event_ends(grouped_orders(stages, sizes, chunks), *grids)
    assert ends is not None
    time = step_time(forward, backward, stages, sizes, chunks=chunks)
    assert time == max(ends.values()) == max(e.end for e in events)


@pytest.mark.parametrize("sizes", [(1,) * 16, (4,) * 4, (1, 3, 2, 2, 8), (16,)])
def test_equal_micro_batches_have_the_bubble_of_the_interleaved_schedule_whatever_their_groups(sizes):
    assert step_time([1] * 16, [2] * 16, 4, sizes, chunks=2) == 3 * (2 * 16 + 3)


def test_bad_groups_are_refused():
    for sizes in ((1, 0), ()):
        with pytest.raises(ValueError, match="each must be at least 1"):
            grouped_orders(2, sizes)
    with pytest.raises(ValueError, match="3 micro-batches of an interleaved schedule are fewer than its 4"):
        grouped_orders(4, (1, 2), 2)
    with pytest.raises(ValueError, match=r"groups of \[2\] of 3 micro-batches"):
        pipeline_events(*alike(2, [1.0] * 3, [1.0] * 3), groups=(2,))


def test_micro_batches_that_share_a_document_in_chunks_form_a_group_and_ranks_join_theirs():
    rows = [
        [Piece(0, 7, 0, 4)],
        [Piece(0, 7, 4, 6, 4), Piece(0, 8, 0, 2)],
        [Piece(0, 9, 0, 5)],
        [Piece(0, 9, 5, 6, 5)],
    ]
    assert groups(rows) == (2, 2)
    assert groups([[Piece(0, 7, 0, 4)], [Piece(0, 7, 4, 8)]]) == (1, 1)  # cut, not in chunks
    assert groups([]) == ()
    assert joined_groups([(1, 2, 1), (2, 1, 1)]) == (3, 1)
    assert joined_groups([(1, 1), (1, 1)]) == (1, 1)
    assert joined_groups([(2, 2)]) == (2, 2)
    with pytest.raises(ValueError, match="not of equally many"):
        joined_groups([(1, 2), (2, 2)])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_groups_are_found_whatever_documents_connect_them(sizes, data):
    rows: list[list[Piece]] = [[] for _ in range(sum(sizes))]
    document = 0
    for first, size in zip([sum(sizes[:at]) for at in range(len(sizes))], sizes, strict=True):
        links = [(at, at + 1) for at in range(first, first + size - 1)]
        extra = data.draw(st.lists(st.sets(st.integers(first, first + size - 1), min_size=1), max_size=2))
        for places in [*links, *map(sorted, extra), (first,)]:
            begin = data.draw(st.integers(0, 5))  # of the part of a long document
            start = begin
            for place in places:
                end = start + data.draw(st.integers(1, 9))
                rows[place].append(Piece(0, document, start, end, start - begin))
                start = end
            document += 1
    assert groups([data.draw(st.permutations(row)) for row in rows]) == tuple(sizes)


def test_a_document_in_chunks_without_its_earlier_part_or_with_a_gap_is_an_error():
    head, tail = Piece(0, 7, 0, 4), Piece(0, 7, 4, 6, 4)
    for rows in ([[tail]], [[tail], [head]], [[head, tail]], [[head], [Piece(1, 7, 4, 6, 4)]]):
        with pytest.raises(ValueError, match="do not hold as one prefix"):
            groups(rows)
    with pytest.raises(ValueError, match="do not hold as one prefix"):  # another part of the same document
        groups([[Piece(0, 7, 0, 4)], [Piece(0, 7, 4, 6, 2)]])
    with pytest.raises(ValueError, match="micro-batches 0 and 2 share documents in chunks"):
        groups([[Piece(0, 7, 0, 4)], [Piece(0, 1, 0, 1)], [Piece(0, 7, 4, 6, 4)]])
