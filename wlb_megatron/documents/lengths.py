"""Document lengths as the command line gives them, or drawn from a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb_megatron.documents.corpus import Corpus, Lengths, Rules, blocks
from wlb_megatron.documents.indexed import read_index
from wlb_megatron.errors import WlbError


def read_lengths(text: str) -> Lengths:
    """Integers[n], tokens of each document: "4,12", a .npy of integers, or an .idx (or its prefix).

    WlbError if there is no such file, it is damaged, or a length is negative or no integer.
    """
    if _is_list(text):
        lengths = _parse(text)
    elif text.endswith(".npy"):
        lengths = _load(Path(text))
    else:
        try:
            return read_index(text).lengths
        except WlbError as error:
            raise WlbError(f"{error}; or give a .npy of integers, or lengths as 4,12") from None
    name = f"--lengths {text}" if len(text) < 60 else "--lengths"
    checked = Corpus(name, lengths).lengths
    if len(checked) and checked.max() > LONGEST:
        document = int(checked.argmax())
        raise WlbError(f"{name}: document {document} has more than {LONGEST} tokens, as no index may")
    return checked


LONGEST = (1 << 31) - 1
"""Tokens of a document: an index holds them as int32."""

_SEED = 20250317


def sample_lengths(lengths: Lengths, window: int, overlong: str, max_pieces: int = 65536) -> list[int]:
    """Tokens of at most `max_pieces` pieces, from as many documents, in random order: a sample on which thresholds are
    fitted.

    A fixed seed draws documents and order, because an even stride would see only one kind where kinds alternate. If
    no drawn document has a piece, the first ones that have are taken; [] if none has.
    """
    generator = np.random.default_rng(_SEED)
    drawn_lengths = lengths[generator.choice(len(lengths), min(max_pieces, len(lengths)), replace=False)]
    candidates = (pieces_of(block, window, overlong) for block in chain((drawn_lengths,), blocks(lengths)))
    pieces = next((tokens for tokens in candidates if len(tokens)), np.empty(0, dtype=np.int64))
    return list(map(int, generator.permutation(pieces)[:max_pieces]))


def pieces_of(lengths: Lengths, window: int, overlong: str) -> npt.NDArray[np.int64]:
    """int64[k], tokens of the pieces of these documents. Window 4, split, lengths [0, 10, 3]: [4, 4, 2, 3]."""
    kept_tokens = Rules(window=window, overlong=overlong).kept(np.asarray(lengths, dtype=np.int64))
    counts = -(-kept_tokens // window)
    pieces = np.full(int(counts.sum()), window, dtype=np.int64)
    some = kept_tokens > 0
    pieces[np.cumsum(counts)[some] - 1] = kept_tokens[some] - (counts[some] - 1) * window
    return pieces


def _is_list(text: str) -> bool:
    """Whether lengths themselves are meant: nothing but numbers, or commas in what is no file's name."""
    if re.fullmatch(r"[\s\d,.+-]*", text):
        return True
    is_file = "/" in text or text.endswith((".npy", ".idx", ".bin")) or Path(f"{text}.idx").exists()
    return not is_file and re.search("[,;]", text) is not None


def _parse(text: str) -> npt.NDArray[np.int64]:
    for part in text.split(","):
        if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", part, re.ASCII) or abs(int(part)) >= 1 << 63:
            raise WlbError(
                f"cannot read lengths {_shorten(text)}: {_shorten(part)} is not an integer below 2**63; give integers "
                "with commas between, e.g. 4,12, or a .npy or .idx file"
            )
    return np.array([int(part) for part in text.split(",")], dtype=np.int64)


def _shorten(text: str, max_characters: int = 40) -> str:
    return repr(text if len(text) <= max_characters else f"{text[:max_characters]}...")


def _load(path: Path) -> npt.NDArray[np.int64]:
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise WlbError(f"cannot read lengths {path}: {error.strerror or error}; give a .npy file") from None
    except (ValueError, EOFError):
        array = None
    if isinstance(array, np.ndarray):
        return array
    if array is not None:
        array.close()
    raise WlbError(f"{path} is not a plain .npy array; save it by numpy.save(path, lengths)")


class Bound(NamedTuple):
    """A limit on the tokens of a document that trains whole, and a description of what sets it."""

    tokens: int
    of: str


def longest_whole(
    overlong: str, window: int, windows: int, bounds: Sequence[Bound] = (), memory: Bound | None = None
) -> tuple[int, str]:
    """Tokens of the longest document that is not split, and one line that says why ("" unless overlong is chunk).

    window: tokens. windows: that a data-parallel rank trains in its smallest global batch. A document trains on one
    rank in one iteration, so this limits its length. bounds: further limits. memory: the GPU's limit, None if
    unknown. Example: window 8, 4 windows, a bound of 20 tokens: 20.
    """
    if overlong != "chunk":
        return window, ""
    share = Bound(windows * window, "a data-parallel rank's share of an iteration")
    bounds_known = [share, *bounds, *([memory] if memory else [])]
    least_bound = min(bounds_known)
    tokens = max(window, least_bound.tokens)
    limits = ", ".join(f"{bound.of} {bound.tokens:,}" for bound in bounds_known)
    beyond = (
        f"documents of up to {tokens:,} tokens ({tokens / window:.1f} windows) train whole, longer ones are split there"
        if tokens > window
        else f"documents above the window of {window:,} tokens are split, because none longer can train whole"
    )
    unknown = "" if memory else "; what memory allows is not known here"
    return tokens, f"{beyond}; limits: {limits}{unknown}"


def long_tailed(window: int, count: int = 100_000, seed: int = 1) -> npt.NDArray[np.int64]:
    """int64[count]: tokens of documents for a window of this size, up to the whole of it.

    Nearly all are log-normal about window / 44 (2,979 at 128K), at most window / 16; 1 in 90 is an outlier, anywhere
    from window / 8 to the window. Outliers hold about a sixth of all tokens.
    """
    rng = np.random.default_rng(seed)
    body = rng.lognormal(np.log(window / 44), 0.7, count)
    outliers = window * rng.uniform(1 / 8, 1, count)
    lengths = np.where(rng.random(count) < 1 / 90, outliers, np.minimum(body, window / 16))
    return np.maximum(lengths, 1).astype(np.int64)
