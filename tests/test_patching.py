"""patches/apply.sh on small checkouts: applied once, reverted exactly, refused where the fork differs."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
# The line of pretrain_gpt.py at which each version has the patch's first line; the other file never changed.
PLACES = {"0.18.3": 382, "0.19.1": 495, "0.20.0": 508}
MAIN = 'if __name__ == "__main__":\n'
WHEEL = importlib.util.find_spec("megatron.core")


def hunk(patch: Path) -> list[str]:
    """The patch's lines below its @@, its only one."""
    return patch.read_text().partition("\n@@ ")[2].splitlines()[1:]


def before(patch: Path, version: str) -> str:
    """The lines a patch expects, below others, where a version of Megatron has them."""
    (start,) = re.findall(r"^@@ -(\d+)", patch.read_text(), flags=re.MULTILINE)
    place = PLACES[version] if target(patch) == "pretrain_gpt.py" else int(start)
    lines = [line[1:] for line in hunk(patch) if line[:1] in (" ", "-")]
    rest = ["    _MAIN_ENTRY_TIME = time.time()", "    pretrain()"] * (target(patch) == "pretrain_gpt.py")
    return "\n".join([f"# line {number}" for number in range(1, place)] + lines + rest) + "\n"


def target(patch: Path) -> str:
    (name,) = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), flags=re.MULTILINE)
    return name


@pytest.fixture(params=PLACES)
def checkout(request, tmp_path):
    """A git repository of just the files that the patches touch, as a version has them."""
    root = tmp_path / "a fork"
    for patch in PATCHES:
        file = root / target(patch)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(before(patch, request.param))
    for command in ("init", "add -A", "-c user.name=n -c user.email=e commit -m fork"):
        subprocess.run(["git", *command.split()], cwd=root, check=True, capture_output=True)
    return root


def tree(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def script(*words: str | Path, code: int = 0) -> str:
    """What the script says; it must end with this code."""
    command = [ROOT / "patches" / "apply.sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_applied_once_and_reverted_to_the_very_bytes(checkout):
    original = tree(checkout)
    for action, says, patched in (
        ("--check", "can be applied", False),
        ("--apply", "applied", True),
        ("--apply", "applied already", True),
        ("--check", "applied", True),
        ("--revert", "reverted", False),
        ("--revert", "was not applied", False),
    ):
        assert script(action, checkout) == "".join(f"{patch.name}: {says}\n" for patch in PATCHES)
        assert (tree(checkout) == original) != patched
        assert ("enable()" in (checkout / "pretrain_gpt.py").read_text()) == patched


def test_a_fork_that_differs_in_one_file_is_named_and_nothing_is_changed(checkout):
    file = checkout / "pretrain_gpt.py"
    file.write_text(file.read_text().replace(MAIN, "if __name__ in ('__main__', 'launched'):\n"))
    original = tree(checkout)
    for action in ("--check", "--apply"):
        message = script(action, checkout, code=1)
        assert tree(checkout) == original
        assert re.search(r"patch failed: pretrain_gpt\.py:\d+", message)
        assert "a\\ fork apply --unidiff-zero --3way /" in message


@pytest.mark.parametrize("where", ["above", "below", "inside", "instead"])
def test_a_fork_that_changed_the_lines_around_the_entry_takes_the_patch(where, checkout):
    """The calls come first under `__main__`, and nothing else of the file changes."""
    own = {
        "above": ("# line 3\n", "# line 3\nimport fork\nfork.begin()\n"),
        "below": ("    pretrain()\n", "    pretrain()\n    fork.end()\n\n\ndef unused():\n    pass\n"),
        "inside": (MAIN, f"{MAIN}    fork.begin()  # before all\n"),
        "instead": ("    _MAIN_ENTRY_TIME = time.time()\n", "    fork.clock()\n"),
    }[where]
    file = checkout / "pretrain_gpt.py"
    file.write_text(file.read_text().replace(*own))
    names = checkout / "megatron" / "training" / "__init__.py"
    names.write_text("import fork\n" + names.read_text() + "\nfrom .fork import more\n")
    original = tree(checkout)
    script("--apply", checkout)
    calls = "    from wlb_megatron import enable  # --wlb-off leaves Megatron as it is\n\n    enable()\n"
    assert file.read_text() == original["pretrain_gpt.py"].replace(MAIN, MAIN + calls)
    script("--revert", checkout)
    assert tree(checkout) == original


def test_what_was_merged_by_hand_counts_as_applied_and_is_not_taken_out(checkout):
    script("--apply", checkout)
    file = checkout / "pretrain_gpt.py"
    file.write_text(file.read_text().replace(MAIN, "def main():\n"))
    merged = tree(checkout)
    assert script("--apply", checkout).count("applied already") == 2
    assert "--3way --reverse" in script("--revert", checkout, code=1)
    assert tree(checkout) == merged


def test_a_half_patched_fork_gets_the_rest_also_inside_another_repository(checkout):
    script("--apply", checkout)
    patched = tree(checkout)
    subprocess.run(["git", "checkout", "pretrain_gpt.py"], cwd=checkout, check=True, capture_output=True)
    subprocess.run(["rm", "-rf", str(checkout / ".git")], check=True)
    subprocess.run(["git", "init", "-q", str(checkout.parent)], check=True)
    (checkout.parent / ".gitignore").write_text("*\n")
    says = script("--apply", checkout).splitlines()
    assert [line.split(": ")[1] for line in says] == ["applied already", "applied"]
    assert tree(checkout) == patched


def test_a_folder_that_is_no_checkout_and_a_wrong_action_are_refused(tmp_path):
    assert "is no Megatron-LM checkout" in script("--apply", tmp_path, code=2)
    for words in ((), ("--apply",), ("--undo", tmp_path)):
        assert script(*words, code=2).startswith("usage: ")


def test_the_patches_name_the_versions_that_the_tests_apply_them_to():
    assert len(PATCHES) == 2
    for patch in PATCHES:
        (line,) = re.findall(r"^Tried on megatron-core (.+)$", patch.read_text(), re.MULTILINE)
        assert line.split(", ") == list(PLACES)


def test_a_patch_holds_a_call_and_no_logic():
    """pretrain_gpt.py always calls, other scripts where a flag asks for it."""
    call = ["from wlb_megatron import enable", "enable()"]
    asked = ["import sys", 'if any(argument.startswith("--wlb-") for argument in sys.argv[1:]):']
    for patch, expected in zip(PATCHES, (call, [*asked, *call]), strict=True):
        added = [line[1:].split("  #")[0].strip() for line in hunk(patch) if line.startswith("+")]
        assert [line for line in added if line] == expected
        assert not [line for line in hunk(patch) if line.startswith("-")]


def test_the_patch_of_the_wheels_file_fits_the_installed_wheel(tmp_path):
    """scripts/check_patches.sh checks both against a clone."""
    if WHEEL is None or not WHEEL.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    name = "megatron/training/__init__.py"
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text((Path(next(iter(WHEEL.submodule_search_locations))).parents[1] / name).read_text())
    (tmp_path / "pretrain_gpt.py").write_text(MAIN + "    pretrain()\n")
    script("--apply", tmp_path)
    assert "enable()" in file.read_text()
    compile(file.read_text(), name, "exec")
