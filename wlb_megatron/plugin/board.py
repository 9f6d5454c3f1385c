"""What one rank tells all others beside training: notes on a board, a key-value store that rank 0 serves.

A rank holds one connection, to rank 0, however many ranks there are. (A gloo group of all ranks is a connection to each
of them: at 4,000 ranks, 4,000 on every rank and eight million in all.)
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from wlb_megatron.plugin.open_files import allow_open_files

KEPT = 256
"""Notes that stay readable: more than iterations are planned and read ahead, which is how far a reader is behind (with
one micro-batch an iteration, a few and one for every data worker)."""

_LONGEST_PAUSE = 0.25
"""Seconds between two questions for a key: at 4,000 ranks that wait, 16,000 questions a second to rank 0."""


class Board:
    """Numbered notes from rank 0 to all others. Made on all ranks alike. (Not over torch's own store: over that NCCL
    sets up groups, and may not wait behind the notes.)"""

    def __init__(self) -> None:
        common, rank = common_store("board"), dist.get_rank()
        base = common
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        host = getattr(base, "host", None) or os.environ.get("MASTER_ADDR", "localhost")
        if rank == 0:
            allow_open_files(dist.get_world_size())
            self._store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            common.set("port", str(self._store.port))
        else:
            port = int(common.get("port"))
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)

    def put(self, number: int, note: bytes) -> None:
        """Leave a note for all; that of KEPT before goes."""
        self._store.set(str(number), zlib.compress(note, 1))
        if number >= KEPT:
            self._store.delete_key(str(number - KEPT))

    def take(self, number: int, given_up: Callable[[], bool]) -> bytes | None:
        """The note, waited for without a limit (rank 0 may be saving a checkpoint); None once `given_up`. Raises
        DistNetworkError where rank 0 is gone."""
        if not wait_for(self._store, str(number), given_up):
            return None
        return zlib.decompress(self._store.get(str(number)))


def common_store(name: str) -> Any:
    """torch's own store, over which init_process_group brought all ranks together, for one use by this name. Called
    on all ranks alike, not necessarily at once; a second call of a name (a second training in these processes) gives
    other keys, and so does torchrun's next attempt, whose store still holds what the last one left."""
    call = _calls[name]
    _calls[name] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"wlb_megatron/{attempt}/{name}/{call}", distributed_c10d._get_default_store())


_calls: Counter[str] = Counter()
"""How often a name was asked for in this process: counted here, as another rank may be a call ahead."""


def wait_for(store: Any, key: str, given_up: Callable[[], bool]) -> bool:
    """Wait until a key is set, without a limit; False once `given_up`.

    Asks again and again, after 1, 2, 4 .. 250 ms. A wait inside the store with a time limit would log two warnings each
    time it ends (torch 2.6 to 2.14), on every rank.
    """
    pause = 0.001
    while not given_up():
        if store.check([key]):
            return True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return False
