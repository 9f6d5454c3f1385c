"""Where other ranks reach this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any


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
    """How other ranks reach this machine: as `host`, if that is this machine, which they have reached by that name;
    else by the address that faces it. (torchrun's store is kept by the agent that was first, which after a change of
    nodes need not be rank 0's.)"""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing: it asks for the route
            here = str(probe.getsockname()[0])
    except OSError:
        return host
    return host if here == there[0] or _loopback(here) else here


def listener(own: str, host: str, known: Iterable[str]) -> tuple[socket.socket | None, str]:
    """A listening socket at the one address at which ranks reach this machine, and that address.

    own: own_address of `host`. known: what each rank resolves `host` to. None and `own`, where ranks know the machine
    by several addresses or it cannot listen at theirs: then only all interfaces will do.
    """
    addresses = {address for address in known if address} if own == host else {own}
    # A machine may know its own name as a loopback address, at which no other machine reaches it.
    addresses = {address for address in addresses if not _loopback(address)} or addresses
    if len(addresses) == 1:
        (address,) = addresses
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family), address
        except OSError:
            pass
    return None, own


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
