"""Benchmarks' rank processes that train job after job: one job must not be felt in the next."""

import json
import os
import sys
from pathlib import Path

import pytest
from megatron_runs import cpu_environment, flags, logged_losses

from scripts.warm_ranks import WarmRanks
from wlb_megatron.child import run_ranks
from wlb_megatron.errors import WlbError


@pytest.fixture
def ranks():
    made = WarmRanks(2, cpu_environment())
    yield made
    made.close()


def training(corpus: Path, **parallel: int) -> list[str]:
    step = ["--global-batch-size", "4", "--train-iters", "3", "--split", "1,0,0", "--num-workers", "1"]
    return [*flags(**parallel), *step, "--data-path", str(corpus)]


@pytest.mark.megatron
def test_a_job_trains_as_in_fresh_processes_whatever_ran_in_them_before(ranks, corpus, tmp_path):
    losses = []
    for name, parallel, more in (
        ("first", {"context": 2}, ["--exit-interval", "2"]),  # Megatron ends it by SystemExit
        ("between", {"pipeline": 2}, []),
        ("again", {"context": 2}, []),
    ):
        log = tmp_path / f"{name}.log"
        job = training(corpus, **parallel) + more
        spans = (tmp_path / f"{name}.spans", 2)
        assert ranks.run("train", job, log, 120, spans) == 0, log.read_text()[-2000:]
        losses.append(logged_losses(log.read_text()))
    first, between, again = losses
    assert len(first) == 2 and len(between) == len(again) == 3 and again[:2] == first
    for rank in (0, 1):
        lines = [json.loads(line) for line in (tmp_path / f"between.spans.{rank}").read_text().splitlines()]
        assert [line["iteration"] for line in lines] == [2, 3]
        ways = [[bool(back) for back, *_ in line["calls"]] for line in lines]
        # 1F1B of four micro-batches on two stages: the first stage is one forward ahead.
        ahead = [False] * (2 - rank) + [True, False] * (3 - 1 + rank) + [True] * (2 - rank)
        assert ways == [ahead, ahead]


def test_a_job_that_fails_is_told_and_the_next_gets_new_processes(tmp_path):
    log, ranks = tmp_path / "log", WarmRanks(1, cpu_environment())
    assert ranks.run("no such kind", [], log, 60) == 1
    assert not ranks.warm and "no such kind" in log.read_text()


# Rank processes of a check: what they print, and why the first of them failed.


WAIT = "import time; time.sleep(600)"


def run_scripts(*scripts: str, seconds: float = 60) -> list[str]:
    command = [sys.executable, "-c", f"import sys; exec({scripts!r}[int(sys.argv[1])])"]
    return run_ranks(command, len(scripts), os.environ, seconds)


def test_each_ranks_output_is_returned_however_much_it_warns():
    warn = "import sys; sys.stderr.write('a warning\\n' * 30_000); print('second')"
    assert run_scripts("print('first')", warn) == ["first\n", "second\n"]


def test_a_rank_that_fails_is_told_while_the_others_wait_for_it():
    with pytest.raises(WlbError, match=r"^RuntimeError: no device$"):
        run_scripts(
            WAIT, "import sys; sys.exit('Traceback ..\\n[rank1]: RuntimeError: no device')", seconds=20
        )
    with pytest.raises(WlbError, match=r"^a rank ended with status 3$"):
        run_scripts("raise SystemExit(3)")


def test_ranks_that_do_not_finish_are_ended(tmp_path):
    with pytest.raises(TimeoutError):
        run_scripts(
            f"import os; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid())); {WAIT}", seconds=1
        )
    if (tmp_path / "id").exists():  # a busy machine may not have started it yet
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "id").read_text()), 0)
