"""What only reports never ends a job: refused at the start where it cannot be written, a warning from then on."""

import errno
import json
import os
import resource
import socket
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import without
from megatron_runs import failure, flags, launch, output_of, run_script, small_disk
from training_jobs import training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.plugin.flags.refusal_printing import never_fatal
from wlb_megatron.plugin.job_state import begin_job, part
from wlb_megatron.plugin.logs import metrics, trace
from wlb_megatron.plugin.take_over import check_outputs, name_full_disk
from wlb_megatron.refusals import RefusedHere
from wlb_megatron.whole_files import renamed_at_end


def test_an_error_in_a_report_is_told_once_and_is_none(capsys):
    for _ in range(3):
        with never_fatal("no report"):
            raise KeyError("figure")
    assert capsys.readouterr().out == "WARNING: wlb_megatron: no report: KeyError('figure')\n"
    with pytest.raises(KeyboardInterrupt), never_fatal("no report"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["log", "trace"])
def test_a_report_that_cannot_be_written_is_refused_at_the_start_by_the_rank_that_writes_it(
    name, tmp_path, monkeypatch
):
    def config(path: Path) -> WlbConfig:
        return WlbConfig(**{name: str(path)})

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    check_outputs(config(tmp_path / "file"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RefusedHere, match=rf"--wlb-{name} .*/none/file: .*No such file or directory"):
        check_outputs(config(tmp_path / "none" / "file"))
    with pytest.raises(RefusedHere, match="Is a directory"):
        check_outputs(config(tmp_path))
    monkeypatch.setenv("RANK", "1")
    check_outputs(config(tmp_path / "none" / "file"))


def test_a_full_disk_leaves_no_half_line_in_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    metrics.append_line(str(log), json.dumps({"iteration": 1}))
    whole = log.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, hard))  # so much fits
    try:
        with pytest.raises(OSError):
            metrics.append_line(str(log), json.dumps({"iteration": 2, "text": 100 * "x"}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.read_bytes() == whole
    metrics.append_line(str(log), json.dumps({"iteration": 3}))
    assert [json.loads(line)["iteration"] for line in log.read_text().splitlines()] == [1, 3]


@pytest.mark.megatron
def test_a_full_disk_at_a_save_is_named_with_the_room_it_has(corpus, tmp_path):
    """A file system of 400 kB, which the second save does not fit."""
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, kilobytes=400) as mounted:
        if not mounted:
            without("mount", "a small file system cannot be mounted here")
        run = f"--data-path {corpus} --split 1,0,0 --global-batch-size 2 --train-iters 9"
        done = launch(flags(run, f"--save {small} --save-interval 1 --ckpt-format torch_dist"), 1)
    assert done.returncode == 1, failure(done)
    last = done.stderr.strip().splitlines()[-1]
    full = f"cannot save a checkpoint in {small}: No space left on device (0.0 of"
    assert last.startswith(f"wlb_megatron: error: {full}")


def test_only_errors_of_writing_to_a_full_disk_name_it(tmp_path, monkeypatch):
    wrapped = RuntimeError("rank 3 failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert "No space left on device (" in str(name_full_disk(wrapped, str(tmp_path / "new")))
    exceeded = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert "Disk quota exceeded" in str(name_full_disk(exceeded, str(tmp_path)))
    assert name_full_disk(RuntimeError("file write failed"), str(tmp_path)) is None, "there is room"
    assert name_full_disk(RuntimeError("CUDA error"), str(tmp_path)) is None


def test_two_machines_that_write_one_file_at_once_leave_a_whole_one(tmp_path, monkeypatch):
    """Of two nodes that share a home, each process may have the other's number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with renamed_at_end(tmp_path / "cache.json") as first:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        first.write_text("first, and lon")
        with renamed_at_end(tmp_path / "cache.json") as second:
            second.write_text("second")
        assert (tmp_path / "cache.json").read_text() == "second"
        first.write_text("first, and longer")
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]
    assert (tmp_path / "cache.json").read_text() == "first, and longer"


class Broken:
    """A writer whose service is gone."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(name)


def test_each_report_of_an_iteration_is_made_whatever_becomes_of_the_others(tmp_path, monkeypatch, capsys):
    training = pytest.importorskip("megatron.training")
    log = tmp_path / "log.jsonl"
    args = Namespace(log_interval=1, distributed_backend="gloo", tensorboard_log_interval=1, wlb_log=str(log))
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "get_tensorboard_writer", Broken)
    monkeypatch.setattr(training, "get_wandb_writer", Broken)
    # Of which no log line can be made.
    figures = {"iteration": 1, "predicted_ms": None, "arrival_ms": None, "shardings": {"hybrid": 1}}
    metrics._report(figures)
    assert json.loads(log.read_text()) == figures
    printed = capsys.readouterr().out
    assert printed.count("WARNING") == 3
    for words in ("the log line is not printed: KeyError", "TensorBoard", "Weights"):
        assert words in printed
    args.wlb_log = str(tmp_path / "none" / "log.jsonl")
    metrics._report(figures)
    assert "none/log.jsonl cannot be written" in capsys.readouterr().out


def test_a_rank_whose_times_cannot_be_had_holds_up_no_other(tmp_path, monkeypatch, capsys):
    state = pytest.importorskip("megatron.core").parallel_state
    for place in ("data_parallel", "pipeline_model_parallel", "context_parallel", "tensor_model_parallel"):
        monkeypatch.setattr(state, f"get_{place}_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(trace, "PATIENCE", 0.2)
    job = training_job(wlb_trace=str(tmp_path / "trace.json"), wlb_trace_iteration=3)
    store = dist.HashStore()
    for rank in (0, 1):
        broken = trace.Recorder(on_gpu=False)
        monkeypatch.setattr(broken, "calls", lambda: [][0])
        part(trace.Tracing).recorder = broken
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        trace.after_iteration(3, job, store)
        assert store.check([str(rank)])
    assert capsys.readouterr().out.count("--wlb-trace writes nothing: IndexError") == 1
    begin_job()
    part(trace.Tracing).recorder = trace.Recorder(on_gpu=False)
    trace.after_iteration(3, job, dist.HashStore())  # rank 0 has sent nothing there
    assert "rank 0 has not sent its times within 0.2 s" in capsys.readouterr().out


VIRTUAL = """--num-layers 8 --num-layers-per-virtual-pipeline-stage 2
--microbatch-group-size-per-virtual-pipeline-stage 4"""


@pytest.mark.megatron
def test_a_trace_of_interleaved_stages_knows_any_group_size_and_leaves_out_evaluation(corpus, tmp_path):
    traced = tmp_path / "trace.json"
    run = f"--data-path {corpus} --split 80,20,0 --train-iters 4 --global-batch-size 4 --eval-iters 1"
    reports = f"--eval-interval 2 --wlb-trace {traced} --wlb-trace-iteration 3"
    assert "WARNING: wlb_megatron" not in output_of(flags(run, VIRTUAL, reports, pipeline=2), 2)
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    at = {(e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events}
    names = {f"{way}{m}{chunk}" for way in "FB" for m in range(4) for chunk in ("", ".1")}
    assert set(at) == {(stage, name) for stage in (0, 1) for name in names} and len(events) == len(at)
    for m in range(4):
        # Forward through the chunks of stages 0, 1, 0, 1 and back: none begins before the one before it has ended.
        path = [*((stage, f"F{m}{chunk}") for chunk in ("", ".1") for stage in (0, 1))]
        path += [(stage, f"B{m}{chunk}") for chunk in (".1", "") for stage in (1, 0)]
        for before, after in pairwise(path):
            assert at[before][1] <= at[after][1] and at[before][0] <= at[after][0]


FOLDER_GOES = """
import pathlib, shutil, sys
from wlb_megatron.plugin.logs import trace
begin = trace.begin_step
def begin_step():
    shutil.rmtree(sys.argv[sys.argv.index("--wlb-trace") + 1].rsplit("/", 1)[0], ignore_errors=True)
    begin()
trace.begin_step = begin_step
import runpy
runpy.run_module("wlb_megatron.pretrain_gpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.megatron
def test_training_goes_on_where_log_and_trace_can_no_longer_be_written(corpus, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    run = f"--data-path {corpus} --global-batch-size 2 --train-iters 4 --split 1,0,0"
    reports = f"--wlb-trace {gone}/trace.json --wlb-trace-iteration 2 --wlb-log {gone}/log.jsonl"
    done = run_script(FOLDER_GOES, flags(run, reports), tmp_path)
    assert done.returncode == 0, failure(done)
    assert "[wlb] iteration 4" in done.stdout
    assert done.stdout.count("--wlb-trace writes nothing") == 1
    assert done.stdout.count("log.jsonl cannot be written") == 1
