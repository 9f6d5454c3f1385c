"""Layouts, and shard plans of documents in chunks: every token and prefix once, and every query finds all its keys."""

from dataclasses import replace

import numpy as np
import pytest
from attention_oracle import any_plans
from chunk_oracle import is_real, iterations, shard_plans, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import validate
from sharding_oracle import by_the_calls, cp_and_lengths, mix, predict, sequences

from wlb_megatron.pipeline.orders import links_of
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece
from wlb_megatron.registry import SHARDINGS
from wlb_megatron.sharding.attention_calls import attention_layout, cached_keys
from wlb_megatron.sharding.cut import cut_plans, digest_of_cuts, shard, shard_all
from wlb_megatron.sharding.segments import Chunks, ShardPlan
from wlb_megatron.workload.kernel_table import h100

each_kind = pytest.mark.parametrize("kind", SHARDINGS)
SIZES = st.sampled_from([1, 2, 3, 4])


@each_kind
@settings(deadline=None, max_examples=60)
@given(micro_batches=iterations(), cp=SIZES)
def test_every_token_is_on_one_rank_once_and_every_prefix_is_where_it_was_made(kind, micro_batches, cp):
    padded, plans = shard_plans(micro_batches, cp, kind)
    made = [set() for _ in range(cp)]
    for pieces, plan in zip(padded, plans, strict=True):
        assert plan.tokens_per_rank == (plan.tokens // cp,) * cp
        for rank in range(cp):
            cached = tokens_of(pieces, plan.cached(rank))
            assert len(set(cached)) == len(cached) and made[rank].issuperset(cached)
        everywhere = [token for rank in range(cp) for token in tokens_of(pieces, plan.cached(rank))]
        prefixes = [(p.document, t) for p in pieces for t in range(p.start - p.prefix, p.start)]
        assert sorted(everywhere) == sorted(prefixes)
        for rank in range(cp):
            held = [token for token in tokens_of(pieces, plan.ranks[rank]) if is_real(token)]
            assert not any(made[other] & set(held) for other in range(cp))
            made[rank] |= set(held)
    trained = [(p.document, t) for pieces in micro_batches for p in pieces for t in range(p.start, p.end)]
    assert sorted(token for tokens in made for token in tokens) == sorted(trained)


@each_kind
@settings(deadline=None, max_examples=20)
@given(first=iterations(), second=iterations(), cp=SIZES)
def test_ranks_that_are_cut_together_are_cut_as_one_by_one(kind, first, second, cp):
    columns = [rows + [[Piece(0, 200, 0, 3)]] * (5 - len(rows)) for rows in (first, second)]
    grid = tuple(tuple(MicroBatch(tuple(pieces), 1) for pieces in row) for row in zip(*columns, strict=True))
    (rows,) = cut_plans([IterationPlan(0, (), grid, ())], cp, cp, kind, h100())
    for column, plans in zip(columns, zip(*rows, strict=True), strict=True):
        alone = shard_plans(column, cp, kind)[1]
        assert digest_of_cuts(plans) == digest_of_cuts(alone) and [p.kind for p in plans] == [
            p.kind for p in alone
        ]
        assert [p.chunks and p.chunks.micro_batch for p in plans] == [
            p.chunks and p.chunks.micro_batch for p in alone
        ]


def sources_of(padded, plans, cp, window):
    """Of each micro-batch and rank, the tokens of its rows and then of what it takes from its cache, which it fills."""
    caches = [{} for _ in range(cp)]
    for index, (pieces, plan) in enumerate(zip(padded, plans, strict=True)):
        sources = []
        for rank in range(cp):
            own = tokens_of(pieces, plan.ranks[rank])
            use = cached_keys(plan, rank, window)
            taken = []
            for take in use.takes if use else ():
                entry = caches[rank][take.micro_batch, take.piece]
                assert len(entry) == take.rows
                taken += entry
            assert taken == tokens_of(pieces, plan.cached(rank, window))
            for keep in use.keeps if use else ():
                caches[rank][index, keep.piece] = (
                    own if keep.rows is None else [own[row] for row in keep.rows]
                )
            sources.append(own + taken)
        yield pieces, plan, sources


def arrivals(exchanges, sources, rank):
    """The buffer of keys of a rank, when tokens travel instead of keys."""
    arrived = []
    for exchange, source, count in zip(exchanges, sources, exchanges[rank].recv_counts, strict=True):
        before = sum(exchange.send_counts[:rank])
        rows = exchange.send_rows[before : before + exchange.send_counts[rank]]
        arrived += [source[row] for row in rows.tolist()]
        assert len(rows) == count
    own = sources[rank]
    return [arrived[~at] if at < 0 else own[at] for at in exchanges[rank].place.tolist()]


def keys_of(layout, own, buffer):
    """Of each row of the rank, the tokens whose keys it sees by the calls of full layers."""
    seen = [[] for _ in own]
    if layout.single is not None:
        return near_keys(layout.single.call, None, own, buffer)
    for queries, keys in sequences(layout.diagonals):
        for nth, row in enumerate(queries):
            seen[row] += own[keys][: nth + 1]
    for queries, keys in sequences(layout.rectangles) if layout.rectangles else []:
        document, first = buffer[keys][0]
        assert buffer[keys] == [(document, first + nth) for nth in range(len(buffer[keys]))]
        for query in queries:
            seen[layout.query_rows[query]] += buffer[keys]
    return seen


def near_keys(call, window, own, buffer):
    """The same of one bottom-right call with a window."""
    seen = [[] for _ in own]
    for queries, keys in sequences(call):
        of = buffer[keys]
        for nth, row in enumerate(queries):
            last = len(of) - len(queries) + nth
            seen[row] += of[0 if window is None else max(0, last - window) : last + 1]
    return seen


def check_layouts(pieces, plan, sources, layouts):
    """Followed by hand, each rank's layout gives every token its keys, once."""
    exchanges = [(one.single or one).exchange for one in layouts]
    firsts = {piece.document: piece.start - piece.prefix for piece in pieces}
    for rank, layout in enumerate(layouts):
        own = tokens_of(pieces, plan.ranks[rank])
        buffer = arrivals(exchanges, sources, rank)
        assert layout.single is not None or len(set(buffer)) == len(buffer), "two rectangles share keys"
        for (document, token), seen in zip(own, keys_of(layout, own, buffer), strict=True):
            assert sorted(seen) == [(document, t) for t in range(firsts[document], token + 1)]
        assert layout.positions.tolist() == [token - firsts[document] for document, token in own]
        assert layout.longest == max(piece.prefix + piece.tokens for piece in pieces)


def check_whole(plan):
    """The same of a plan of whole documents."""
    pieces = [Piece(0, document, 0, tokens) for document, tokens in enumerate(plan.lengths.tolist())]
    sources = [tokens_of(pieces, rows) for rows in plan.ranks]
    check_layouts(pieces, plan, sources, [attention_layout(plan, rank) for rank in range(plan.cp_size)])


@each_kind
@settings(deadline=None, max_examples=15)
@given(mix=cp_and_lengths(sizes=(1, 2, 3, 4, 8)))
def test_following_a_layout_gives_every_token_its_keys_once(kind, mix):
    cp, lengths = mix
    check_whole(shard(lengths, cp, kind))


@settings(deadline=None, max_examples=100)
@given(plan=any_plans(cp_sizes=(1, 2, 3, 4)))
def test_any_plan_at_all_has_an_exact_layout(plan):
    check_whole(plan)


def test_every_run_of_earlier_keys_is_one_rectangle_of_all_queries_that_see_it():
    # Rank 1 holds [1, 2) and [4, 6) of a piece of 8: key 0 is seen by three rows, keys 1..3 by the last two.
    ranks = np.array([[0, 0, 1], [0, 2, 4], [0, 6, 8]]), np.array([[0, 1, 2], [0, 4, 6]])
    layout = attention_layout(ShardPlan(np.array([8]), ranks), 1)
    assert layout.query_rows.tolist() == [0, 1, 2, 1, 2]
    assert layout.rectangles.cu_seqlens_q.tolist() == [0, 3, 5]
    assert layout.rectangles.cu_seqlens_kv.tolist() == [0, 1, 4]
    assert (layout.rectangles.max_q, layout.rectangles.max_kv) == (3, 3)
    assert attention_layout(shard([8], 1, "per-document"), 0).rectangles is None
    with pytest.raises(ValueError, match="lower max_tokens"):  # more than int32 offsets reach
        attention_layout(shard([2**31], 2, "per-document"), 0)


@each_kind
@settings(deadline=None, max_examples=40)
@given(micro_batches=iterations(), cp=SIZES, window=st.sampled_from([1, 5, 30]))
def test_every_query_sees_all_keys_of_its_document_before_it_once(kind, micro_batches, cp, window):
    padded, plans = shard_plans(micro_batches, cp, kind)
    for pieces, plan, sources in sources_of(padded, plans, cp, None):
        check_layouts(pieces, plan, sources, [attention_layout(plan, rank, window) for rank in range(cp)])
    for pieces, plan, sources in sources_of(padded, plans, cp, window):
        layouts = [attention_layout(plan, rank, window).window for rank in range(cp)]
        for rank, layout in enumerate(layouts):
            own = tokens_of(pieces, plan.ranks[rank])
            buffer = arrivals([one.exchange for one in layouts], sources, rank)
            firsts = {piece.document: piece.start - piece.prefix for piece in pieces}
            for (document, token), seen in zip(own, near_keys(layout.call, window, own, buffer), strict=True):
                first = max(firsts[document], token - window)
                assert sorted(seen) == [(document, t) for t in range(first, token + 1)]


@each_kind
@settings(deadline=None, max_examples=30)
@given(micro_batches=iterations(most=400), cp=SIZES)
def test_a_prediction_counts_what_travels_of_prefixes(kind, micro_batches, cp):
    table = replace(h100(), tile_key=0.0)
    for plan in shard_plans(micro_batches, cp, kind, table)[1]:
        predicted = predict(replace(plan, one_call=False), table)
        for rank in range(cp):
            assert abs(predicted[rank] - by_the_calls(replace(plan, one_call=False), rank, table)) <= 1


@settings(deadline=None, max_examples=40)
@given(micro_batches=iterations(most=30000), cp=st.sampled_from([2, 4]))
def test_the_choice_is_never_predicted_slower_than_any_it_had(micro_batches, cp):
    for plan in shard_plans(micro_batches, cp, "adaptive")[1]:
        others = [mix(plan.lengths, cp, h100(), plan.prefixes).ranks]
        for other in ("per-sequence", "per-document"):
            rows = shard(plan.lengths, cp, other).ranks
            others.append(tuple(_seen_from(part, plan.prefixes) for part in rows))
        two_calls = [replace(plan, ranks=ranks, one_call=False) for ranks in (plan.ranks, *others)]
        chosen, *times = (predict(one, h100()).max() for one in two_calls)
        assert chosen <= min(times)


def test_a_chunk_is_cut_evenly_in_work_though_its_tokens_see_a_prefix():
    # 4,096 tokens after 12,288: pairs of queries and keys differ by what a token more or less in a slot makes.
    pieces = [[Piece(0, 0, 0, 12288)], [Piece(0, 0, 12288, 16384, 12288)]]
    for kind in ("per-document", "adaptive"):
        plan = shard_plans(pieces, 4, kind)[1][1]
        pairs = [int((rows[:, 2] ** 2 - rows[:, 1] ** 2).sum()) for rows in plan.ranks]
        assert sum(pairs) == 16384**2 - 12288**2
        assert max(pairs) < 1.01 * min(pairs)


def test_the_work_of_a_late_chunk_counts_its_prefix_where_ranks_are_levelled():
    """Beside documents that are as long but see nothing before them, it is not taken for one of them."""
    first = [Piece(0, 0, 0, 65536)]
    second = [Piece(0, 0, 65536, 69632, 65536), *(Piece(0, d, 0, 4096) for d in range(1, 8))]
    plan = shard_plans([first, second], 4, "adaptive")[1][1]
    times = predict(plan, h100())
    assert times.max() < 1.1 * times.mean()
    alone = shard_plans([[Piece(0, d, 0, 4096) for d in range(8)]], 4, "hybrid")[1][0]
    ranks = tuple(_seen_from(rows, plan.prefixes) for rows in alone.ranks)
    unaware = replace(plan, ranks=ranks, one_call=False)
    validate(unaware)
    assert times.max() < 0.8 * predict(unaware, h100()).max()


def _seen_from(rows, prefixes):
    """Segments of pieces that have no prefix, as they are with one."""
    return rows + np.outer(prefixes[rows[:, 0]], (0, 1, 1))


def test_keys_outside_a_window_are_not_kept():
    """The docstring's example: [0, 8) on two ranks, then [8, 12), of which [12, 14) sees enough."""
    pieces = [[Piece(0, 5, 0, 8)], [Piece(0, 5, 8, 12, 8)], [Piece(0, 5, 12, 14, 12)]]
    plans = shard_plans(pieces, 2, "per-document")[1]
    kept = [[cached_keys(plans[0], rank, window).keeps for rank in range(2)] for window in (None, 3)]
    assert [[keep.rows for keep in keeps] for keeps in kept[0]] == [[None], [None]], "all four rows"
    assert [[keep.rows.tolist() for keep in keeps] for keeps in kept[1]] == [[[2, 3]], [[3]]]
    takes = [[cached_keys(plans[1], rank, window).takes for rank in range(2)] for window in (None, 3)]
    assert takes == [[((0, 0, 4),), ((0, 0, 4),)], [((0, 0, 2),), ((0, 0, 1),)]]
    assert cached_keys(plans[2], 0).takes == ((0, 0, 4), (1, 0, 2))
    assert cached_keys(plans[2], 0, 3).takes == ((1, 0, 1),) and cached_keys(plans[2], 0).keeps == ()


@each_kind
def test_without_prefixes_plans_are_what_they_were(kind):
    lengths = [[9, 30, 1], [17, 6, 9]]
    plain = shard_all(lengths, 4, kind)
    assert links_of([[Piece(0, d, 3, 3 + n) for d, n in enumerate(each)] for each in lengths]) == ()
    assert all(plan.chunks is None and cached_keys(plan, 0) is None for plan in plain)
    # A document in chunks changes the plans of those that share it, not of others.
    links = links_of([[Piece(0, 9, 0, 8)], [Piece(0, 9, 8, 12, 8)], [Piece(0, 1, 0, 4)]])
    shared = shard_all([[8], [4], [4]], 2, kind, links=links)
    alone = shard_all([[8], [4], [4]], 2, kind)
    assert [plan.chunks is None for plan in shared] == [False, False, True]
    for at in (0, 2):
        assert all(np.array_equal(a, b) for a, b in zip(shared[at].ranks, alone[at].ranks, strict=True))


@pytest.mark.parametrize(
    "micro_batches",
    [
        [[Piece(0, 0, 4, 8, 4)]],
        [[Piece(0, 0, 0, 4), Piece(0, 0, 4, 8, 4)]],
        [[Piece(0, 0, 0, 4)], [Piece(0, 0, 4, 8, 3)]],
        [[Piece(0, 0, 0, 4)], [Piece(1, 0, 4, 8, 4)]],
        [[Piece(0, 0, 0, 4)], [Piece(0, 0, 4, 8, 4)], [Piece(0, 0, 4, 9, 4)]],
        [[Piece(0, 0, 0, 4)], [Piece(0, 0, 4, 8, 4)], [Piece(0, 0, 8, 9, 4)]],
    ],
    ids=[
        "nowhere",
        "in the same micro-batch",
        "in part",
        "of another epoch",
        "taken twice",
        "the last part alone",
    ],
)
def test_a_prefix_that_earlier_micro_batches_do_not_hold_is_refused(micro_batches):
    with pytest.raises(ValueError, match="which earlier micro-batches of the rank do not hold as one prefix"):
        links_of(micro_batches)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[:-1], "prefix token 4 is held not at all"),
        (lambda rows: np.concatenate((rows, rows[:1])), "prefix token 0 is held twice"),
        (
            lambda rows: np.add(rows, (0, 0, 0, 1, 0, 0)),
            "micro-batch 1 is to take keys of one that is not before it",
        ),
        (
            lambda rows: np.add(rows, (1, 0, 0, 0, 0, 0)),
            "a row of cached keys is empty, or of a piece outside 0..0",
        ),
    ],
)
def test_a_plan_with_wrong_prefixes_is_told_what_is_wrong(change, says):
    rows = np.array([[0, 0, 4, 0, 0, 8], [0, 4, 8, 0, 0, 8]])
    plan = ShardPlan(
        np.array([2]), (np.array([[0, 8, 10]]),), chunks=Chunks(1, np.array([8]), (rows,), np.array([0]))
    )
    validate(plan)
    with pytest.raises(ValueError, match=says):
        validate(replace(plan, chunks=replace(plan.chunks, cached=(change(rows),))))
