"""Groups consecutive micro-batches that share documents in chunks. A group's backwards run last first."""

from __future__ import annotations

from collections.abc import Sequence

from wlb_megatron.plan import Piece


def groups(micro_batches: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
    """Sizes of the groups of one data-parallel rank's micro-batches, in order.

    Micro-batches are in one group if a document in chunks connects them, directly or through others. A piece with a
    prefix continues a piece of an earlier micro-batch that ends where it starts and belongs to the same part of the
    document (start - prefix is equal). Pieces (document, start, end, prefix) in 4 micro-batches:
    [(7, 0, 4, 0)] [(7, 4, 6, 4), (8, 0, 2, 0)] [(9, 0, 5, 0)] [(9, 5, 6, 5)] make groups of 2, 2.
    Raises ValueError where a prefix has no earlier part, or micro-batches in a group are not consecutive.
    """
    wanted_ends = {
        (epoch, document, start)
        for row in micro_batches
        for epoch, document, start, _, prefix in row
        if prefix
    }
    chunked = {document for _, document, _ in wanted_ends}
    ends: dict[tuple[int, int, int], tuple[int, int]] = {}  # micro-batch and start of the document's part
    parents = list(range(len(micro_batches)))  # the first micro-batch connected to each, so far as is known
    for index, row in enumerate(micro_batches if wanted_ends else ()):
        for piece in row:
            if not piece[4]:
                continue
            epoch, document, start, _, prefix = piece
            before, part = ends.get((epoch, document, start), (-1, 0))
            if before < 0 or part != start - prefix:
                raise ValueError(
                    f"{piece} of micro-batch {index} continues no piece of an earlier micro-batch"
                )
            _join(parents, before, index)
        for epoch, document, start, end, prefix in row:
            if document in chunked and (epoch, document, end) in wanted_ends:
                ends[epoch, document, end] = index, start - prefix
    firsts = [_first(parents, index) for index in range(len(parents))]
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
    continued = {
        (piece.epoch, piece.document, piece.start) for row in micro_batches for piece in row if piece.prefix
    }
    if not continued:
        return [-1] * len(micro_batches)
    return [
        next(
            (p.document for p in row if p.prefix or (p.epoch, p.document, p.end) in continued),
            -1,
        )
        for row in micro_batches
    ]


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


def _first(parents: list[int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index


def _join(parents: list[int], first: int, second: int) -> None:
    root, other_root = sorted((_first(parents, first), _first(parents, second)))
    parents[other_root] = root
