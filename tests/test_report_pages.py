"""The reproduction's files: what a table says, and what is left after an error."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_pipeline_groups import alike

from scripts.csv_files import as_csv, write_csv
from scripts.reproduce import paper, tables
from scripts.reproduce.__main__ import main, whole_folder
from scripts.reproduce.page import Section, as_markdown
from scripts.reproduce.sensitivity import summarize
from wlb_megatron.errors import WlbError
from wlb_megatron.packing import sample_choices
from wlb_megatron.pipeline.schedule import pipeline_events
from wlb_megatron.report.timeline import Drawn, chrome_trace, draw_timelines, letter
from wlb_megatron.whole_files import _is_stream, whole_file, write_whole


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A reproduction of two small settings and few iterations."""
    folder = tmp_path_factory.mktemp("reproduction") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "CONFIGURATIONS", paper.CONFIGURATIONS[:2])
        for name in ("WINDOWS", "INTERLEAVED", "MANY"):
            patch.setattr(paper, name, getattr(paper, name)[:1])
        patch.setattr(paper, "LARGE_JOB", paper.CONFIGURATIONS[0])
        patch.setattr(paper, "BREAKDOWN_OF", paper.CONFIGURATIONS[1])
        patch.setattr(paper, "SHARDING_OF", paper.CONFIGURATIONS[1])
        patch.setattr(sample_choices, "ITERATIONS", 4)  # finding them takes longest
        patch.setattr(tables, "vary", lambda inputs, rows, tick, row: [summarize("as assumed", rows)])
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            assert main(["--iterations", "4", "--out", str(folder)]) == 0
    assert errors.getvalue().startswith("  1/"), "minutes without a word where no bar can be drawn"
    return folder


STOPPED = """
import sys
from scripts.reproduce import tables
from scripts.reproduce.__main__ import main, whole_folder
from wlb_megatron.packing import sample_choices
sample_choices.ITERATIONS = 4
compare, done = tables.compare_schemes, []
def counted(inputs, setting):
    if done:
        print("one row", flush=True)
        sys.stdin.read()
    done.append(setting)
    return compare(inputs, setting)
tables.compare_schemes = counted
sys.exit(main(["--iterations", "4", "--no-large-job", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_reproduction_that_is_stopped_leaves_its_rows_and_goes_on_with_them(
    number, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "out"
    command = [sys.executable, "-c", STOPPED, str(folder)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    assert run.stdout.readline() == b"one row\n"
    run.send_signal(number)
    assert run.wait(60) != 0
    run.communicate()
    assert [path.name for path in folder.iterdir()] == ["unfinished.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    left = json.loads((folder / "unfinished.json").read_text())["rows"]
    first, second = (setting.name for setting in paper.CONFIGURATIONS[:2])
    assert [row["name"] for row in left.values()] == [first]

    class Enough(Exception):
        """The first row that is not known."""

    def stop(inputs: Any, setting: paper.Setting) -> Any:
        raise Enough(setting.name)

    monkeypatch.setattr(tables, "compare_schemes", stop)
    for iterations, made in (("4", second), ("5", first)):
        with pytest.raises(Enough, match=made):
            main(["--iterations", iterations, "--no-large-job", "--out", str(folder)])
        said = "goes on with 1 rows" in capsys.readouterr().err
        assert said == (iterations == "4"), "other arguments begin anew"


def test_everything_is_written_and_nothing_else(out):
    assert sorted(p.name for p in out.iterdir()) == [
        *("breakdown.png", "heat.png", "reproduction.csv", "reproduction.json"),
        *("reproduction.md", "sharding.png", "speedups.png"),
    ]
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in out.glob("*.png"))


def test_the_page_says_that_it_is_simulated_and_by_which_assumptions(out):
    text = (out / "reproduction.md").read_text()
    assert "Simulated, not measured" in text
    cells = {cell.strip() for line in text.splitlines() for cell in line.split("|")}
    report = json.loads((out / "reproduction.json").read_text())
    for row in report["configurations"]:
        assert row["name"] in cells
        assert f"{row['schemes']['ours']['speedup']:.3f}" in cells
    for name in report["assumptions"]:
        assert name in cells


def test_figures_agree_between_json_csv_and_markdown(out):
    report = json.loads((out / "reproduction.json").read_text())
    rows = list(csv.DictReader((out / "reproduction.csv").open()))
    tables = ("configurations", "windows", "interleaved", "many_windows")
    assert len(rows) == 5 * sum(len(report[key]) for key in tables)
    ours = next(r for r in rows if r["scheme"] == "ours")
    first = report["configurations"][0]
    assert float(ours["speedup"]) == first["schemes"]["ours"]["speedup"]
    assert f"| {first['schemes']['ours']['speedup']:.3f} |" in (out / "reproduction.md").read_text()
    assert report["means"]["plain-4D"]["all"] == 1.0
    job = report["large_job"][0]
    assert len(job["heat"]) == 8 and len(job["heat"][0]) == 2  # dp x pp rows, cp columns


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --out DIR"),
        (["--out", "{}/x", "--iterations", "0"], "is not a whole number from 1"),
        (["--out", "{}/x", "--lengths-of", "0"], "--lengths-of: '0' is not a whole number from 1"),
        (["--out", "{}/x", "--lengths-of", "64"], "seeded lengths"),
        (["--out", "{}/x", "--lengths", "{}/none.npy"], "cannot read lengths"),
        (["--out", "{}/x", "--lengths", "4,12"], "times all documents"),
        (["--out", "{}/x", "--matmul-rate", "0"], "--matmul-rate must be positive"),
        (["--out", "{}/file/x", "--iterations", "1"], "give another --out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(flags, message, tmp_path, capsys):
    (tmp_path / "file").write_text("[]")
    assert main([*(flag.format(tmp_path) for flag in flags)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_markdown_and_csv_by_hand_and_a_table_is_written_whole_or_not_at_all(tmp_path):
    assert as_markdown([Section("T", ("a", "b"), [["1", "x"]], "note")]) == (
        "### T\n\nnote\n\n| a | b |\n| --- | --- |\n| 1 | x |\n"
    )
    assert as_csv([{"a": 1, "b": None}, {"a": "x,y", "b": 2.5}]) == 'a,b\n1,\n"x,y",2.5\n'
    assert as_csv([]) == ""
    write_csv(tmp_path / "rows.csv", [{"a": 1, "b": None}, {"a": 2, "c": "x, y"}])
    assert (tmp_path / "rows.csv").read_text() == 'a,b,c\n1,,\n2,,"x, y"\n'
    with pytest.raises(WlbError, match=r"cannot write .*give another --out"):
        write_csv(tmp_path / "none" / "rows.csv", [{"a": 1}])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_a_folder_or_file_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyError), whole_folder(out) as folder:
        (folder / "a").write_text("half")
        raise KeyError
    with pytest.raises(KeyError), whole_file(tmp_path / "b", "--b") as path:
        path.write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    for text in ("one", "two"):
        with whole_folder(out) as folder:
            (folder / "a").write_text(text)
    assert (out / "a").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(WlbError, match="give another --b"), whole_file(tmp_path / "no" / "b", "--b") as path:
        path.write_text("x")


def test_a_device_or_pipe_is_written_to_and_a_link_stays(tmp_path):
    """A rename would put a regular file in the place of /dev/null, for the whole machine where root asks for it."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "folder" / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # a pipe that nobody has open would be waited for
    write_whole(pipe, "told", "--out")
    assert os.read(reader, 9) == b"told" and pipe.is_fifo()
    os.close(reader)
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("new", "again"):
        write_whole(link, text, "--out")
        assert link.is_symlink() and target.read_text() == text
    assert _is_stream(Path("/dev/null")) and _is_stream(Path("/dev/stdout"))
    assert not _is_stream(target) and not _is_stream(tmp_path) and not _is_stream(tmp_path / "none")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "link", "pipe", "target"]


def test_a_trace_holds_every_event_in_microseconds_and_a_documents_chunks_carry_its_letter():
    trace = chrome_trace(
        [pipeline_events(*alike(2, [1000.0, 3000.0], [2000.0, 4000.0]))], [[]], "stage {}".format
    )
    work = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in work if e["tid"] == 0] == [
        *[("F0", 0, 1), ("F1", 1, 3), ("B0", 4, 2), ("B1", 11, 4)],
    ]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["data-parallel rank 0 (measured)", "stage 0", "stage 1"]
    json.dumps(trace)
    events = pipeline_events(*alike(1, [1.0] * 3, [2.0] * 3), groups=(2, 1))
    trace = chrome_trace([events], [[7, 7, -1]], "stage {}".format)
    work = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in work] == ["F0 (A)", "F1 (A)", "B1 (A)", "B0 (A)", "F2", "B2"]
    assert [e["args"].get("document_in_chunks") for e in work] == [7, 7, 7, 7, None, None]
    assert trace["otherData"]["legend"] == {"data-parallel rank 0, (A)": "document 7 in chunks"}
    assert [letter(number) for number in range(27)] == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "AA"]


def test_a_timeline_runs_groups_backwards_last_first_and_names_their_documents(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)  # of the figure, which stays to be looked at
    steps = [
        Drawn("whole", [1.0, 1.0, 1.0]),
        Drawn("chunks", [1.0, 1.0, 1.0], (2, 1), [40, 40, -1]),
        Drawn("many", [1.0] * 16, (2,) * 8, [at // 2 for at in range(16)]),
    ]
    lengths = draw_timelines(tmp_path / "timeline.png", steps, 1)
    assert lengths == pytest.approx([1, 1, 1]) and (tmp_path / "timeline.png").exists()
    whole, chunks, many = (axes for axes in shown[0].axes if axes.get_title(loc="left"))
    assert whole.get_legend() is None
    assert [text.get_text() for text in chunks.get_legend().get_texts()] == ["document 40 in 2 chunks"]
    assert "(and 2 more documents)" in many.get_legend().get_texts()[-1].get_text()
    order = [text.get_text() for text in sorted(chunks.texts, key=lambda text: text.get_position()[0])]
    assert order == ["0", "1", "1", "0", "2", "2"]
    colours = [bar.get_facecolor() for bar in sorted(chunks.patches, key=lambda bar: bar.get_x())]
    assert len({*colours[:4]}) == 1 and colours[0] not in colours[4:]


def test_a_timeline_shades_what_backwards_recompute_of_each_stage(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    steps = [
        Drawn("all", [1.0, 1.0], again=[[1.0, 1.0]] * 2),
        Drawn("half", [1.0, 1.0], again=[[0.0, 0.5], [0, 0]]),
    ]
    everything, half = draw_timelines(tmp_path / "timeline.png", steps, 2)
    assert everything == pytest.approx(3 / 2), "two even micro-batches on two stages"
    assert half < 3 / 2, "one stage repeats less"
    axes = [axes for axes in shown[0].axes if axes.get_title(loc="left")]
    shades = [[bar for bar in each.patches if bar.get_alpha() is not None] for each in axes]
    assert [len(bars) for bars in shades] == [4, 1]
    forward = 1 / 8  # of a work of 2: each micro-batch a forward, a backward of two and one again
    assert all(bar.get_width() == pytest.approx(forward) for bar in shades[0])
    assert shades[1][0].get_width() == pytest.approx(0.5 / 3.5 / 2)
    starts = {bar.get_x() for bar in axes[0].patches if bar.get_hatch()}
    assert {bar.get_x() for bar in shades[0]} == starts, "it comes first in a backward"
    assert "dark: recomputed" in axes[-1].get_xlabel()
