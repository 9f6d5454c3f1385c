"""The store of rank 0's plans: who can reach it, and whose messages ranks take."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from forked_ranks import spawn
from megatron_runs import free_port

from wlb_megatron.plugin.ranks.plan_store import KEPT, SIZE, PlanStore, Signer, listener, own_address


def rank_of_two(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    store = PlanStore()
    host, at = store._store.host, store._store.port
    for number in range(4 if rank == 0 else 0):
        store.put(number, b"plan %d" % number)
    dist.barrier()
    assert store.take(0, lambda: False) == b"plan 0"
    dist.barrier()
    if rank == 0:  # another program, which has no secret
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", at), timeout=5)
        stranger = dist.TCPStore(host, at, is_master=False, wait_for_workers=False)
        stranger.set("1", b"other plan")
        stranger.set("2", Signer(b"a guess").sign("2", b"other plan"))
        stranger.set("3", stranger.get("0"))
    dist.barrier()
    for number in (1, 2, 3):
        with pytest.raises(RuntimeError, match=rf"rank {rank} on .* has not signed: .* 127\.0\.0\.1:{at}"):
            store.take(number, lambda: False)
    dist.barrier()
    if rank == 0:
        stranger.set("oldest", str(KEPT))
    dist.barrier()
    with pytest.raises(RuntimeError, match="has not signed"):  # and not: this rank is behind the others
        store.take(4, lambda: False)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_takes_no_message_of_a_program_that_is_no_rank() -> None:
    spawn(rank_of_two, (free_port(),), 2)


def test_a_signed_message_is_read_in_its_place_alone_and_unchanged() -> None:
    signer = Signer(b"secret")
    signed = signer.sign("7", b"plan")
    assert signer.read("7", signed) == b"plan"
    assert signer.read("8", signed) is None
    assert signer.read("7", signed[:SIZE] + b"plam") is None
    assert signer.read("7", signed[:-5]) is None
    assert signer.read("7", b"") is None
    assert Signer(b"another").read("7", signed) is None


def test_a_plan_store_is_reached_where_rank_0_is_and_not_where_torchs_store_is() -> None:
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert own_address("localhost", 29500) == "localhost"
    assert own_address(socket.gethostname(), 29500) == socket.gethostname()
    assert own_address("no-such-host.invalid", 29500) == "no-such-host.invalid"
    # No machine's: this one's address on the way, or no way.
    assert own_address("192.0.2.7", 29500) != "127.0.0.1"


@pytest.mark.parametrize(
    ("own", "known", "bound"),
    [
        ("node0", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        ("node0", ["127.0.1.1", "127.0.0.1"], None),  # ranks disagree
        ("node0", ["127.0.1.1", "192.0.2.7"], None),  # the one that others use is not this machine's
        ("node0", ["", ""], None),
        ("127.0.0.3", ["192.0.2.7", "192.0.2.7"], "127.0.0.3"),  # torch's store is another machine's
    ],
)
def test_a_plan_store_listens_at_one_address_where_all_ranks_know_the_machine_by_it(
    own: str, known: list[str], bound: str | None
) -> None:
    listening, address = listener(own, "node0", known)
    assert (listening is None) == (bound is None)
    assert address == (bound or own)
    if listening is not None:
        with listening:
            assert listening.getsockname()[0] == bound
