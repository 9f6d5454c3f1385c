"""The predicted step: 1F1B events over work units, and how many micro-batches it asks for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import one_f_one_b_time

from wlb_megatron.pipeline.schedule import pipeline_ends
from wlb_megatron.pipeline.step_law import StepLaw

WORKS = st.lists(st.integers(0, 10**6), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(WORKS, st.integers(1, 8))
def test_a_step_is_that_of_1f1b_events_by_brute_force(works, stages):
    assert StepLaw(pp=stages).rank(works) == int(one_f_one_b_time(works, stages)) // 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(2, 3), st.data())
def test_an_interleaved_step_is_the_simulators(groups, stages, chunks, data):
    count = groups * stages
    works = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    grid = np.broadcast_to(np.array(works, dtype=float) / (3 * chunks), (1, stages, chunks, count))
    simulated = pipeline_ends(grid, 2 * grid).max()
    assert StepLaw(pp=stages, vpp=chunks, group=stages).rank(works) == pytest.approx(simulated, abs=1)


def test_like_micro_batches_take_m_plus_stages_less_one_of_them_and_the_slowest_rank_is_the_step():
    assert StepLaw(pp=4).rank([30] * 8) == (8 + 3) * 30
    assert StepLaw(pp=4, vpp=2, group=4).rank([30] * 8) == 8 * 30 + 3 * 30 // 2
    law, columns = StepLaw(pp=2), [[3 * at, 6, 9] for at in range(12)]
    assert law.step(columns) == max(law.rank(works) for works in columns)


def test_a_micro_batch_costs_its_own_part_what_its_chunk_adds_and_at_least_what_the_host_needs():
    law = StepLaw(per_micro_batch=10, least=(20, 30))
    assert law.rank([100, 20]) == 110 + 50
    law, plain = StepLaw(pp=2, per_chunk=6), StepLaw(pp=2)
    assert law.rank([30, 30, 30], (1, 2)) == plain.rank([30, 36, 36], (1, 2))
    assert law.rank([30, 30, 30]) == plain.rank([30, 30, 30])
    # Where layers are recomputed a forward is a fourth.
    assert StepLaw(pp=2, backward=(3, 1), again=1000).rank([40] * 4) == StepLaw(pp=2).rank([40] * 4) == 200


def test_a_backward_that_takes_long_hides_the_launches_of_a_short_forward():
    """Work 30 on 2 stages: a forward of 10 and a backward of 20. A host needs 16 and 10: both by 26."""
    law = StepLaw(pp=2, least=(16, 10))
    assert law.occupied(30) == 30 and law.rank([30]) == 2 * 30
    assert law.occupied(20) == 16 + 10 and law.rank([20]) == 2 * 26
    assert StepLaw(least=(16, 10)).occupied(30) == 30


@pytest.mark.parametrize(
    ("law", "windows", "per_window", "counts"),
    [
        (StepLaw(pp=4), 4, None, [4, 6, 8, 12, 16, 24, 32]),
        (StepLaw(pp=4), 4, 1.5, [6]),
        (StepLaw(pp=4), 10, 1.1, [11]),
        (StepLaw(), 4, None, [4]),
        (StepLaw(), 4, 2, [8]),
        (StepLaw(pp=2, vpp=2, group=2), 3, 1.5, [6]),
        (StepLaw(pp=4, vpp=2, group=4), 4, None, [4, 8, 12, 16, 24, 32]),
    ],
)
def test_a_rank_may_get_these_numbers_of_micro_batches(law, windows, per_window, counts):
    assert law.counts(windows, per_window) == counts


def test_more_micro_batches_are_not_looked_at_where_each_costs_more_than_the_bubble_it_saves():
    assert StepLaw(pp=4, per_micro_batch=10**6).worthwhile([4, 8, 16], 10**5) == [4]
    assert StepLaw(pp=4, per_micro_batch=10).worthwhile([4, 8, 16], 10**5) == [4, 8, 16]
    # A few percent are not worth giving up like works for: 4 of 25,000 on 4 stages take 7 * 25,000,
    # 8 of 12,500 take 11 * 12,500, and what each costs beside.
    law = StepLaw(pp=4, per_micro_batch=8000)
    assert law.estimate(8, 10**5) * 100 > law.estimate(4, 10**5) * 95 > law.estimate(8, 10**5) * 90
    assert law.worthwhile([4, 8], 10**5) == [4]
