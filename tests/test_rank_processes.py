"""A check's rank processes: what they print, and why the first of them failed."""

import os
import sys

import pytest

from wlb_megatron.child import run_ranks
from wlb_megatron.errors import WlbError

WAIT = "import time; time.sleep(600)"


def run(*scripts: str, seconds: float = 60) -> list[str]:
    return run_ranks([[sys.executable, "-c", script] for script in scripts], os.environ, seconds)


def test_each_ranks_output_is_returned_however_much_it_warns():
    warn = "import sys; sys.stderr.write('a warning\\n' * 30_000); print('second')"
    assert run("print('first')", warn) == ["first\n", "second\n"]


def test_a_rank_that_fails_is_told_while_the_others_wait_for_it():
    with pytest.raises(WlbError, match=r"^RuntimeError: no device$"):
        run(WAIT, "import sys; sys.exit('Traceback ..\\n[rank1]: RuntimeError: no device')", seconds=20)
    with pytest.raises(WlbError, match=r"^a rank ended with status 3$"):
        run("raise SystemExit(3)")


def test_ranks_that_do_not_finish_are_ended(tmp_path):
    with pytest.raises(TimeoutError):
        run(f"import os; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid())); {WAIT}", seconds=1)
    if (tmp_path / "id").exists():  # a busy machine may not have started it yet
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "id").read_text()), 0)
