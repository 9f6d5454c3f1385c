"""The sdist and the wheel made of it: what they hold, what they ask for, and that they work alone."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import wlb_megatron
from wlb_megatron.registry import KERNELS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel built from the sdist, both with the packages that are here (no network)."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in ("wlb_megatron", "patches", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    _run([sys.executable, "setup.py", "-q", "sdist", "-d", str(built)], tree)
    (sdist,) = built.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    _run([*pip, "-w", str(built), str(sdist)], built)
    (path,) = built.glob("*.whl")
    return path


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    parts = [path for kind in ("*.py", "*.json") for path in (ROOT / "wlb_megatron").rglob(kind)]
    assert {str(path.relative_to(ROOT)) for path in parts} <= set(names)
    assert "wlb_megatron/workload/tables/h100.json" in names
    folders = {name.split("/")[0].removesuffix(".dist-info") for name in names}
    assert folders == {"wlb_megatron", wheel.name.split("-py3")[0]}


def test_the_sdist_takes_every_kind_of_file_that_tests_read():
    (line,) = [line for line in (ROOT / "MANIFEST.in").read_text().splitlines() if " tests " in line]
    files = [path for path in (ROOT / "tests").rglob("*.*") if "__pycache__" not in path.parts]
    assert {f"*{path.suffix}" for path in files} == set(line.split()[2:])


def test_the_package_alone_asks_for_numpy_and_extras_for_the_rest(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    needed = metadata.get_all("Requires-Dist") or []
    (alone,) = [line for line in needed if "extra ==" not in line]
    assert alone.startswith("numpy")
    assert metadata["Version"] == wlb_megatron.__version__
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (ruff,) = [line.split(";")[0].strip() for line in needed if line.startswith("ruff")]
    assert f"rev: v{ruff.removeprefix('ruff==')}\n" in hooks
    assert {"cpu", "gpu", "fa4", "report"} <= set(metadata.get_all("Provides-Extra") or [])
    for line in needed:  # a release that nobody has tried is not taken
        assert "<" in line or "==" in line.split(";")[0] or 'extra == "dev"' in line, line
    pinned = [line.split(";")[0].strip().split("==") for line in needed if 'extra == "fa4"' in line]
    assert {name.split("[")[0]: version for name, version in pinned} == KERNELS["fa4"].packages


def test_the_installed_wheel_plans_without_torch_megatron_or_a_checkout(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    _run([*pip, str(tmp_path / "site"), str(wheel)], tmp_path)
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
for name in ("torch", "megatron", "rich", "matplotlib", "ortools"):
    sys.modules[name] = None  # importing it fails
from wlb_megatron import cli
assert cli.__file__.startswith({str(tmp_path)!r}), cli.__file__
sys.exit(cli.main(["inspect", "--lengths", "4,12", "--window", "16", "--cp", "2"]))
"""
    assert "cp 1" in _run([sys.executable, "-c", script], tmp_path)


def test_the_packages_public_face_brings_neither_torch_nor_megatron():
    script = "import sys, wlb_megatron as w; assert callable(w.enable) and w.WlbConfig().chunks == 'auto'; "
    script += "assert w.__all__ == ['WlbConfig', 'enable'] and not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the setup asks for Python 3.12")
def test_the_setup_does_not_take_the_python_of_the_environment_that_it_removes(tmp_path):
    _run([sys.executable, "-m", "venv", "--without-pip", ".venv"], tmp_path)
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    function = script[script.index("find_python()") : script.index("\nstamp=")]
    active = f"{tmp_path}/.venv/bin"
    python = _run(["bash", "-c", f"PATH={active}:$PATH\n{function}\nfind_python"], tmp_path).strip()
    assert Path(python).is_file() and str(tmp_path) not in python
