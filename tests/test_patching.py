"""`wlb-megatron patch` on small checkouts: applied once, reverted exactly, refused where the fork differs."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from wlb_megatron.cli import main
from wlb_megatron.errors import WlbError
from wlb_megatron.patching import APPLY, checkout_version, git_apply, hunks, patches_of, state_of, tried_on

ROOT = Path(__file__).resolve().parents[1]
# The line of pretrain_gpt.py at which each version has the patch's first line; the other file never changed.
PLACES = {"0.16.2": 329, "0.17.2": 399, "0.18.3": 382, "0.19.1": 495, "0.20.0": 508}
MAIN = 'if __name__ == "__main__":\n'
WHEEL = importlib.util.find_spec("megatron.core")


def before(patch: Path, version: str) -> str:
    """The lines a patch expects, below others, where a version of Megatron has them."""
    body = hunks(patch)
    (start,) = re.match(r"@@ -(\d+)", body[0]).groups()
    place = PLACES[version] if target(patch) == "pretrain_gpt.py" else int(start)
    lines = [line[1:] for line in body[1:] if line[:1] in (" ", "-")]
    rest = ["    _MAIN_ENTRY_TIME = time.time()", "    pretrain()"] * (target(patch) == "pretrain_gpt.py")
    return "\n".join([f"# line {number}" for number in range(1, place)] + lines + rest) + "\n"


def target(patch: Path) -> str:
    (name,) = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), flags=re.MULTILINE)
    return name


def write_version(root: Path, version: str) -> None:
    major, minor, patch = version.split(".")
    info = root / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True, exist_ok=True)
    numbers = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
    info.write_text(f"{numbers}PRE_RELEASE = ''\nraise SystemExit('run')\n")


@pytest.fixture(params=PLACES)
def checkout(request, tmp_path):
    """A git repository of just the files that the patches touch, as a version has them, and its version."""
    root = tmp_path / "fork"
    for patch in patches_of(request.param):
        file = root / target(patch)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(before(patch, request.param))
    write_version(root, request.param)
    for command in ("init", "add -A", "-c user.name=n -c user.email=e commit -m fork"):
        subprocess.run(["git", *command.split()], cwd=root, check=True, capture_output=True)
    return root


def tree(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def test_applied_once_and_reverted_to_the_very_bytes(checkout, capsys):
    original, version = tree(checkout), checkout_version(checkout)
    assert main(["patch", "--check", str(checkout)]) == 0
    assert tree(checkout) == original
    assert capsys.readouterr().out == "".join(
        f"megatron-core {version}: {name}.patch (tried on 0.16.2 to 0.20.0) can be applied\n"
        for name in ("0001-pretrain-gpt", "0002-other-scripts")
    )
    assert main(["patch", "--apply", str(checkout)]) == 0
    patched = tree(checkout)
    assert "enable()" in patched["pretrain_gpt.py"]
    assert main(["patch", "--apply", str(checkout)]) == 0
    assert tree(checkout) == patched
    assert "was applied already" in capsys.readouterr().out
    assert main(["patch", "--check", str(checkout)]) == 0
    assert main(["patch", "--revert", str(checkout)]) == 0
    assert tree(checkout) == original
    assert main(["patch", "--revert", str(checkout)]) == 0
    assert tree(checkout) == original


def test_a_fork_that_differs_in_one_file_is_named_with_its_hunk_and_nothing_is_changed(checkout, capsys):
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace(MAIN, "if __name__ in ('__main__', 'launched'):\n"))
    original = tree(checkout)
    assert main(["patch", "--apply", str(checkout)]) == 2
    message = capsys.readouterr().err
    assert tree(checkout) == original
    assert "0001-pretrain-gpt.patch does not fit" in message
    assert re.search(r"patch failed: pretrain_gpt\.py:\d+", message)
    assert "| +    from wlb_megatron import enable  # --wlb-off" in message
    assert f"git -C {checkout} apply --unidiff-zero --3way" in message


@pytest.mark.parametrize("where", ["above", "below", "inside", "instead"])
def test_a_fork_that_changed_the_lines_around_the_entry_takes_the_patch(where, checkout):
    """The calls come first under `__main__`, and nothing else of the file changes."""
    own = {
        "above": ("# line 3\n", "# line 3\nimport fork\nfork.begin()\n"),
        "below": ("    pretrain()\n", "    pretrain()\n    fork.end()\n\n\ndef unused():\n    pass\n"),
        "inside": (MAIN, f"{MAIN}    fork.begin()  # before all\n"),
        "instead": ("    _MAIN_ENTRY_TIME = time.time()\n", "    fork.clock()\n"),
    }[where]
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace(*own))
    names = checkout / "megatron" / "training" / "__init__.py"
    names.write_text("import fork\n" + names.read_text() + "\nfrom .fork import more\n")
    original = tree(checkout)
    assert main(["patch", "--apply", str(checkout)]) == 0
    calls = "    from wlb_megatron import enable  # --wlb-off leaves Megatron as it is\n\n    enable()\n"
    assert script.read_text() == original["pretrain_gpt.py"].replace(MAIN, MAIN + calls)
    assert main(["patch", "--revert", str(checkout)]) == 0
    assert tree(checkout) == original


def test_the_three_way_help_merges_a_fork_that_moved_on_from_a_known_file(checkout):
    version = checkout_version(checkout)
    script, patch = checkout / "pretrain_gpt.py", patches_of(version)[0]
    known = before(patch, version)
    # The command needs the patch's own blobs, which a clone of Megatron-LM has: make this repository's so.
    new = checkout.parent / "after.patch"
    script.write_text(known.replace('__main__":\n', '__main__":\n    enable()\n'))
    command = ["git", "diff", "--full-index"]
    diff = subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout
    new.write_text(diff)
    script.write_text(known.replace("# line 3\n", "# a fork's own line\n"))
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    done = subprocess.run(["git", *APPLY, "--3way", str(new)], cwd=checkout, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "enable()" in script.read_text() and "a fork's own line" in script.read_text()


def test_what_was_merged_by_hand_counts_as_applied_and_is_not_taken_out(checkout, capsys):
    assert main(["patch", "--apply", str(checkout)]) == 0
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace(MAIN, "def main():\n"))
    merged = tree(checkout)
    assert main(["patch", "--apply", str(checkout)]) == 0
    assert main(["patch", "--check", str(checkout)]) == 0
    assert "merged by hand" in capsys.readouterr().out
    assert main(["patch", "--revert", str(checkout)]) == 2
    assert "--3way --reverse" in capsys.readouterr().err
    assert tree(checkout) == merged


def test_a_half_patched_fork_gets_the_rest_also_inside_another_repository(checkout):
    first, second = patches_of(checkout_version(checkout))
    git_apply(checkout, [second])
    assert [state_of(checkout, patch).applied for patch in (first, second)] == [False, True]
    assert main(["patch", "--apply", str(checkout)]) == 0
    assert all(state_of(checkout, patch).applied for patch in (first, second))
    assert main(["patch", "--revert", str(checkout)]) == 0
    subprocess.run(["rm", "-rf", str(checkout / ".git")], check=True)
    subprocess.run(["git", "init", "-q", str(checkout.parent)], check=True)
    (checkout.parent / ".gitignore").write_text("fork/\n")
    assert main(["patch", "--apply", str(checkout)]) == 0
    assert "enable()" in (checkout / "pretrain_gpt.py").read_text()


def test_a_version_older_than_the_patches_and_a_folder_that_is_no_checkout_are_refused(tmp_path, capsys):
    assert main(["patch", "--apply", str(tmp_path)]) == 2
    assert "no Megatron-LM checkout" in capsys.readouterr().err
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR, MINOR = 0, 19\n")
    assert main(["patch", "--check", str(tmp_path)]) == 2
    assert "names no MAJOR" in capsys.readouterr().err
    info.write_text("MAJOR = 0\nMINOR = 12\nPATCH = 0\n")
    assert main(["patch", "--check", str(tmp_path)]) == 2
    assert "no patches for megatron-core 0.12.0" in capsys.readouterr().err


def test_a_newer_version_takes_the_patches_and_is_told_which_ones_were_tried(checkout, capsys):
    write_version(checkout, "0.21.0")
    assert main(["patch", "--apply", str(checkout)]) == 0
    told = "megatron-core 0.21.0: 0001-pretrain-gpt.patch (tried on 0.16.2 to 0.20.0)"
    assert told in capsys.readouterr().out


def test_the_patches_name_the_versions_that_the_tests_apply_them_to():
    paths = sorted((ROOT / "patches").rglob("*.patch"))
    assert len(paths) == 2
    assert [tried_on(patch) for patch in paths] == [list(PLACES)] * 2


def test_a_patch_holds_a_call_and_no_logic():
    """pretrain_gpt.py always calls, other scripts where a flag asks for it."""
    call = ["from wlb_megatron import enable", "enable()"]
    asked = ["import sys", 'if any(argument.startswith("--wlb-") for argument in sys.argv[1:]):']
    for patch, expected in zip(patches_of("0.20.0"), (call, [*asked, *call]), strict=True):
        added = [line[1:].split("  #")[0].strip() for line in hunks(patch) if line.startswith("+")]
        assert [line for line in added if line] == expected
        assert not [line for line in hunks(patch) if line.startswith("-")]


def test_patches_of_the_wheels_files_fit_the_installed_wheel(tmp_path):
    """Those that touch a file of the wheel; scripts/check_patches.sh checks all against a clone."""
    if WHEEL is None or not WHEEL.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    wheel = Path(next(iter(WHEEL.submodule_search_locations))).parents[1]
    checked = 0
    for patch in patches_of(checkout_version(wheel)):
        name = target(patch)
        if (wheel / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text((wheel / name).read_text())
            git_apply(tmp_path, [patch])
            compile((tmp_path / name).read_text(), name, "exec")
            assert state_of(tmp_path, patch).applied
            checked += 1
    assert checked


def test_git_is_asked_for_where_it_is_missing(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(WlbError, match="git is needed"):
        state_of(checkout, patches_of(checkout_version(checkout))[0])
