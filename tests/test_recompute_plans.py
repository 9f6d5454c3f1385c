"""Plans of what a step recomputes: they fit at every event, never exceed the flags, and save most of what can be."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from recompute_oracle import by_the_flags, held_bytes, most_saved, saved_work

from wlb_megatron.pipeline.kept_layers import (
    Load,
    joined_loads,
    loads_of,
    plan_kept_layers,
    plan_step_layers,
    recomputed_array,
)
from wlb_megatron.pipeline.orders import Step, grouped_orders
from wlb_megatron.plan import MicroBatch, Piece
from wlb_megatron.workload.memory import ModelChunk, StageMemory, UnlikeLayer

Case = tuple[list[Step], list[Load], StageMemory]


def chunk_of(draw: random.Random, most_layers: int) -> ModelChunk:
    layers = draw.randint(1, most_layers)
    recomputed = draw.choice((layers, draw.randint(0, layers)))
    each = draw.randint(1, 9)
    kept = each + draw.randint(1, 60)
    switched = draw.choice((0, draw.randint(0, 20)))
    floor = recomputed * each - min(switched, recomputed * each // 2) + (layers - recomputed) * kept
    sizes = [(draw.randint(each, kept), draw.randint(0, 1500), draw.random() < 0.5) for _ in range(layers)]
    unlike = [UnlikeLayer(*size) for size in sizes]
    return ModelChunk(
        **{"layers": layers, "recomputed": recomputed, "kept": kept, "input": each, "floor": floor},
        **{"switched": switched, "forward": draw.randint(0, kept), "working": draw.randint(0, 2 * kept)},
        **{"remade": draw.choice((0, kept)), "keyed": layers + layers % 2},
        unlike=draw.choice(((), tuple(unlike))),
    )


def case_of(seed: int, most: int, most_layers: int) -> Case:
    """A stage of a random step: 1F1B, grouped or interleaved."""
    draw = random.Random(seed)
    stages, kind = draw.randint(1, 4), draw.choice(("1F1B", "groups", "interleaved"))
    chunks, groups = 1, None
    if kind == "groups":
        groups = [draw.randint(1, 3) for _ in range(draw.randint(1, max(1, most // 2)))]
        while sum(groups) > most:
            groups.pop()
        groups = groups or [1]
        count = sum(groups)
    elif kind == "interleaved":
        stages = max(2, min(stages, most))
        chunks, count = draw.randint(2, 3), stages * draw.randint(1, max(1, most // stages))
    else:
        count = draw.randint(1, most)
    loads = []
    for _ in range(count):
        tokens = draw.randint(0, 40)
        shared = draw.randint(0, tokens) if groups else 0
        work, earlier = draw.randint(0, 1000) if tokens else 0, draw.randint(0, 60) if shared else 0
        loads.append(Load(tokens, work, shared, earlier, linear=draw.randint(0, tokens)))
    made = tuple(chunk_of(draw, most_layers) for _ in range(chunks))
    ends, loss = draw.randint(0, 30), draw.choice((0, draw.randint(0, 300)))
    sizes = {"ends": ends, "loss": loss, "keys": draw.randint(0, 10), "attended": draw.randint(0, 10)}
    memory = StageMemory(chunks=made, **sizes)
    order = grouped_orders(stages, groups or (1,) * count, chunks)[draw.randrange(stages)]
    return order, loads, memory


def bytes_of(case: Case, share: float) -> tuple[int, int]:
    """Between what the flags hold (share 0) and what no recomputation does (1); and the first of these."""
    order, loads, memory = case
    least = max(held_bytes(order, loads, memory, by_the_flags(loads, memory)))
    whole = max(held_bytes(order, loads, memory, [[0] * len(memory.chunks) for _ in loads]))
    return least + int(share * max(0, whole - least)), least


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.floats(-0.2, 1.2))
def test_no_event_holds_more_than_is_available_and_the_fullest_is_the_peak(seed, share):
    case = order, loads, memory = case_of(seed, 12, 8)
    available, least = bytes_of(case, share)
    plan = plan_kept_layers(order, loads, memory, available)
    assert plan.fits == (available >= least)
    assert plan_kept_layers(order, loads, memory, 0).peak == least
    assert plan.peak == max(held_bytes(order, loads, memory, plan.recomputed))
    if plan.fits:
        assert plan.peak <= available
    else:
        assert list(map(list, plan.recomputed)) == by_the_flags(loads, memory)
    for numbers in plan.recomputed:
        for number, chunk in zip(numbers, memory.chunks, strict=True):
            assert 0 <= number <= chunk.recomputed <= chunk.layers


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_with_all_the_memory_nothing_is_recomputed_and_with_less_than_the_flags_need_they_run(seed):
    order, loads, memory = case = case_of(seed, 12, 8)
    whole = plan_kept_layers(order, loads, memory, max(bytes_of(case, 1)) + 10**6)
    assert not any(map(sum, whole.recomputed))
    least = bytes_of(case, 0)[1]
    for available in (min(0, least - 1), least - 1):
        plan = plan_kept_layers(order, loads, memory, available)
        assert list(map(list, plan.recomputed)) == by_the_flags(loads, memory)
        assert (plan.peak, plan.fits) == (least, False)


def test_nearly_all_that_can_be_saved_is_saved():
    """Over all plans of tiny steps, whose micro-batches differ more than documents ever make them."""
    shares, alike = [], []
    for seed in range(150):
        order, loads, memory = case = case_of(seed, 4, 2)
        if len(loads) * len(memory.chunks) > 6:
            continue
        for share in (0.15, 0.4, 0.7):
            available, _ = bytes_of(case, share)
            plan = plan_kept_layers(order, loads, memory, available)
            best = most_saved(order, loads, memory, available)
            if best > 0:
                shares.append(saved_work(loads, memory, plan.recomputed) / best)
                alike += [] if any(chunk.unlike for chunk in memory.chunks) else shares[-1:]
    assert len(shares) > 150 and len(alike) > 50
    assert min(alike) >= 0.6 and min(shares) >= 0.4 and sum(shares) / len(shares) >= 0.98


def test_more_memory_recomputes_no_more_work_but_for_a_tenth():
    """What is kept is chosen anew, so a little more memory may be used a little worse."""
    dips = []
    for seed in range(60):
        order, loads, memory = case = case_of(seed, 12, 8)
        everything = saved_work(loads, memory, [[0] * len(memory.chunks) for _ in loads])
        most = 0
        for part in range(13):
            available, _ = bytes_of(case, part / 12)
            plan = plan_kept_layers(order, loads, memory, available)
            saved = saved_work(loads, memory, plan.recomputed)
            dips.append((most - saved) / max(1, everything))
            most = max(most, saved)
    assert max(dips) <= 0.1 and sum(dip > 0 for dip in dips) <= 0.02 * len(dips)


def test_the_example_keeps_the_first_and_the_last_micro_batch():
    chunk = ModelChunk(layers=1, recomputed=1, kept=10, input=1, floor=1)
    loads = [Load(tokens, tokens) for tokens in (4, 4, 8)]
    order = grouped_orders(2, (1,) * 3)[0]
    plan = plan_kept_layers(order, loads, StageMemory(chunks=(chunk,)), 90)
    assert plan.recomputed == ((0,), (1,), (0,)) and plan.peak == 84
    assert plan_kept_layers(order, loads, StageMemory(chunks=(chunk,)), 0).peak == 12


def test_loads_count_what_one_context_rank_holds_of_a_document_in_chunks():
    column = [
        MicroBatch((Piece(0, 7, 0, 6), Piece(0, 3, 0, 2)), 90),
        MicroBatch((Piece(0, 7, 6, 10, prefix=6),), 80),
        MicroBatch((Piece(0, 4, 0, 5),), 70),
    ]
    assert loads_of(column, 4, 2) == [
        *(Load(4, 90, 3, 0, 8 * 1024), Load(2, 80, 2, 3, 4 * 1024), Load(4, 70, linear=5 * 1024))
    ]


def test_ranks_that_meet_plan_by_the_largest_of_each_and_keep_the_same():
    columns = [[Load(4, 9, 3, 1, 5), Load(2, 5)], [Load(3, 8, 0, 2, 6), Load(6, 1, 4)]]
    assert joined_loads(columns) == [Load(4, 17, 3, 2, 11), Load(6, 6, 4)]
    chunk = ModelChunk(layers=2, recomputed=2, kept=10, input=1, floor=2)
    stages = [StageMemory(chunks=(chunk,))] * 2
    met = plan_step_layers(columns, [None, None], stages, [75, 75], in_step=True)
    assert met[0] == met[1]
    apart = plan_step_layers(columns, [None, None], stages, [75, 75])
    assert apart[0] != apart[1]
    assert recomputed_array(apart).shape == (2, 2, 1, 2)
    assert [numbers[0] for numbers in apart[1][0].recomputed] == recomputed_array(apart)[1, 0, 0].tolist()
