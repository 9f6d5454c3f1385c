"""Megatron's .bin/.idx corpus, read with numpy alone: document lengths from the .idx, tokens from the .bin, and which
of them train from a .mask.

The .idx (Megatron's IndexedDataset, version 1) is little-endian: b"MMIDIDX\\0\\0", uint64 version,
uint8 token type, uint64 sequences, uint64 entries of the document index; then int32[sequences] lengths in
tokens, int64[sequences] byte offsets into the .bin, int64[entries] document index. Document d is sequences
[document_index[d], document_index[d + 1]): boundaries come from here, never from token ids.

Where each document is one sequence (preprocess_data.py without --split-sentences), lengths and offsets stay in the
file, mapped: the processes of a node share them in its page cache. Else each process holds 16 bytes a document.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.corpus import SIZE, IntArray, Lengths, Rules, blocks
from wlb_megatron.errors import WlbError

MOST_OPEN = 64
"""Files that a process keeps open: a blend may have thousands."""


class TokenFiles:
    """Files by path, opened on first use. Not thread-safe.

    Files are read, not mapped: a failed read is an error with a message, while a mapped page that cannot be read ends
    the process. Reads use no file position, so a forked process may share the files.
    """

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._open: OrderedDict[Path, int] = OrderedDict()  # the one used last is at the end

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the file. WlbError where it cannot be read, or is shorter."""
        parts: list[bytes] = []
        bytes_left = size
        try:
            file = self._file(path)
            # One call gives 2 GiB at most.
            while bytes_left and (part := os.pread(file, bytes_left, offset + size - bytes_left)):
                parts.append(part)
                bytes_left -= len(part)
        except OSError as error:
            raise WlbError(f"cannot read {path}: {error.strerror}") from error
        if bytes_left:
            raise WlbError(
                f"{path} ends before byte {offset + size}, which its index names: the file has changed since the start"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _file(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            while len(self._open) >= self._most_open:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


FILES = TokenFiles()
"""The files of this process."""

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
_TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_REBUILD = "rebuild the corpus with Megatron's tools/preprocess_data.py"


@dataclass(frozen=True)
class Index:
    """What an .idx says: int32 or int64[n] tokens and int64[n] byte offset of each document, and the token type.

    The .bin must hold `bin_bytes`; None if another process checks that.
    """

    path: Path
    lengths: Lengths
    offsets: IntArray
    token_type: np.dtype[Any]
    bin_bytes: int | None


def index_path(path: str | Path) -> Path:
    """The .idx of a prefix as given to --data-path; a path that ends in .idx or .bin serves too. WlbError for an
    address in object storage."""
    text = str(path)
    if "://" in text:
        raise WlbError(
            f"{text} is in object storage, which is not read: copy the .bin and .idx to a file system"
        )
    return Path((text[:-4] if text.endswith((".idx", ".bin")) else text) + ".idx")


def read_index(path: str | Path, *, trusted: bool = False) -> Index:
    """Read the .idx of a prefix; its .bin is not needed. WlbError if it is missing, damaged or empty.

    trusted: another process checks the same file. This one then reads its lengths, and of what else it says a sample:
    a fifth of it, where each document is one sequence.
    """
    idx = index_path(path)
    try:
        with idx.open("rb") as stream:
            header = stream.read(HEADER.size)
            size = stream.seek(0, 2)
    except OSError as error:
        weight = str(path).replace(".", "").isdigit()
        cure = "a weight before every prefix, or none" if weight else "the prefix of a .bin/.idx pair"
        raise WlbError(f"cannot read index {idx}: {error.strerror}; give {cure}") from None
    if header[:9] != MAGIC[: len(header)] or not header:
        raise WlbError(f"{idx} is not a Megatron index (bad header); {_REBUILD}")
    if len(header) < HEADER.size:
        raise WlbError(f"{idx} is truncated inside its header ({size} bytes); {_REBUILD}")
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise WlbError(f"{idx} has index version {version}, this reader knows version {VERSION}; {_REBUILD}")
    if code not in _TOKEN_TYPES:
        raise WlbError(f"{idx} stores tokens of type code {code}, not an integer type; {_REBUILD}")
    needed_bytes = HEADER.size + 12 * sequences + 8 * entries
    if size < needed_bytes:
        raise WlbError(f"{idx} is truncated: {size} bytes, its header asks for {needed_bytes}; {_REBUILD}")

    content = np.memmap(idx, mode="r", dtype=np.uint8)
    offset = HEADER.size
    counts = np.frombuffer(content, "<i4", sequences, offset)
    pointers = np.frombuffer(content, "<i8", sequences, offset + 4 * sequences)
    bounds = np.frombuffer(content, "<i8", entries, offset + 12 * sequences)
    token_type = np.dtype(_TOKEN_TYPES[code])
    if len(counts) and counts.min() < 0:
        raise WlbError(
            f"{idx}: sequence {int((counts < 0).argmax())} has a negative length "
            "(above 2**31 - 1 tokens it overflows the index); split that document before preprocessing"
        )
    single = len(bounds) == sequences + 1 > 1 and (
        _sample_counts_up(idx, offset + 12 * sequences, entries) if trusted else _counts_up(bounds)
    )
    lengths, offsets = counts, pointers
    if not single:
        lengths, offsets = _documents(idx, counts, pointers, bounds, token_type.itemsize)
    if not lengths.any():
        raise WlbError(f"{idx} holds no tokens (documents: {len(lengths)}); {_REBUILD}")
    ends = None if trusted else _check_pointers(idx, counts, pointers, token_type.itemsize)
    return Index(idx, lengths, offsets, token_type, ends)


def _sample_counts_up(idx: Path, offset: int, entries: int) -> bool:
    """Whether 64 of the integers from byte `offset` on are 0, 1, 2 .. at their places. Read one by one: through the map
    each brings megabytes of its neighbors along, which every node would read."""
    with idx.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        places = np.linspace(0, entries - 1, min(entries, 64)).astype(np.int64).tolist()
        return all(os.pread(file.fileno(), 8, offset + 8 * n) == n.to_bytes(8, "little") for n in places)


def _counts_up(bounds: IntArray) -> bool:
    """Whether they are 0, 1, 2 .."""
    return all(
        (block == np.arange(n * SIZE, n * SIZE + len(block))).all() for n, block in enumerate(blocks(bounds))
    )


def _check_pointers(idx: Path, counts: npt.NDArray[np.int32], pointers: IntArray, item: int) -> int:
    """Where the last byte of any sequence ends. WlbError if an offset is out of range."""
    ends = 0
    for n, (tokens, block_pointers) in enumerate(zip(blocks(counts), blocks(pointers), strict=True)):
        wild = (block_pointers < 0) | (block_pointers > 2**62)
        if wild.any():
            raise WlbError(
                f"{idx}: sequence {n * SIZE + int(wild.argmax())} has a byte offset out of range; {_REBUILD}"
            )
        ends = max(ends, int((block_pointers + tokens * item).max()))
    return ends


def _documents(
    idx: Path, counts: npt.NDArray[np.int32], pointers: IntArray, bounds: IntArray, item: int
) -> tuple[IntArray, IntArray]:
    """Lengths and offsets of documents of any number of sequences. WlbError unless these follow each other.

    Sequences of 3, 0, 4, 2 tokens and bounds [0, 1, 1, 4]: before = [0, 3, 3, 7, 9], lengths [3, 0, 6].
    """
    if len(bounds) <= 1 and len(counts) > 0:
        raise WlbError(
            f"{idx} has sequences but no document boundaries; {_REBUILD} (end_document per document)"
        )
    if len(bounds) <= 1:
        raise WlbError(f"{idx} is empty: no document; {_REBUILD}")
    if bounds[0] != 0 or bounds[-1] != len(counts) or (np.diff(bounds) < 0).any():
        raise WlbError(
            f"{idx}: its document index does not run from 0 to {len(counts)} sequences; {_REBUILD}"
        )
    before = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    touches = np.concatenate(([True], np.diff(pointers) == np.diff(before[:-1]) * item))
    touches[bounds[:-1][bounds[:-1] < len(counts)]] = True  # a new document may start anywhere
    if not touches.all():
        raise WlbError(
            f"{idx}: sequence {int((~touches).argmax())} does not follow its document's last one; {_REBUILD}"
        )
    # A document without sequences may start past the last one: any offset serves, nothing is read there.
    return np.diff(before[bounds]), np.append(pointers, 0)[bounds[:-1]]


def _check_bin(path: Path, index: Index) -> None:
    """WlbError unless the .bin is a file that can be read and has the size that its index gives it."""
    try:
        about = path.stat()
    except OSError as error:
        raise WlbError(f"cannot read tokens {path}: {error.strerror}; put the .bin beside its .idx") from None
    if not stat.S_ISREG(about.st_mode):
        raise WlbError(f"{path} is no file; put the .bin beside its .idx")
    if not os.access(path, os.R_OK):
        raise WlbError(f"cannot read tokens {path}: permission denied; make it readable")
    if index.bin_bytes is None:
        return
    if about.st_size < index.bin_bytes:
        raise WlbError(
            f"{path} is truncated: {about.st_size} bytes, its index asks for {index.bin_bytes}; copy it again or "
            f"{_REBUILD}"
        )
    if about.st_size > index.bin_bytes:
        raise WlbError(
            f"{path} has {about.st_size} bytes, its index of {index.token_type.name} tokens covers "
            f"{index.bin_bytes}: they are not of one corpus; copy both again or {_REBUILD}"
        )


class IndexedCorpus:
    """A .bin/.idx pair. A pickled copy reads the .idx anew; the .bin is opened when tokens are read."""

    def __init__(self, path: str | Path, *, trusted: bool = False) -> None:
        """path: prefix, .idx or .bin. trusted: see read_index. WlbError if a file is missing, damaged, of another size
        or without tokens."""
        self.index = read_index(path, trusted=trusted)
        self.bin_path = self.index.path.with_suffix(".bin")
        _check_bin(self.bin_path, self.index)

    def __reduce__(self) -> tuple[Callable[..., IndexedCorpus], tuple[Path]]:
        return partial(IndexedCorpus, trusted=True), (self.index.path,)

    def __len__(self) -> int:
        return len(self.index.lengths)

    def read(self, document: int, start: int, end: int) -> IntArray:
        """Tokens [start, end) of a document, int64[end - start]. IndexError outside the document, WlbError where
        its tokens cannot be read."""
        length = int(self.index.lengths[document])
        if not (document >= 0 and 0 <= start <= end <= length):
            raise IndexError(f"tokens [{start}, {end}) of document {document}, which has {length}")
        token_type = self.index.token_type
        offset = int(self.index.offsets[document]) + start * token_type.itemsize
        read = FILES.read(self.bin_path, offset, (end - start) * token_type.itemsize)
        return np.frombuffer(read, token_type).astype(np.int64)


_BLOCK_TOKENS = 1 << 22


class MaskedCorpus(IndexedCorpus):
    """A .bin/.idx pair whose documents train only their targets; one without a target has no tokens.

    Its mask has one byte for each token of the .bin, in its order. 1: the token is a trained target, so the token
    before it predicts it. Example, 5 tokens, mask 0 0 1 0 1: tokens 1 and 3 predict their next ones, 0 and 2 do not,
    and 4 predicts nothing, as a document's last token never does. The mask of a document's first token says nothing,
    because nothing precedes it.

    counts: int32[n], targets of each document, of what is kept of it. A truncated document begins where the window with
    the most targets begins, the first such, so that its own first tokens may be left out.
    """

    def __init__(
        self, path: str | Path, rules: Rules, measured_before: tuple[Any, ...] | None = None
    ) -> None:
        """`rules` with overlong "truncate": of a long document `window` tokens train, those with the most targets.
        `measured_before` is a pickled copy's. WlbError as for IndexedCorpus, and where the mask is missing or not one
        of these tokens."""
        super().__init__(path)
        self._rules = rules
        self.mask_path = self.index.path.with_suffix(".mask")
        if measured_before is None:
            self._check_mask()
            measured_before = self._measure()
        self._known = measured_before
        self.counts, lengths, offsets = measured_before
        self.index = replace(
            self.index,
            lengths=self.index.lengths if lengths is None else lengths,
            offsets=self.index.offsets if offsets is None else offsets,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedCorpus, (self.index.path, self._rules, self._known)

    def targets(self, document: int, start: int, end: int) -> npt.NDArray[np.uint8]:
        """uint8[end - start]: 1 for each of tokens [start, end) of a document that is a trained target."""
        item = self.index.token_type.itemsize
        first = int(self.index.offsets[document]) // item + start
        mask = np.frombuffer(FILES.read(self.mask_path, first, end - start), np.uint8)
        if start == 0 and end > 0:
            mask = mask.copy()
            mask[0] = 0
        return mask

    def digest(self) -> str:
        """Of the targets of each document; and of all tokens, tokenizer, template and format where index.json tells
        them. (Not of the jsonl's time: it may be copied.)"""
        digest = hashlib.sha256(self.counts.tobytes())
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            about = json.loads((self.index.path.parent / "index.json").read_text(encoding="utf-8"))
            made_of = {name: value for name, value in about["key"].items() if name != "file"}
            made_of |= {"tokens": about["tokens"]} if "tokens" in about else {}
            digest.update(json.dumps(made_of, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def _check_mask(self) -> None:
        tokens = self.bin_path.stat().st_size // self.index.token_type.itemsize
        try:
            size = self.mask_path.stat().st_size
        except OSError as error:
            raise WlbError(
                f"cannot read {self.mask_path}: {error.strerror}; put the mask beside its .idx, one byte a token"
            ) from None
        if size != tokens:
            raise WlbError(
                f"{self.mask_path} has {size} bytes, its .bin {tokens} tokens: a mask has one byte for each token"
            )

    def _measure(self) -> tuple[npt.NDArray[np.int32], IntArray | None, IntArray | None]:
        """Targets by document; and lengths and offsets where they change."""
        counts = np.zeros(len(self), dtype=np.int32)
        lengths = np.asarray(self.index.lengths, dtype=np.int64)
        begins = np.asarray(self.index.offsets, dtype=np.int64) // self.index.token_type.itemsize
        if len(lengths) and (begins[1:] != (begins + lengths)[:-1]).any():
            raise WlbError(
                f"{self.index.path}: documents do not follow each other in the .bin; write them in order"
            )
        for documents, sums in self._sums(begins, lengths):
            first, last = begins[documents] - begins[documents.start], lengths[documents]
            counts[documents] = sums[first + last] - sums[np.minimum(first + 1, first + last)]
        moved = np.zeros(len(self), dtype=np.int64)
        if self._rules.overlong == "truncate":
            for document in np.flatnonzero(lengths > self._rules.window).tolist():
                moved[document], counts[document] = self._fullest(document, int(lengths[document]))
        nothing = counts == 0
        if not (moved.any() or (nothing & (lengths > 0)).any()):
            return counts, None, None
        offsets = self.index.offsets + moved * self.index.token_type.itemsize
        return counts, np.where(nothing, 0, lengths - moved), offsets

    def _sums(self, begins: IntArray, lengths: IntArray) -> Iterator[tuple[slice, IntArray]]:
        """Blocks of documents, each with the running sum of its mask, from 0. WlbError for a byte above 1."""
        begin = 0
        while begin < len(lengths):
            end = int(np.searchsorted(begins, begins[begin] + _BLOCK_TOKENS, side="right"))
            end = max(begin + 1, min(end, len(lengths)))
            first, last = int(begins[begin]), int(begins[end - 1] + lengths[end - 1])
            mask = np.frombuffer(FILES.read(self.mask_path, first, last - first), np.uint8)
            if len(mask) and mask.max() > 1:
                byte = first + int((mask > 1).argmax())
                raise WlbError(
                    f"{self.mask_path} holds {mask[byte - first]} at byte {byte}: a mask holds 0 and 1"
                )
            yield slice(begin, end), np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
            begin = end

    def _fullest(self, document: int, length: int) -> tuple[int, int]:
        """Where the window with the most targets begins, the first such, and how many it trains.

        A window [s, s + w) predicts tokens s + 1 to s + w: its last token predicts the one that really follows.
        """
        window = self._rules.window
        sums = np.concatenate(([0], np.cumsum(self.targets(document, 0, length), dtype=np.int64)))
        starts = np.arange(length - window + 1)
        targets = sums[np.minimum(starts + window + 1, length)] - sums[starts + 1]
        best_start = int(targets.argmax())
        return best_start, int(targets[best_start])
