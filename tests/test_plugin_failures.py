"""A rank that cannot go on tells the others, which would end with a stack of a lost connection."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import spawn
from megatron_runs import free_port

from wlb_megatron.errors import WlbError
from wlb_megatron.plugin import stores
from wlb_megatron.plugin.micro_batches.iterators import MicroBatchIterator
from wlb_megatron.refusals import RefusedHere


class Loader:
    """Whose draw fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self):
        return self

    def __next__(self):
        raise self.error


def one_of_two(rank: int, port: int, out: Path, failing: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    stores.share_failures()
    if rank == failing:
        with pytest.raises(RefusedHere, match=r"^wlb_megatron: error: the disk is gone$"):
            next(MicroBatchIterator(Loader(WlbError("the disk is gone"))))
        os._exit(0)
    with pytest.raises(RefusedHere) as refused:
        stores.with_others_lines(lambda: dist.all_reduce(torch.ones(1)))
    (out / "line").write_text(str(refused.value))
    os._exit(0)


@pytest.mark.parametrize(
    ("failing", "line"),
    [
        (1, r"^wlb_megatron: error: rank 1 on \S+ has ended: the disk is gone$"),
        (0, r"^wlb_megatron: error: the process that serves torch's store has ended \(rank 0, "),
    ],
)
def test_the_other_ranks_end_with_the_line_of_the_one_that_failed(failing, line, tmp_path):
    spawn(one_of_two, (free_port(), tmp_path, failing), 2)
    assert re.search(line, (tmp_path / "line").read_text())


def an_own_error(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
    stores.share_failures()

    def fails() -> None:
        raise RuntimeError("an error of its own")

    with pytest.raises(RuntimeError, match="an error of its own"):
        stores.with_others_lines(fails)


def test_a_ranks_own_error_keeps_its_stack():
    spawn(an_own_error, (free_port(),), 1)
