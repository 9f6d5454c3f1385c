"""Our numpy reader of .bin/.idx against the pair that Megatron's own builder writes."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations_with_replacement
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from scripts.commands import run_script
from scripts.corpus import add_corpus
from wlb_megatron.documents.indexed import IndexedCorpus, TokenFiles, read_index
from wlb_megatron.errors import WlbError
from wlb_megatron.plugin.flags import data_paths

# Each document is a list of sequences, each sequence a number of tokens.
DOCUMENTS = [[5], [3, 0, 4], [0], [1], [], [2, 2, 2], [7], []]


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype: type) -> list[list[int]]:
    """Write with Megatron's builder; returns the tokens of each document."""
    torch = pytest.importorskip("torch")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    rng = np.random.default_rng(1)
    written = []
    for sequences in documents:
        tokens: list[int] = []
        for length in sequences:
            values = rng.integers(0, 30_000, length)
            builder.add_item(torch.from_numpy(values))
            tokens += values.tolist()
        builder.end_document()
        written.append(tokens)
    builder.finalize(f"{prefix}.idx")
    return written


def index_bytes(
    lengths: npt.ArrayLike,
    offsets: npt.ArrayLike | None = None,
    bounds: npt.ArrayLike | None = None,
    code: int = 8,
    version: int = 1,
) -> bytes:
    """An .idx of 2 bytes a token. Without offsets its sequences stand in a row; without bounds each is a document."""
    sizes = np.array(lengths, "<i4")
    starts = 2 * np.cumsum([0, *sizes[:-1]]) if offsets is None else offsets
    ends = np.arange(len(sizes) + 1) if bounds is None else bounds
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(sizes), np.size(ends))
    return header + sizes.tobytes() + np.array(starts, "<i8").tobytes() + np.array(ends, "<i8").tobytes()


def write_index(path: Path, *parts: npt.ArrayLike, **more: Any) -> None:
    path.write_bytes(index_bytes(*parts, **more))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", DOCUMENTS, np.uint16)
    return tmp_path / "corpus"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.int16])
def test_documents_of_one_or_several_or_no_sequences_read_back_whole_and_in_any_range(tmp_path, dtype):
    written = write_corpus(tmp_path / "corpus", DOCUMENTS, dtype)
    reader = IndexedCorpus(tmp_path / "corpus")
    assert reader.index.lengths.dtype == np.int64
    assert reader.index.lengths.tolist() == [5, 7, 0, 1, 0, 6, 7, 0]
    assert reader.index.token_type == np.dtype(dtype)
    for document, tokens in enumerate(written):
        for start, end in combinations_with_replacement(range(len(tokens) + 1), 2):
            read = reader.read(document, start, end)
            assert read.dtype == np.int64
            assert read.tolist() == tokens[start:end]


@pytest.mark.parametrize(
    ("document", "start", "end"), [(0, 0, 6), (0, -1, 2), (0, 3, 2), (-1, 0, 0), (8, 0, 0)]
)
def test_a_range_outside_the_document_is_an_error_never_the_neighbours_tokens(corpus, document, start, end):
    with pytest.raises(IndexError):
        IndexedCorpus(corpus).read(document, start, end)


def test_offsets_equal_the_ones_that_megatron_reads(corpus: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = indexed_dataset.IndexedDataset(str(corpus))
    ours = IndexedCorpus(corpus)
    bounds = theirs.document_indices
    assert len(ours) == len(bounds) - 1
    for document in range(len(ours)):
        sequences = range(bounds[document], bounds[document + 1])
        expected = [token for i in sequences for token in theirs[i].tolist()]
        assert ours.read(document, 0, len(expected)).tolist() == expected
        assert ours.index.lengths[document] == len(expected)


def test_a_corpus_made_of_files_reads_back_in_megatron_as_their_bytes(tmp_path, capsys):
    """`python -m scripts.corpus` writes the pair without Megatron."""

    def command(line: str) -> tuple[int, str, str]:
        return run_script("corpus", add_corpus, line.split()), *capsys.readouterr()

    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = {"a.txt": b"one", "b/c.txt": bytes(range(256)), "d.txt": b""}
    for name, text in texts.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(text)
    prefix = tmp_path / "new" / "corpus"
    texts_of = f"--files {tmp_path / 'texts'} --glob *.txt"
    code, out, _ = command(f"{prefix} {texts_of}")
    assert code == 0 and "3 documents, 262 tokens" in out
    theirs = indexed_dataset.IndexedDataset(str(prefix))
    assert [theirs[at].tolist() for at in range(3)] == [[*text, 256] for text in texts.values()]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert command(f"{prefix} --files {tmp_path / 'nothing'}")[0] == 2
    (tmp_path / "file").touch()
    code, _, err = command(f"{tmp_path / 'file' / 'corpus'} {texts_of}")
    assert code == 2 and "give another PREFIX" in err


def test_prefix_idx_and_bin_name_the_same_corpus_whose_lengths_need_no_bin(corpus):
    lengths = [IndexedCorpus(f"{corpus}{suffix}").index.lengths.tolist() for suffix in ("", ".idx", ".bin")]
    assert lengths[0] == lengths[1] == lengths[2]
    corpus.with_suffix(".bin").unlink()
    assert read_index(corpus).lengths.sum() == 26


def test_boundaries_come_from_the_index_alone_and_documents_may_lie_anywhere_in_the_bin(tmp_path):
    """No end-of-document token anywhere, and one value throughout: still two documents."""
    write_index(tmp_path / "corpus.idx", [2, 3], [0, 4], [0, 1, 2])
    (tmp_path / "corpus.bin").write_bytes(np.full(5, 7, dtype="<u2").tobytes())
    reader = IndexedCorpus(tmp_path / "corpus")
    assert reader.index.lengths.tolist() == [2, 3]
    assert reader.read(1, 0, 3).tolist() == [7, 7, 7]
    write_index(tmp_path / "corpus.idx", [2, 3], [6, 0], [0, 1, 2])
    (tmp_path / "corpus.bin").write_bytes(np.arange(5, dtype="<u2").tobytes())
    reader = IndexedCorpus(tmp_path / "corpus")
    assert reader.read(0, 0, 2).tolist() == [3, 4]
    assert reader.read(1, 0, 3).tolist() == [0, 1, 2]


def _read_in_worker(reader: IndexedCorpus) -> list[int]:
    return reader.read(1, 2, 6).tolist()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_through_a_reader_opened_before_they_started_and_pickled_without_its_tokens(
    corpus, method
):
    reader = IndexedCorpus(corpus)
    expected = reader.read(1, 2, 6).tolist()
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert pool.submit(_read_in_worker, reader).result() == expected
    assert len(pickle.dumps(reader)) < 1000


@pytest.mark.parametrize("sequences", ["one", "several"])
def test_an_index_that_another_rank_checks_is_read_alike(sequences: str, tmp_path: Path) -> None:
    counts = [3, 1, 4, 2]
    bounds = [0, 1, 2, 3, 4] if sequences == "one" else [0, 0, 3, 4, 4]
    write_index(tmp_path / "corpus.idx", counts, [0, 6, 8, 16], bounds)
    (tmp_path / "corpus.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    checked, trusting = (IndexedCorpus(tmp_path / "corpus", trusted=trusted) for trusted in (False, True))
    assert trusting.index.lengths.tolist() == checked.index.lengths.tolist()
    assert trusting.index.offsets.tolist() == checked.index.offsets.tolist()
    # What it does not read cannot be found wrong; what it does is checked as ever.
    write_index(tmp_path / "corpus.idx", counts, [0, 6, -8, 16], [0, 1, 2, 3, 4])
    assert len(read_index(tmp_path / "corpus", trusted=True).lengths) == 4
    with pytest.raises(WlbError, match="offset out of range"):
        read_index(tmp_path / "corpus")
    cut(tmp_path / "corpus.idx", 60)
    with pytest.raises(WlbError, match="truncated"):
        read_index(tmp_path / "corpus", trusted=True)


MOUNTS = """36 35 98:0 / / rw,noatime - ext4 /dev/root rw
40 36 0:33 / /data rw,relatime shared:1 - lustre 10.0.0.1@tcp:/data rw
41 40 0:34 / /data/fast rw - xfs /dev/nvme0n1 rw
"""


def test_one_rank_checks_an_index_that_all_nodes_share_and_one_a_node_its_own_copy(monkeypatch, tmp_path):
    (tmp_path / "mounts").write_text(MOUNTS)
    folders = "/data/a", "/data/fast/b", "/c"
    kinds = {folder: data_paths.file_system(folder, tmp_path / "mounts") for folder in folders}
    assert kinds == {"/data/a": "lustre", "/data/fast/b": "xfs", "/c": "ext4"}
    for kind, checking in (("lustre", [0]), ("ext4", [0, 2]), ("", [0, 2])):
        monkeypatch.setattr(data_paths, "file_system", lambda folder, kind=kind: kind)
        found = []
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
            found += [rank] * (not data_paths.checked_elsewhere("/data/a"))
        assert found == checking


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_missing_index_or_bin_is_named(tmp_path, corpus):
    with pytest.raises(WlbError, match=r"cannot read index .*nothing\.idx: No such file.*prefix"):
        read_index(tmp_path / "nothing")
    corpus.with_suffix(".bin").unlink()
    with pytest.raises(WlbError, match=r"cannot read tokens .*\.bin: No such file"):
        IndexedCorpus(corpus)


def test_a_truncated_index_is_refused_wherever_it_is_cut_and_a_truncated_bin_too(corpus):
    cut(corpus.with_suffix(".bin"), 2 * 26 - 1)
    with pytest.raises(WlbError, match=r"\.bin is truncated: 51 bytes, its index asks for 52"):
        IndexedCorpus(corpus)
    idx = corpus.with_suffix(".idx")
    sequences, bounds = sum(len(document) for document in DOCUMENTS), len(DOCUMENTS) + 1
    whole = idx.read_bytes()
    for size in range(1, 34 + 12 * sequences + 8 * bounds):
        idx.write_bytes(whole[:size])
        with pytest.raises(WlbError, match=r"truncated|not a Megatron index"):
            read_index(corpus)


def test_an_index_of_uint8_over_a_bin_of_uint16_is_refused(tmp_path: Path) -> None:
    """Else it would train in silence, on halves of tokens."""
    write_corpus(tmp_path / "wide", [[4], [6]], np.uint16)
    write_index(tmp_path / "wide.idx", [4, 6], [0, 4], [0, 1, 2], code=1)
    with pytest.raises(WlbError, match=r"wide\.bin has 20 bytes, its index of uint8 tokens covers 10: "):
        IndexedCorpus(tmp_path / "wide")


def test_a_folder_in_place_of_a_file_is_one_line(corpus: Path) -> None:
    corpus.with_suffix(".bin").unlink()
    corpus.with_suffix(".bin").mkdir()
    with pytest.raises(WlbError, match=r"corpus\.bin is no file"):
        IndexedCorpus(corpus)
    corpus.with_suffix(".idx").unlink()
    corpus.with_suffix(".idx").mkdir()
    with pytest.raises(WlbError, match=r"cannot read index .*corpus\.idx: Is a directory"):
        IndexedCorpus(corpus)


@pytest.mark.parametrize("prefix", ["s3://bucket/corpus", "msc://profile/corpus.idx"])
def test_object_storage_is_named_as_not_read(prefix: str) -> None:
    with pytest.raises(WlbError, match=f"{prefix} is in object storage, which is not read: copy"):
        IndexedCorpus(prefix)


@pytest.mark.parametrize("documents", [[], [[0], []]])
def test_a_corpus_without_tokens_is_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    write_corpus(tmp_path / "corpus", documents, np.uint16)
    with pytest.raises(WlbError, match=r"empty|no tokens"):
        IndexedCorpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Megatron index"),
        (b"hello", "not a Megatron index"),
        (b"PK\x03\x04" + b"\0" * 100, "not a Megatron index"),
        (index_bytes([2], code=7), "type code 7"),
        (index_bytes([2], version=2), "version 2"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**63, 2**63) + b"\0" * 99, "truncated"),
        (index_bytes([2, 3], [0, 4], [0]), "no document boundaries"),
        (index_bytes([2, 3], [0, 4], [0, 1]), "document index"),
        (index_bytes([2, 3], [0, 4], [1, 2]), "document index"),
        (index_bytes([2, 3], [0, 4], [0, 2, 1, 2]), "document index"),
        (index_bytes([2, -3], [0, 4], [0, 1, 2]), "negative length"),
        (index_bytes([2, 3], [0, -4], [0, 1, 2]), "byte offset"),
        (index_bytes([2, 3], [0, 2**63 - 1], [0, 1, 2]), "byte offset"),
        (index_bytes([2, 3], [0, 6], [0, 2]), "does not follow"),
    ],
)
def test_an_index_that_is_none_or_contradicts_itself_or_asks_for_more_than_memory_is_refused(
    tmp_path, content, message
):
    (tmp_path / "corpus.idx").write_bytes(content)
    with pytest.raises(WlbError, match=message):
        read_index(tmp_path / "corpus")


def test_offsets_beyond_two_gigabytes_are_kept(tmp_path: Path) -> None:
    """A sparse .bin: three documents of 2**30 + 1 uint16 tokens; the last one starts 4 GiB in."""
    big = 2**30 + 1
    if shutil.disk_usage(tmp_path).free < 2**30:
        pytest.skip("no room for a sparse file")
    write_index(tmp_path / "corpus.idx", [big, big, big], [0, 2 * big, 4 * big], [0, 1, 2, 3])
    with (tmp_path / "corpus.bin").open("wb") as stream:
        stream.seek(4 * big)
        stream.write(np.array([7, 8], "<u2").tobytes())
        stream.truncate(6 * big)
    reader = IndexedCorpus(tmp_path / "corpus")
    assert reader.index.lengths.sum() == 3 * big
    assert reader.read(2, 0, 3).tolist() == [7, 8, 0]


def test_an_index_of_one_sequence_a_document_is_mapped_and_not_copied(tmp_path: Path) -> None:
    """3 million documents: the index is 60 MB in the file, and no array of theirs is in memory."""
    count = 3_000_000
    write_index(tmp_path / "corpus.idx", np.ones(count), 2 * np.arange(count), np.arange(count + 1))
    tracemalloc.start()
    index = read_index(tmp_path / "corpus")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6, "blocks of a million entries alone"
    assert index.bin_bytes == 2 * count and len(index.lengths) == count
    assert not index.lengths.flags.owndata and not index.offsets.flags.owndata


def test_a_document_far_behind_is_checked_too(tmp_path: Path) -> None:
    offsets = 2 * np.arange(1_500_000)
    offsets[1_400_000] = -1
    write_index(tmp_path / "corpus.idx", np.ones(1_500_000), offsets, np.arange(1_500_001))
    with pytest.raises(WlbError, match="sequence 1400000 has a byte offset out of range"):
        read_index(tmp_path / "corpus")


def test_of_many_corpora_only_the_files_read_last_stay_open(tmp_path: Path) -> None:
    readers, opened = [], len(os.listdir("/proc/self/fd"))
    for number in range(6):
        write_corpus(tmp_path / str(number), [[4]], np.int32)
        readers.append(IndexedCorpus(tmp_path / str(number)))
    mapped = len(os.listdir("/proc/self/fd"))
    assert mapped <= opened + len(readers)  # the indices
    files = TokenFiles(most_open=2)
    for reader in [*readers, *readers]:
        assert files.read(reader.bin_path, 4, 12) == reader.bin_path.read_bytes()[4:]
    assert len(os.listdir("/proc/self/fd")) == mapped + 2


def test_a_bin_that_shrinks_or_goes_is_an_error_that_names_it(corpus: Path) -> None:
    reader = IndexedCorpus(corpus)
    os.truncate(reader.bin_path, 2)
    with pytest.raises(WlbError, match=r"corpus\.bin ends before byte 10, .* changed since the start"):
        reader.read(0, 0, 5)
    with pytest.raises(WlbError, match=r"cannot read .*other\.bin: No such file"):
        TokenFiles().read(corpus.with_name("other.bin"), 0, 1)
