"""Which corpora a part draws from, by each of Megatron's data flags, against Megatron's own reading of them."""

import argparse
import json
from typing import Any

import pytest
from megatron_runs import write_corpus

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags.data_paths import DataPaths, documents

PARTS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Three corpora of 10, 20 and 30 documents."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, count in (("a", 10), ("b", 20), ("c", 30)):
        write_corpus(folder / name, [5 + at % 3 for at in range(count)])
    return [str(folder / name) for name in "abc"]


def arguments(**settings: Any) -> argparse.Namespace:
    """Megatron's data flags as it leaves them when they are not given."""
    flags = ("data_path", "data_args_path", "per_split_data_args_path", "split")
    none: dict[str, Any] = dict.fromkeys((*flags, *(f"{part}_data_path" for part in PARTS)))
    return argparse.Namespace(**none | settings)


def megatrons(args: argparse.Namespace, part: str) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of a part as Megatron's GPT dataset gets them."""
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split

    common, per_split = get_blend_and_blend_per_split(args)
    return common if per_split is None else per_split[PARTS.index(part)]


def check(args: argparse.Namespace, counts_of_parts: tuple[list[int], ...]) -> None:
    """Each part's corpora and weights are Megatron's, and have so many documents."""
    for part, counts in zip(PARTS, counts_of_parts, strict=True):
        blend, corpora = documents(DataPaths.of(args), part) or pytest.fail(f"no {part}")
        assert (blend.paths, blend.weights) == megatrons(args, part)
        assert [len(corpus.lengths) for corpus in corpora] == counts


def test_data_path_and_the_same_text_in_a_file_are_one_blend_cut_by_split(prefixes, tmp_path):
    text = f"0.3 {prefixes[0]}\n0.7 {prefixes[1]}\n"
    (tmp_path / "blend.txt").write_text(text)
    for args in (
        arguments(data_path=text.split(), split="80,10,10"),
        arguments(data_args_path=str(tmp_path / "blend.txt"), split="80,10,10"),
    ):
        check(args, ([8, 16], [1, 2], [1, 2]))


def test_parts_of_the_same_files_share_what_was_read_of_them(prefixes):
    opened: dict[Any, Any] = {}
    args = arguments(data_path=prefixes, split="80,10,10")
    parts = [documents(DataPaths.of(args), part, opened) for part in PARTS]
    assert all(opened_part is not None and opened_part[0] is opened[tuple(prefixes)] for opened_part in parts)
    apart = arguments(train_data_path=prefixes[:1], valid_data_path=prefixes[1:])
    of_parts = [documents(DataPaths.of(apart), part, opened)[0].paths for part in PARTS[:2]]
    assert of_parts == [prefixes[:1], prefixes[1:]]


def test_parts_with_paths_of_their_own_are_taken_whole(prefixes, tmp_path):
    a, b, c = prefixes
    parts = {"train": ["1", a, "3", b], "valid": [c], "test": [b]}
    (tmp_path / "lists.json").write_text(json.dumps(parts))
    (tmp_path / "texts.json").write_text(json.dumps({part: " ".join(parts[part]) for part in PARTS}))
    for args in (
        arguments(**{f"{part}_data_path": parts[part] for part in PARTS}),
        arguments(per_split_data_args_path=str(tmp_path / "lists.json")),
        arguments(per_split_data_args_path=str(tmp_path / "texts.json"), split="969,30,1"),
    ):
        check(args, ([10, 20], [30], [20]))


def test_a_part_without_documents_is_none(prefixes, tmp_path):
    (tmp_path / "parts.json").write_text(json.dumps({"train": [prefixes[0]], "valid": None}))
    only_train = arguments(per_split_data_args_path=str(tmp_path / "parts.json"))
    assert documents(DataPaths.of(only_train), "train") and not documents(DataPaths.of(only_train), "valid")
    assert documents(DataPaths.of(arguments(train_data_path=[prefixes[0]])), "test") is None
    assert documents(DataPaths.of(arguments(data_path=[prefixes[0]])), "valid") is None
    assert documents(DataPaths.of(arguments(data_path=[prefixes[0]], split="1,0,0")), "valid") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read --per-split-data-args-path .*: No such file"),
        ("{", "is no JSON"),
        ('{"valid": ["x"]}', "names no training corpus"),
        ('["x"]', "names no training corpus"),
        ('{"train": ["nowhere"]}', "cannot read index"),
    ],
)
def test_a_file_of_parts_that_cannot_be_used_is_one_line(text, words, tmp_path):
    if text is not None:
        (tmp_path / "parts.json").write_text(text)
    with pytest.raises(WlbError, match=words) as error:
        documents(DataPaths.of(arguments(per_split_data_args_path=str(tmp_path / "parts.json"))), "train")
    assert "\n" not in str(error.value)
