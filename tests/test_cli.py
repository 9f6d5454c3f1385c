"""The command line as a user types it: what goes to stdout and stderr, exit codes, files, and numpy alone."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb_megatron import cli

LAYOUT = "--lengths 4,12 --window 16 --micro-batches 1 --cp 2 --sharding per-document --packing original"
EXAMPLE = ["inspect", *LAYOUT.split()]
PLANNED = {
    "arrived": [[0, 0, 4], [1, 0, 12]],
    "micro_batches": [
        {
            "dp": 0,
            "documents": [[0, 0, 4], [1, 0, 12]],
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


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "wlb_megatron.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_inspect", interrupted)
    assert call(capsys, *EXAMPLE) == (130, "", "wlb_megatron: error: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("form", [["--json", "-"], []])
def test_output_that_cannot_be_written_is_one_line(form: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "wlb_megatron.cli", *EXAMPLE, *form],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
    message = "wlb_megatron: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_json_alone_is_on_stdout() -> None:
    done = run(*EXAMPLE, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"iterations": [PLANNED]}


@pytest.mark.parametrize("packing", ["original", "fixed-greedy", "varlen"])
@pytest.mark.parametrize("form", [["--json", "-"], []])
def test_numpy_alone_is_enough(form: list[str], packing: str) -> None:
    done = run(*EXAMPLE[:-1], packing, *form, code=NUMPY_ALONE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12" in done.stdout


def test_without_json_a_table_names_each_piece_and_each_ranks_segments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, *EXAMPLE)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "iteration 0: 2 pieces arrived, 0 wait" in lines
    assert "micro-batch of dp 0 16 0 0[0, 4) 1[0, 12)" in lines
    assert "cp 1 8 0 0[1, 3) 1[3, 9)" in lines


def test_a_file_is_written_whole_and_nothing_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, *EXAMPLE, "--json", str(tmp_path / "plan.json"))
    assert (code, out) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text()) == {"iterations": [PLANNED]}


def test_lengths_come_from_an_npy_an_idx_or_its_prefix_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([4, 12], dtype=np.uint32))
    (tmp_path / "corpus.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 3, 3)
        + np.array([4, 5, 7], "<i4").tobytes()
        + np.array([0, 8, 18], "<i8").tobytes()
        + np.array([0, 1, 3], "<i8").tobytes()
    )
    for name in ("lengths.npy", "corpus.idx", "corpus"):
        code, out, _ = call(capsys, "inspect", "--lengths", str(tmp_path / name), *EXAMPLE[3:], "--json", "-")
        assert code == 0
        assert json.loads(out) == {"iterations": [PLANNED]}


def test_settings_reach_the_packer(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--lengths 8,3,3,3,3,3,3,3 --window 10 --micro-batches 2 --packing varlen --quadratic-at 1"

    def waits(more: str) -> list[int]:
        _, out, _ = call(capsys, "inspect", *f"{layout} {more} --json -".split())
        return sorted(row[0] for row in json.loads(out)["iterations"][0]["waiting"])

    assert waits("--thresholds none") == []
    assert waits("--thresholds 8") == [0]
    assert waits("--thresholds 9") == []
    assert waits("--thresholds 8 --quadratic-at 1000") == []  # hardly outweighs the others: no need to wait
    assert waits("--thresholds 8 --max-delay 0") == []


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
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
    ("change", "message"),
    [
        ({"--lengths": "missing.idx"}, "cannot read index missing.idx: No such file"),
        ({"--lengths": "missing.npy"}, "cannot read lengths missing.npy: No such file"),
        ({"--lengths": "missing"}, "cannot read index missing.idx: No such file"),
        ({"--lengths": "{}/negative.npy"}, "document 1 has a negative length (-1)"),
        ({"--lengths": "{}/real.npy"}, "must be a list of integers"),
        ({"--lengths": "{}/square.npy"}, "must be a list of integers"),
        ({"--lengths": "{}/empty.npy"}, "no token to train on in 0 documents"),
        ({"--lengths": "{}/objects.npy"}, "not a plain .npy array"),
        ({"--lengths": "{}/garbage.npy"}, "not a plain .npy array"),
        ({"--lengths": "{}/nothing.npy"}, "not a plain .npy array"),
        ({"--lengths": "{}/zip.npy"}, "not a plain .npy array"),
        ({"--lengths": "{}/garbage.idx"}, "not a Megatron index"),
        ({"--lengths": "4,-12"}, "document 1 has a negative length (-12)"),
        ({"--lengths": "4,,12"}, "cannot read lengths '4,,12': '' is not an integer"),
        (
            {"--lengths": "4,x"},
            "cannot read lengths '4,x': 'x' is not an integer below 2**63; give integers with",
        ),
        ({"--lengths": "[4,12]"}, "'[4' is not an integer"),
        ({"--lengths": "1e3;4"}, "'1e3;4' is not an integer"),
        ({"--lengths": ""}, "cannot read lengths ''"),
        ({"--lengths": "4," + 5000 * "9"}, "cannot read lengths '4,999"),
        ({"--lengths": "{}/missing,4"}, "missing,4.idx: No such file"),
        ({"--lengths": "4.5"}, "cannot read lengths '4.5': '4.5' is not an integer"),
        ({"--lengths": "99999999999999999999"}, "cannot read lengths"),
        ({"--lengths": "0,0"}, "no token to train on in 2 documents"),
        ({"--lengths": "99999999999"}, "document 0 has more than 2147483647 tokens"),
        ({"--window": "0"}, "--window: '0' is not a whole number from 1 to 1073741824"),
        ({"--window": "many"}, "--window: 'many' is not a whole number from 1 to 1073741824"),
        ({"--window": "99999999999999999999"}, "--window: '99999999999999999999' is not a whole number"),
        ({"--cp": "0"}, "--cp: '0' is not a whole number from 1 to 65536"),
        ({"--dp": "99999999999999999999"}, "--dp: '99999999999999999999' is not"),
        ({"--micro-batches": "99999999999999999999"}, "--micro-batches: '99999999999999999999' is not"),
        ({"--max-delay": "-1"}, "wlb_megatron: error: --max-delay -1 must be from 0 to 1048576"),
        ({"--max-tokens": "99999999999999999999"}, "--max-tokens 99999999999999999999 must be from 1 to"),
        (
            {"--max-tokens": "17", "--chunks": "off"},
            "wlb_megatron: error: --max-tokens of 17 is below 1.25 windows",
        ),
        ({"--document-cost": "nan"}, "wlb_megatron: error: --document-cost nan must be from 0 to"),
        ({"--document-cost": "inf"}, "--document-cost inf must be from 0 to"),
        ({"--quadratic-at": "nan"}, "--quadratic-at nan must be from 1 to"),
        ({"--quadratic-at": "1e-320"}, "--quadratic-at 1e-320 must be from 1 to"),
        ({"--solver-seconds": "nan"}, "--solver-seconds nan must be from 0.001 to"),
        ({"--solver-seconds": "-1"}, "--solver-seconds -1.0 must be from 0.001 to"),
        ({"--thresholds": "nan"}, "wlb_megatron: error: --thresholds 'nan' are not auto"),
        ({"--packing": "best"}, "invalid choice: 'best'"),
        ({"--sharding": "best"}, "invalid choice: 'best'"),
        ({"--packing": "varlen", "--max-tokens": "19", "--chunks": "off"}, "set --max-tokens to 20 or more"),
        ({"--json": "{}/no/such/folder.json"}, "cannot write"),
        ({"--unknown": "1"}, "unrecognized arguments: --unknown"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    change: dict[str, str], message: str, bad_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"--lengths": "4,12", "--window": "16", **change}
    before = sorted(bad_files.iterdir())
    code, out, err = call(
        capsys, "inspect", *(part.format(bad_files) for pair in flags.items() for part in pair)
    )
    assert code == 2
    assert out == ""
    assert err.startswith("wlb_megatron: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(bad_files.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("analyze --hidden-size 100 --num-attention-heads 3", "--hidden-size 100 is not a multiple of"),
        (
            "analyze --hidden-size 96 --num-attention-heads 32 --num-query-groups 5",
            "--num-attention-heads 32 is not a multiple of --num-query-groups 5",
        ),
        ("analyze --iterations 0", "--iterations: '0' is not a whole number from 1"),
        ("analyze --seed -2", "--seed: '-2' is not a whole number from -1"),
        (
            "analyze --num-query-groups 5",
            "--num-attention-heads 32 is not a multiple of --num-query-groups 5",
        ),
        (
            "analyze --tp 3 --window 18",
            "--num-attention-heads 32 is not a multiple of the tensor-parallel size 3",
        ),
        ("analyze --matmul-rate nan", "--matmul-rate: 'nan' is not a number from 0"),
        ("analyze --matmul-rate 0", "wlb_megatron: error: --matmul-rate must be positive, got 0.0"),
        ("analyze --tp-exposed 2", "wlb_megatron: error: --tp-exposed is a share from 0 to 1, got 2.0"),
        ("analyze --step-overhead -1", "--step-overhead: '-1' is not a number from 0"),
        (
            "profile --out p.json --tp 3",
            "--num-attention-heads 32 is not a multiple of the tensor-parallel size 3",
        ),
        ("profile --out p.json --budget nan", "--budget: 'nan' is not a number from 0"),
        ("profile --out p.json --num-attention-heads 0", "--num-attention-heads: '0' is not a whole number"),
        ("reproduce --out d --lengths-of 0", "--lengths-of: '0' is not a whole number from 1"),
    ],
)
def test_numbers_that_are_none_or_do_not_divide_are_refused_by_their_flag(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    layout = ["--lengths", "4,12", "--window", "16"] if name == "analyze" else []
    code, _, err = call(capsys, name, *layout, *flags)
    assert code == 2 and message in err and err.count("\n") == 1, err


def test_the_exit_code_reaches_the_shell() -> None:
    done = run("inspect", "--lengths", "missing.idx", "--window", "16")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    import wlb_megatron

    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"wlb_megatron {wlb_megatron.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["plan"]])
def test_a_missing_or_unknown_command_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1


def test_every_setting_of_training_has_its_flag_here(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    from wlb_megatron.config import WlbConfig
    from wlb_megatron.settings_flags import NOT_HERE

    with pytest.raises(SystemExit) as done:
        cli.main(["inspect", "--help"])
    assert done.value.code == 0
    shown: Any = capsys.readouterr().out
    names = {setting.name for setting in fields(WlbConfig)} - set(NOT_HERE)
    assert all("--" + name.replace("_", "-") in shown for name in names)
    assert all("--wlb-" + name.replace("_", "-") in shown for name in names)


def documented_commands() -> list[str]:
    """Every `wlb-megatron ...` line of the code blocks in the README and docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [
        block.replace("\\\n", " ")
        for page in pages
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return [line for block in blocks for line in re.findall(r"^ *wlb-megatron .*$", block, re.MULTILINE)]


@pytest.mark.parametrize("command", documented_commands())
def test_a_command_of_the_documents_is_one_that_the_parser_takes(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = cli._Parser.parse_args

    def without_running(self: cli._Parser, arguments: Any, args: argparse.Namespace, commands: Any) -> None:
        parse(self, arguments, args, commands)
        args.run = lambda args: None

    monkeypatch.setattr(cli._Parser, "parse_args", without_running)
    assert cli.main(shlex.split(command, comments=True)[1:]) == 0
