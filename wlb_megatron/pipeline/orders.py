"""Groups of consecutive micro-batches that share documents in chunks, and what each pipeline stage runs, in order.

That is Megatron's 1F1B or interleaved order, or either with a group's backwards last first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from wlb_megatron.plan import Piece

_PREFIX = itemgetter(4)  # of pieces; faster than access by name


class Step(NamedTuple):
    """A stage's forward or backward of one micro-batch through one of its model chunks."""

    micro_batch: int
    chunk: int
    backward: bool


def grouped_orders(stages: int, group_sizes: Sequence[int], chunks: int = 1) -> list[list[Step]]:
    """Each stage's steps in order if micro-batches form consecutive groups of the given sizes.

    Forwards run in order. Backwards run group by group, the last micro-batch of a group first: a document in chunks
    needs the gradients from its later chunks before its earlier chunks' backward. Groups of 1 are Megatron's own order.
    chunks: model chunks of a stage, see `running_order`; the following is for 1.

    Every stage runs max(group_sizes) - 1 more forwards ahead than 1F1B does: stage p of P has run
    n + (P - p - 1) + max(group_sizes) - 1 forwards (at most all) before its n-th backward, n from 1. All of a group's
    forwards then precede its backwards, and a forward and a backward still alternate on all stages. So no stage waits
    for groups, and the step has 1F1B's bubble. A stage holds (P - p - 1) + max(group_sizes) micro-batches at most.
    One stage has no neighbor to keep busy: it runs each group's forwards, then its backwards.

    2 stages, groups of 2, 1: F0 F1 F2 B1 B0 B2 on stage 0, F0 F1 B1 F2 B0 B2 on stage 1.
    Raises ValueError where a size is below 1, or interleaved micro-batches are fewer than the stages.
    """
    if min(stages, chunks, *group_sizes, len(group_sizes)) < 1:
        raise ValueError(
            f"{stages} stages of {chunks} model chunks, groups of {list(group_sizes)} micro-batches: each must be at "
            "least 1"
        )
    plan = running_order(stages, tuple(group_sizes), chunks)
    forwards = [Step(m, chunk, False) for m, chunk in plan.table]
    # They follow the table of the forwards, with the model chunks in reverse and the turns for micro-batches.
    backwards = [Step(plan.turns[n], chunks - 1 - chunk, True) for n, chunk in plan.table]
    if stages == chunks == 1:
        bounds = list(accumulate(group_sizes, initial=0))
        return [[s for a, b in pairwise(bounds) for s in (*forwards[a:b], *backwards[a:b])]]
    return [_order(forwards, backwards, plan.ahead(stages, stage)) for stage in range(stages)]


def backward_turns(group_sizes: Sequence[int]) -> list[int]:
    """The micro-batch of each backward: the last of a group first. Sizes 2, 1 give 1 0 2."""
    bounds = list(accumulate(group_sizes, initial=0))
    return [m for begin, end in pairwise(bounds) for m in reversed(range(begin, end))]


def waits_of(stages: int, group_sizes: tuple[int, ...], chunks: int) -> Hashable:
    """What decides which forwards, and which backwards by their turns, a step's stages wait for: alike for groups of 2,
    1, 1 and of 1, 1, 2."""
    if stages == 1:
        return group_sizes
    plan = running_order(stages, group_sizes, chunks)
    return plan.table, plan.lead


class RunningOrder(NamedTuple):
    """What a step runs, alike on all stages but for the number of forwards ahead.

    table: (micro-batch, model chunk) of each forward. turns: the micro-batch of a model chunk's n-th backward. lead:
    forwards that the last stage runs before its first pair of a forward and a backward. further: so many more on each
    stage before it.
    """

    table: tuple[tuple[int, int], ...]
    turns: tuple[int, ...]
    lead: int
    further: int

    def ahead(self, stages: int, stage: int) -> int:
        """Forwards of a stage before its first pair of a forward and a backward."""
        return min(len(self.table), self.further * (stages - stage - 1) + self.lead)


@lru_cache(maxsize=256)
def running_order(stages: int, group_sizes: tuple[int, ...], chunks: int) -> RunningOrder:
    """Megatron's schedule with the backwards of a group last first in each model chunk. With one chunk it is 1F1B, else
    the interleaved schedule, of which the following is.

    A block of micro-batches passes model chunk 0, then chunk 1, ... Megatron's blocks have as many micro-batches as
    there are stages. Here blocks hold whole groups if that needs a shorter lead. Each has at least `stages`
    micro-batches, because the first stage continues what the last one sends.

    All stages and model chunks take the same turns. So what passes between stages is Megatron's own, renamed. The one
    new condition is that a micro-batch's forward through the last model chunk comes before its backward there. With
    F(m) the place of that forward in the table, and B(n) the place of the n-th backward, the lead is the largest
    F(turns[n]) - B(n). A lead shorter by one fails.

    2 stages, 2 model chunks, groups of 1, 2, 1: as two blocks of 2 the forwards are 0 1 0 1 2 3 2 3. Backward 1 (at
    place 1) takes micro-batch 2, whose last forward has place 6, so the lead is 5. One block of 4 has lead 5, too: its
    forwards are 0 1 2 3 0 1 2 3. With groups of 2 and 2 the lead of two blocks is 3.
    Raises ValueError where micro-batches are fewer than the stages.
    """
    total, turns = sum(group_sizes), tuple(backward_turns(group_sizes))
    if chunks == 1:
        return _in_blocks((total,), turns, chunks)
    if total < stages:
        raise ValueError(
            f"{total} micro-batches of an interleaved schedule are fewer than its {stages} stages"
        )
    choices = [_whole_groups(stages, group_sizes, chunks)]
    if total % stages == 0:
        choices.append((stages,) * (total // stages))
    return min((_in_blocks(blocks, turns, chunks) for blocks in choices), key=lambda choice: choice.lead)


def _in_blocks(blocks: Sequence[int], turns: tuple[int, ...], chunks: int) -> RunningOrder:
    bounds = list(accumulate(blocks, initial=0))
    table = tuple((m, c) for begin, end in pairwise(bounds) for c in range(chunks) for m in range(begin, end))
    first, last = (
        {m: place for place, (m, c) in enumerate(table) if c == chunk} for chunk in (0, chunks - 1)
    )
    return RunningOrder(table, turns, max(last[m] - first[n] for n, m in enumerate(turns)), min(chunks, 2))


def _whole_groups(stages: int, group_sizes: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Sizes of blocks of whole groups with the least lead, and of those the shortest blocks.

    A block of n micro-batches whose largest group has g needs a lead of (chunks - 1) * n + g - 1.
    """
    ends = list(accumulate(group_sizes, initial=0))
    # Lead, sum of squares and sizes up to there.
    best_blocks: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for end in range(1, len(ends)):
        largest_group = 0
        for begin in reversed(range(end)):
            size, largest_group = ends[end] - ends[begin], max(largest_group, group_sizes[begin])
            block_lead = (chunks - 1) * size + largest_group - 1
            if end in best_blocks and block_lead > best_blocks[end][0]:
                break
            if size >= stages and begin in best_blocks:
                lead, squares, sizes = best_blocks[begin]
                option = max(lead, block_lead), squares + size * size, (*sizes, size)
                best_blocks[end] = min(best_blocks.get(end, option), option)
    return best_blocks[len(ends) - 1][2]


def _order(forwards: list[Step], backwards: list[Step], warm_up: int) -> list[Step]:
    """`warm_up` forwards (at most all), then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards[warm_up:]) :]


class Link(NamedTuple):
    """Piece `piece` of `micro_batch` continues where piece `earlier_piece` of micro-batch `earlier` ends."""

    micro_batch: int
    piece: int
    earlier: int
    earlier_piece: int


def links_of(micro_batches: Sequence[Sequence[Piece]]) -> tuple[Link, ...]:
    """The links of one data-parallel rank's micro-batches, in order; empty if no piece has a prefix.

    Raises ValueError if earlier micro-batches do not hold exactly a piece's prefix (its document up to the piece's
    start), or if two pieces have the same prefix.
    """
    # Most plans have no chunks, and in the others few documents are in chunks: that is seen fast.
    if not any(any(map(_PREFIX, pieces)) for pieces in micro_batches):
        return ()
    in_chunks = {document for pieces in micro_batches for _, document, _, _, prefix in pieces if prefix}
    ends: dict[tuple[int, int, int], tuple[int, int]] = {}
    links = []
    for index, pieces in enumerate(micro_batches):
        numbered = [(number, piece) for number, piece in enumerate(pieces) if piece[1] in in_chunks]
        for number, piece in numbered:
            if not piece.prefix:
                continue
            end = ends.pop((piece.epoch, piece.document, piece.start), None)
            before = None if end is None else micro_batches[end[0]][end[1]]
            if end is None or before is None or before.prefix + before.tokens != piece.prefix:
                raise ValueError(
                    f"micro-batch {index}: tokens [{piece.start}, {piece.end}) of document {piece.document} attend to "
                    f"{piece.prefix} before them, which earlier micro-batches of the rank do not hold as one prefix"
                )
            links.append(Link(index, number, *end))
        # After the loop above, because no piece continues inside its own micro-batch.
        ends |= {(piece.epoch, piece.document, piece.end): (index, number) for number, piece in numbered}
    return tuple(links)


def groups(micro_batches: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
    """Sizes of the groups of one data-parallel rank's micro-batches, in order.

    Micro-batches are in one group if a document in chunks connects them, directly or through others. Pieces (document,
    start, end, prefix) in 4 micro-batches:
    [(7, 0, 4, 0)] [(7, 4, 6, 4), (8, 0, 2, 0)] [(9, 0, 5, 0)] [(9, 5, 6, 5)] make groups of 2, 2.
    Raises ValueError where a prefix has no earlier part, or micro-batches in a group are not consecutive.
    """
    firsts = list(range(len(micro_batches)))  # the first micro-batch connected to each, so far as is known
    for link in links_of(micro_batches):
        first, second = sorted((firsts[link.earlier], firsts[link.micro_batch]))
        if first != second:
            firsts = [first if connected == second else connected for connected in firsts]
    sizes: list[int] = []
    for index, first in enumerate(firsts):
        if first == index:
            sizes.append(1)
        elif first == index - sizes[-1]:
            sizes[-1] += 1
        else:
            raise ValueError(
                f"micro-batches {first} and {index} share documents in chunks, those between them do not"
            )
    return tuple(sizes)


def documents_in_chunks(micro_batches: Sequence[Sequence[Piece]]) -> list[int]:
    """Of each of a data-parallel rank's micro-batches, the document that it has a chunk of, -1 where it has none.

    Of several, the first. Pieces (document, start, end, prefix) [(7, 0, 4, 0)] [(7, 4, 6, 4), (8, 0, 2, 0)] [(9, 0, 5,
    0)] give 7, 7, -1.
    """
    documents, links = [-1] * len(micro_batches), links_of(micro_batches)
    chunks = {place for link in links for place in (link[:2], link[2:])}
    for index, piece in sorted(chunks, reverse=True):
        documents[index] = micro_batches[index][piece].document
    return documents


def joined_groups(ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The smallest groups that contain each rank's groups: for ranks that must run the same order.

    Ranks that share experts or parameters (expert parallelism, FSDP) meet in every forward and backward.
    ranks: group sizes of each, all of the same number of micro-batches. (1, 2, 1) and (2, 1, 1) give (3, 1).
    """
    cuts = set.intersection(*({sum(sizes[:count]) for count in range(1, len(sizes) + 1)} for sizes in ranks))
    if len({sum(sizes) for sizes in ranks}) != 1:
        raise ValueError(f"groups {[list(sizes) for sizes in ranks]} are not of equally many micro-batches")
    ends = sorted(cuts)
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
