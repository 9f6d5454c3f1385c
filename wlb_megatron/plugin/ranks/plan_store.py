"""Sends plans from rank 0 to all other ranks beside training, through a key-value store that rank 0 serves.

A rank holds one connection, to rank 0, however many ranks there are. (A gloo group of all ranks is a connection to each
of them: at 4,000 ranks, 4,000 on every rank and eight million in all.)

The store knows no passwords: whoever reaches its port can read and write. So messages are signed with a secret that
rank 0 sends to the others over a collective, and the store listens only at the address that ranks use.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from wlb_megatron.plugin.flags.open_files import allow_open_files
from wlb_megatron.plugin.job_state import part

SIZE = 32
"""Bytes of a signature."""


class Signer:
    """Signs notes with a secret that all ranks share, each for its place: a note is not valid in another's place."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, place: str, note: bytes) -> bytes:
        """The note with its signature before it."""
        return self._signature(place, note) + note

    def read(self, place: str, signed: bytes) -> bytes | None:
        """The note, or None if its signature is not that of the place."""
        signature, note = signed[:SIZE], signed[SIZE:]
        return note if hmac.compare_digest(signature, self._signature(place, note)) else None

    def _signature(self, place: str, note: bytes) -> bytes:
        return hmac.digest(self._secret, hashlib.sha256(place.encode()).digest() + note, "sha256")


KEPT = 256
"""Messages that stay readable: more than iterations are planned and read ahead, which is how far a reader is behind
(with one micro-batch an iteration, a few and one for every data worker)."""

_OLDEST = "oldest"
"""Where the number of the oldest message is kept."""

_FAILED = b"failed"
"""The message of what could not be made."""

_LOOK_BACK = 10
"""Questions for a message that has not come between two looks whether it has gone instead."""

_LONGEST_PAUSE = 0.25
"""Seconds between two questions for a key: at 4,000 ranks that wait, 16,000 questions a second to rank 0."""


class PlanStore:
    """Numbered messages from rank 0 to all others. Made on all ranks alike. (Not over torch's own store: over that NCCL
    sets up groups, and may not wait behind the messages.)"""

    def __init__(self) -> None:
        common = common_store("plans")
        self._signer = Signer(_shared_secret())
        host, port = served_at(common)
        rank_addresses = [""] * dist.get_world_size()
        dist.all_gather_object(rank_addresses, resolved(host, port))
        if dist.get_rank() == 0:
            allow_open_files(dist.get_world_size(), "plans sent to all ranks")
            self._store: Any = _serve(own_address(host, port), host, rank_addresses)
            self._keep_from(0)
            common.set("plans", f"{self._store.port} {self._store.host}")
        else:
            store_port, address = common.get("plans").decode().split(" ", 1)
            self._store = dist.TCPStore(address, int(store_port), is_master=False, wait_for_workers=False)

    def put(self, number: int, message: bytes) -> None:
        """Leave a message for all; that of KEPT before goes."""
        self._store.set(str(number), self._signer.sign(str(number), zlib.compress(message, 1)))
        if number >= KEPT:
            self._keep_from(number - KEPT + 1)
            self._store.delete_key(str(number - KEPT))

    def _keep_from(self, number: int) -> None:
        self._store.set(_OLDEST, self._signer.sign(_OLDEST, str(number).encode()))

    def _read(self, place: str) -> bytes:
        message = self._signer.read(place, self._store.get(place))
        if message is None:
            raise RuntimeError(
                f"wlb_megatron: rank {dist.get_rank()} on {socket.gethostname()} reads a plan that rank 0 has not "
                f"signed: another program writes to {self._store.host}:{self._store.port}. End it, or let no other "
                "machine reach the job's ports, and start the job again from its last checkpoint"
            )
        return message

    def leave(self, number: int, make: Callable[[], bytes]) -> bytes:
        """Put the message that `make` makes. Where it fails the others hear of that, and its error goes on here: they
        would wait for the message in the middle of a step, and this rank for them in that step's collectives."""
        message = _FAILED
        try:
            message = make()
        finally:
            self.put(number, message)
        return message

    def take(self, number: int, given_up: Callable[[], bool]) -> bytes | None:
        """The message, waited for without a limit (rank 0 may be saving a checkpoint); None once `given_up`. Raises
        DistNetworkError if rank 0 is gone. RuntimeError if the message is gone (rank 0 is more than KEPT messages
        ahead), if rank 0 could not make it, or if it is not rank 0's."""
        questions = itertools.count(1)

        def over() -> bool:
            if next(questions) % _LOOK_BACK == 0 and (oldest := int(self._read(_OLDEST))) > number:
                raise RuntimeError(
                    f"wlb_megatron: rank {dist.get_rank()} on {socket.gethostname()} asks for rank 0's plan {number}, "
                    f"those before {oldest} are no longer kept: this rank is {KEPT} plans or more behind the others. "
                    "Look at its machine, and start the job again from its last checkpoint"
                )
            return given_up()

        if not wait_for(self._store, str(number), over):
            return None
        message = zlib.decompress(self._read(str(number)))
        if message == _FAILED:
            raise RuntimeError("wlb_megatron: rank 0 could not make a plan; its own error says why")
        return message


def _serve(own_host: str, host: str, rank_addresses: list[str]) -> Any:
    """A store's server at the address at which ranks reach this machine; see addresses.listener."""
    listening, address = listener(own_host, host, rank_addresses)
    if listening is None:
        print(
            f"> wlb_megatron: ranks know {host} as {', '.join(sorted({*rank_addresses}))}: the store of plans listens "
            "on all interfaces of rank 0's machine",
            flush=True,
        )
        return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _shared_secret() -> bytes:
    """Rank 0's random secret of a store, sent to all ranks over a collective and written nowhere."""
    secret = [secrets.token_bytes(32)]
    dist.broadcast_object_list(secret, src=0)
    return secret[0]


def common_store(name: str) -> Any:
    """torch's own store, over which init_process_group brought all ranks together, for one use by this name. Called
    on all ranks alike, not necessarily at once (but for the first use: it is a broadcast); a second call of a name (a
    second training in these processes) gives other keys, and so does torchrun's next attempt, whose store still holds
    what the last one left."""
    attempt = part(Attempt)
    if attempt.name is None:
        # Not TORCHELASTIC_RESTART_COUNT: every node's agent counts its own, and that of a node that took a broken one's
        # place begins at 0 (pytorch issue 135712).
        _warn_of_restarts()
        names = [secrets.token_hex(8)]
        dist.broadcast_object_list(names, src=0)
        (attempt.name,) = names
    call = attempt.calls[name]
    attempt.calls[name] += 1
    return dist.PrefixStore(
        f"wlb_megatron/{attempt.name}/{name}/{call}", distributed_c10d._get_default_store()
    )


def _warn_of_restarts() -> None:
    """torch's own groups are set up over that store, too, and know no attempts."""
    restarts, shared = (
        os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE")
    )
    if dist.get_rank() == 0 and restarts not in (None, "0") and shared == "True":
        print(
            "WARNING: wlb_megatron: torchrun keeps its store over a restart, and ranks may take the addresses that "
            "those before have left there: they fail or hang (pytorch issue 135712). Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
            flush=True,
        )


@dataclass(slots=True)
class Attempt:
    """This start of all ranks. name: rank 0's random one, the same on all. calls: how often this process asked for a
    store by name. They are counted here, as another rank may be a call ahead."""

    name: str | None = None
    calls: Counter[str] = field(default_factory=Counter)


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


def served_at(store: Any) -> tuple[str, int]:
    """Host and port of the server of torch's own store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR", "localhost")
    return host, getattr(store, "port", None) or 1


def resolved(host: str, port: int) -> str:
    """The numeric address that this machine knows `host` by; "" where it knows none."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return ""


def own_address(host: str, port: int) -> str:
    """How other ranks reach this machine. They reach it as `host` if that is this machine, because they have reached it
    by that name; else by the address that faces it. (torchrun's store is kept by the agent that was first, which after
    a change of nodes need not be rank 0's.)
    """
    try:
        family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing: it asks for the route
            here = str(probe.getsockname()[0])
    except OSError:
        return host
    return host if here == there[0] or _loopback(here) else here


def listener(own_host: str, host: str, rank_addresses: Iterable[str]) -> tuple[socket.socket | None, str]:
    """A listening socket at the one address at which ranks reach this machine, and that address.

    own_host: own_address of `host`. rank_addresses: the address to which each rank resolves `host`. Returns None and
    `own_host` if ranks know the machine by several addresses or it cannot listen at theirs: then only all interfaces
    will do.
    """
    addresses = {address for address in rank_addresses if address} if own_host == host else {own_host}
    # A machine may know its own name as a loopback address, at which no other machine reaches it.
    addresses = {address for address in addresses if not _loopback(address)} or addresses
    if len(addresses) == 1:
        (address,) = addresses
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family), address
        except OSError:
            pass
    return None, own_host


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
