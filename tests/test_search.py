"""The search tries what a user could change, and its figures are those of an analysis of the flags that it names."""

import json
import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from test_cli import call

from wlb_megatron.analyze import search

pytestmark = pytest.mark.usefixtures("quick_thresholds")

JOB = (
    "--window 8192 --micro-batches 4 --pp 2 --cp 2 --iterations 4 --warm-up 2 --model 550M --recompute full "
    "--host-launch 0"
)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "lengths.npy"
    drawn = np.random.default_rng(11).lognormal(6.0, 1.4, 2000)
    np.save(path, np.minimum(drawn, 8192).astype(np.int64))
    return str(path)


def searched(capsys: pytest.CaptureFixture[str], lengths: str, flags: str) -> Any:
    words = f"analyze --no-split --lengths {lengths} {JOB} --json - {flags}"
    code, out, err = call(capsys, *words.split())
    assert code == 0, err
    return json.loads(out)


def test_the_best_schedule_is_as_fast_by_its_flags(lengths, capsys):
    shown = searched(capsys, lengths, "--search schedule")
    found, as_set = shown["search"], shown["results"]["after"]["tokens_per_second"]
    assert found["given"]["tokens_per_second"] == pytest.approx(as_set)
    assert shown["recomputation"]["after"]["planned"] == pytest.approx(as_set)
    assert shown["flags"] == found["best"][0]["flags"], "what is recommended is the best that was found"
    speeds = [row["tokens_per_second"] for row in found["best"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > found["given"]["tokens_per_second"]
    assert len({row["flags"] for row in found["best"]}) == len(speeds) <= 5
    assert all(row["memory_gib"] <= 72 and row["why"] for row in found["best"])
    flags = found["best"][0]["flags"].replace("(without --recompute-*)", "--recompute none")
    again = searched(capsys, lengths, f"--gpu-memory 80 --search none {flags}")
    assert again["results"]["after"]["tokens_per_second"] == pytest.approx(speeds[0], rel=1e-6)


def test_recomputation_is_recommended_with_all_flags_that_megatron_asks_for(lengths, capsys):
    shown = searched(capsys, lengths, "--search schedule --recompute none --gpu-memory 10")
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert flags in shown["flags"]


def test_a_layout_search_keeps_the_gpus_and_divides_the_model(lengths, capsys):
    found = searched(capsys, lengths, "--search layout")["search"]
    assert found["tried"] > 20
    for row in found["best"]:
        words = row["flags"].split()
        sizes = {
            "--tensor-model-parallel-size": 1,
            "--context-parallel-size": 2,
            "--pipeline-model-parallel-size": 2,
        }
        sizes |= {flag: int(value) for flag, value in pairwise(words) if flag in sizes}
        assert 4 % int(np.prod(list(sizes.values()))) == 0


def test_recomputation_is_shown_from_all_to_none(lengths, capsys):
    for gib in (80, 12):
        job = f"--search none --gpu-memory {gib} --micro-batch-cost 0"
        shown = searched(capsys, lengths, job)["recomputation"]
        for kinds in shown.values():
            order = [kinds[name] for name in ("full", "static", "planned", "none") if kinds[name] is not None]
            assert len(order) >= 3 and order == sorted(order), (gib, kinds)


def test_a_job_that_is_best_as_it_is_says_so(lengths, capsys, tmp_path):
    np.save(tmp_path / "even.npy", np.full(64, 8192))
    code, out, err = call(
        capsys,
        *f"analyze --no-split --search schedule --lengths {tmp_path / 'even.npy'} --window 8192 --model 550M".split(),
    )
    assert code == 0, err
    assert "is faster than the job as given" in out


def test_settings_that_are_better_are_among_the_searchs(capsys, tmp_path):
    """Windows of equal work are faster here than micro-batches of any length."""
    np.save(tmp_path / "long.npy", np.random.default_rng(1).integers(3000, 8192, 600))
    job = (
        f"analyze --lengths {tmp_path / 'long.npy'} --window 8192 --model 550M --host-launch 0 --cp 2 --tp 2"
    )
    code, out, err = call(
        capsys, *f"{job} --micro-batches 4 --iterations 8 --warm-up 2 --search schedule".split()
    )
    assert code == 0, err
    assert "better: fixed windows, balanced: 1.0" in out and "\n1: --wlb-packing fixed-greedy\n" in out
    assert "\nflags: --wlb-packing fixed-greedy (1.0" in out


def _ended(_: Any) -> None:
    os._exit(9)


def test_a_search_whose_process_is_killed_ends_with_one_line(lengths, capsys, monkeypatch):
    monkeypatch.setattr(search, "_found", _ended)
    code, _, err = call(capsys, *f"analyze --no-split --lengths {lengths} {JOB} --search layout".split())
    assert code == 2 and "was ended from outside" in err.strip().splitlines()[-1]
