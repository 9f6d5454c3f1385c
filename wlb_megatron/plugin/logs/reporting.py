"""What only reports never ends a job. Paths of reports are checked at the start, later errors are warnings."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.job_state import part
from wlb_megatron.refusals import RefusedHere


@dataclass(slots=True)
class Warned:
    """Outcomes for which a warning was printed."""

    outcomes: set[str] = field(default_factory=set)


@contextlib.contextmanager
def never_fatal(outcome: str) -> Iterator[None]:
    """Turn an error inside into a warning, the first time with this `outcome`. Training goes on."""
    try:
        yield
    except Exception as error:
        warned = part(Warned).outcomes
        if outcome not in warned:
            warned.add(outcome)
            with contextlib.suppress(OSError):  # stdout may be what is full
                print(f"WARNING: wlb_megatron: {outcome}: {error!r}", flush=True)


def check_outputs(config: WlbConfig) -> None:
    """Refuse a --wlb-log or --wlb-trace that the last rank, which writes them, cannot write. Leaves no file behind."""
    if int(os.environ.get("RANK", "0")) != int(os.environ.get("WORLD_SIZE", "1")) - 1:
        return
    for flag, name, probe in (("--wlb-log", config.log, _appended), ("--wlb-trace", config.trace, _replaced)):
        try:
            if name is not None:
                probe(Path(name))
        except OSError as error:
            raise RefusedHere(
                f"{flag} {name}: the last rank cannot write it ({error.strerror}); give a path "
                "in a folder that it can write to"
            ) from None


def _appended(path: Path) -> None:
    if not path.exists():
        return _replaced(path)
    with path.open("ab"):
        pass


def _replaced(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    probe.open("xb").close()
    probe.unlink()
