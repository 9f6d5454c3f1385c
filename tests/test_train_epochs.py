"""--wlb-train-epochs: each document trains exactly once an epoch, in the number of steps that is known at start."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_oracle import trained

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.factory import plan_job
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import Planner
from wlb_megatron.plugin.plans.source import steps_of
from wlb_megatron.workload.cost_model import CostModel

WINDOW = 32
COST = CostModel(40.0, 0.0, 8.0)


def planner_of(
    lengths: list[list[int]], config: WlbConfig, rules: Rules, windows: int, pp: int = 1
) -> Planner:
    first, corpora = 0, []
    for number, each in enumerate(lengths):
        corpora.append(Corpus(f"c{number}", each, first, float(sum(each))))
        first += len(each)
    stream = DocumentStream(corpora, rules)
    options = {"window": WINDOW, "micro_batches": windows, "pp": pp, "longest": stream.longest}
    options["sample"] = [9, 14, 30]
    planner = plan_job(stream, PackingJob(config, COST, **options))
    steps, _ = steps_of(corpora, rules, planner.global_tokens)
    planner.until = steps * windows
    return planner


CONFIGS = {
    "delayed": WlbConfig(max_delay=4, thresholds="12,20", chunks="off"),
    "whole": WlbConfig(max_delay=0, chunks="off"),
    "chunks": WlbConfig(chunks="on"),
}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, WINDOW), min_size=1, max_size=25), min_size=1, max_size=3),
    st.sampled_from(sorted(CONFIGS)),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_each_document_trains_once_an_epoch_and_then_nothing_is_left(lengths, name, epochs, windows):
    rules = Rules(WINDOW, seed=3, endless=True, epochs=epochs)
    planner = planner_of(lengths, CONFIGS[name], rules, windows, pp=2)
    assert planner.until is not None
    tokens: Counter[tuple[int, int]] = Counter()
    for _ in range(planner.until // windows):
        plan = planner.next_iteration()
        assert plan is not None
        assert trained(plan)
        for piece in trained(plan):
            tokens[piece.epoch, piece.document] += piece.tokens
    assert planner.next_iteration() is None
    flat = [length for each in lengths for length in each]
    assert tokens == {(epoch, at): length for epoch in range(epochs) for at, length in enumerate(flat)}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_resumed_run_trains_what_is_left_and_one_that_had_ended_goes_on_for_more_epochs(name):
    lengths = [[(7 * at) % WINDOW + 1 for at in range(30)]]

    def planner(epochs: int) -> Planner:
        return planner_of(lengths, CONFIGS[name], Rules(WINDOW, seed=3, endless=True, epochs=epochs), 3)

    def rest(of: Planner) -> list[list[tuple[int, ...]]]:
        plans = iter(of.next_iteration, None)
        return [[tuple(piece) for piece in trained(plan)] for plan in plans]

    whole = rest(planner(2))
    begun, resumed = planner(2), planner(2)
    for _ in range(3):
        begun.next_iteration()
    resumed.load_state(begun.state())
    assert rest(resumed) == whole[3:]
    more = planner(3)
    more.load_state(resumed.state())
    assert {piece[0] for plan in rest(more) for piece in plan} == {2}
