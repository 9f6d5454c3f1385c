"""The command line as a user types it: what goes to stdout and stderr, exit codes, files, and numpy alone."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_documents_indexed import write_index

import wlb_megatron
from scripts.reproduce import __main__ as reproduction
from wlb_megatron import cli
from wlb_megatron.arguments import NOT_HERE
from wlb_megatron.config import WlbConfig

EXAMPLE = (
    "inspect --window 16 --lengths 4,12 --micro-batches 1 --cp 2 --sharding per-document --packing original"
)
PLANNED = {
    "arrived": [[0, 0, 4], [1, 0, 12]],
    "micro_batches": [
        {
            "dp": 0,
            "documents": [[0, 0, 4], [1, 0, 12]],
            # Chunks 1 1 1 1 and 3 3 3 3: rank 0 has the outer ones, rank 1 the inner ones, which touch.
            "ranks": [[[0, 0, 1], [1, 0, 3], [0, 3, 4], [1, 9, 12]], [[0, 1, 3], [1, 3, 9]]],
        }
    ],
    "waiting": [],
}
ROOT = Path(__file__).resolve().parents[1]

NUMPY_ALONE = """
import sys
class Missing:
    allowed = {"numpy", "wlb_megatron"}
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in self.allowed and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from wlb_megatron.cli import main
code = main(sys.argv[1:])
foreign = {n.split(".")[0] for n in sys.modules} & {"torch", "megatron", "rich", "matplotlib", "ortools", "pandas"}
assert not foreign, foreign
sys.exit(code)
"""


def run(
    line: str, code: str | None = None, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "wlb_megatron.cli"]
    whole = [sys.executable, *program, *line.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        whole, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_an_interrupt_is_one_line_and_an_error_reaches_the_shell(command, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_inspect", interrupted)
    assert command(EXAMPLE) == (130, "", "wlb_megatron: error: interrupted\n")
    done = run("inspect --lengths missing.idx --window 16")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("form", ["--json -", ""])
def test_output_that_cannot_be_written_is_one_line(form):
    with open("/dev/full", "w") as full:
        done = run(f"{EXAMPLE} {form}", stdout=full)
    message = "wlb_megatron: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("packing", ["original", "varlen"])
@pytest.mark.parametrize("form", ["--json -", ""])
def test_numpy_alone_is_enough_and_json_alone_is_on_stdout(form, packing):
    done = run(f"{EXAMPLE} --packing {packing} {form}", code=NUMPY_ALONE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12" in done.stdout
    if form and packing == "original":
        assert json.loads(done.stdout) == {"iterations": [PLANNED]}


def test_without_json_a_table_names_each_piece_and_each_ranks_segments(printed):
    lines = [" ".join(line.split()) for line in printed(EXAMPLE).splitlines()]
    assert "iteration 0: 2 pieces arrived, 0 wait" in lines
    assert "micro-batch of dp 0 16 0 0[0, 4) 1[0, 12)" in lines
    assert "cp 1 8 0 0[1, 3) 1[3, 9)" in lines


def test_a_file_is_written_whole_and_nothing_beside_it(tmp_path, command):
    code, out, _ = command(f"{EXAMPLE} --json {tmp_path / 'plan.json'}")
    assert (code, out) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text()) == {"iterations": [PLANNED]}


def test_lengths_come_from_an_npy_an_idx_or_its_prefix_alike(tmp_path, reported):
    np.save(tmp_path / "lengths.npy", np.array([4, 12], dtype=np.uint32))
    write_index(tmp_path / "corpus.idx", [4, 5, 7], bounds=[0, 1, 3])
    for name in ("lengths.npy", "corpus.idx", "corpus"):
        assert reported(f"{EXAMPLE} --lengths {tmp_path / name}") == {"iterations": [PLANNED]}


def test_settings_reach_the_packer(reported):
    layout = "--lengths 8,3,3,3,3,3,3,3 --window 10 --micro-batches 2 --packing varlen --quadratic-at 1"

    def waits(more: str) -> list[int]:
        return sorted(row[0] for row in reported(f"inspect {layout} {more}")["iterations"][0]["waiting"])

    assert waits("--thresholds none") == []
    assert waits("--thresholds 8") == [0]
    assert waits("--thresholds 9") == []
    assert waits("--thresholds 8 --quadratic-at 1000") == []  # hardly outweighs the others: no need to wait
    assert waits("--thresholds 8 --max-delay 0") == []


@pytest.fixture
def bad_files(tmp_path):
    np.save(tmp_path / "negative.npy", np.array([3, -1]))
    np.save(tmp_path / "real.npy", np.array([3.0]))
    np.save(tmp_path / "square.npy", np.array([[3]]))
    np.save(tmp_path / "empty.npy", np.array([], dtype=np.int64))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "garbage.npy").write_bytes(b"not an array")
    (tmp_path / "nothing.npy").write_bytes(b"")
    (tmp_path / "garbage.idx").write_bytes(b"not an index")
    np.savez(tmp_path / "zip.npz", np.array([1]))
    (tmp_path / "zip.npz").rename(tmp_path / "zip.npy")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lengths missing.idx", "cannot read index missing.idx: No such file"),
        ("--lengths missing.npy", "cannot read lengths missing.npy: No such file"),
        ("--lengths missing", "cannot read index missing.idx: No such file"),
        ("--lengths {}/negative.npy", "document 1 has a negative length (-1)"),
        ("--lengths {}/real.npy", "must be a list of integers"),
        ("--lengths {}/square.npy", "must be a list of integers"),
        ("--lengths {}/empty.npy", "no token to train on in 0 documents"),
        ("--lengths {}/objects.npy", "not a plain .npy array"),
        ("--lengths {}/garbage.npy", "not a plain .npy array"),
        ("--lengths {}/nothing.npy", "not a plain .npy array"),
        ("--lengths {}/zip.npy", "not a plain .npy array"),
        ("--lengths {}/garbage.idx", "not a Megatron index"),
        ("--lengths {}/missing,4", "missing,4.idx: No such file"),
        ("--json {}/no/such/folder.json", "cannot write"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_one_line_and_leaves_nothing(
    flags, message, bad_files, refused
):
    before = sorted(bad_files.iterdir())
    assert message in refused(f"inspect --lengths 4,12 --window 16 {flags.format(bad_files)}")
    assert sorted(bad_files.iterdir()) == before


def test_the_version_is_printed_and_help_has_a_flag_for_every_setting_of_training(capsys):
    def printed_by(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert not ended.value.code
        return capsys.readouterr().out

    assert printed_by("--version") == f"wlb_megatron {wlb_megatron.__version__}\n"
    shown = printed_by("inspect", "--help")
    names = {setting.name for setting in fields(WlbConfig)} - set(NOT_HERE)
    assert all("--" + name.replace("_", "-") in shown for name in names)
    assert all("--wlb-" + name.replace("_", "-") in shown for name in names)


def bash_blocks(page: Path) -> list[str]:
    """The code blocks of a document that a shell runs, each command on one line."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [block.replace("\\\n", " ") for block in blocks]


COMMANDS = r"^ *(?:wlb-megatron|python -m scripts\.reproduce) .*$"


def documented_commands() -> list[str]:
    """Every `wlb-megatron ...` and `python -m scripts.reproduce ...` line of the code blocks in the README and docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in bash_blocks(page)]
    return [line for block in blocks for line in re.findall(COMMANDS, block, re.MULTILINE)]


@pytest.mark.parametrize("line", documented_commands())
def test_a_command_of_the_documents_is_one_that_the_parser_takes(line, monkeypatch):
    parse = cli.CommandParser.parse_args

    def without_running(
        self: cli.CommandParser, arguments: Any, args: argparse.Namespace, commands: Any
    ) -> None:
        parse(self, arguments, args, commands)
        args.run = lambda args: None

    monkeypatch.setattr(cli.CommandParser, "parse_args", without_running)
    words = shlex.split(line, comments=True)
    assert (cli.main(words[1:]) if words[0] == "wlb-megatron" else reproduction.main(words[3:])) == 0
