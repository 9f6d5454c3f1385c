"""The house's rules: which parts may import what, and that the project speaks of itself alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "wlb_megatron"
PURE = ("workload", "documents", "sft", "pipeline", "packing", "sharding", "dynamic", "simulator")
PURE_FILES = {
    f"{name}.py" for name in ("plan", "config", "registry", "arguments", "refusals", "errors", "child")
}
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = (*PURE[:7], "report", "simulator", "attention", "profiler")
FLOORS += ("analyze", "plugin", "doctor", "cpu")
"""Folders from the bottom up: each may import those before it, and the package's own files.

`cpu` comes last, so that no other folder imports it: it changes torch.cuda for the whole process."""
PLUGIN_FLOORS = ("flags", "micro_batches", "logs", "model", "step", "plans", "sft")
"""The same inside plugin/: Megatron's flags, planned micro-batches, hooks, and what makes them of a job. The folder's
own files are its bottom (job_state, stores) and its top (hooks, launch)."""
ENTRIES = ("__init__", "cli", "inspect_plans", "launch", "pretrain_gpt", "pretrain_hybrid")
"""Files of the package that stand above all folders; the others stand below."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def within(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=within)
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    names, where = imported(path), within(path)
    part = where.split("/")[0]
    if part in PURE or where in PURE_FILES:
        assert not names & {"torch", "megatron", "transformer_engine", "triton"}
    if part != "plugin" and where not in ("attention/core_attention.py", "profiler/layer.py"):
        assert "megatron" not in names
    if where != "attention/kernels/te_backend.py" and part != "profiler":
        assert "transformer_engine" not in names
    assert "scripts" not in names
    if where != "attention/kernels/fa4_backend.py":
        assert "flash_attn" not in names


def name_of(path: Path) -> str:
    """plugin.source of plugin/plans/source.py, packing of packing/__init__.py."""
    return within(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def arrows() -> dict[str, set[str]]:
    """The package's own files that each of them imports anywhere in it, as `name_of` has them."""
    names = {name_of(path) for path in MODULES}
    imports: dict[str, set[str]] = {}
    for path in MODULES:
        imports[name_of(path)] = own = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wlb_megatron":
                part = node.module.removeprefix("wlb_megatron").removeprefix(".")
                for alias in node.names:
                    whole = f"{part}.{alias.name}".removeprefix(".")
                    own.add(whole if whole in names else part)
            elif isinstance(node, ast.Import):
                own |= {alias.name.removeprefix("wlb_megatron.") for alias in node.names} & names
    # A child process begins in its own module.
    return {name: others - {name} for name, others in imports.items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    left = arrows()

    def leave_out(free: set[str]) -> bool:
        nonlocal left
        left = {name: others - free for name, others in left.items() if name not in free}
        return bool(free)

    while leave_out({name for name, others in left.items() if not others & left.keys()}):
        pass
    while leave_out(left.keys() - set().union(*left.values())):  # what stands above circles is in none
        pass
    assert not left, f"these import each other in a circle: {sorted(left)}"


def test_no_folder_holds_more_than_twenty_files() -> None:
    folders = {path.parent for path in MODULES}
    full = {within(folder): count for folder in folders if (count := len(list(folder.glob("[!_]*.py")))) > 20}
    assert not full


def test_no_file_imports_upwards() -> None:
    def floor(name: str) -> int:
        first = name.split(".")[0]
        top = len(FLOORS) + 1
        return FLOORS.index(first) + 1 if first in FLOORS else top if first in ENTRIES else 0

    pairs = [(name, other) for name, others in arrows().items() for other in others]
    upwards = [pair for pair in pairs if floor(pair[1]) > floor(pair[0]) and "__main__" not in pair[0]]
    assert not upwards


def test_no_folder_of_the_plugin_imports_upwards() -> None:
    def floor(name: str) -> int | None:
        parts = name.split(".")
        return PLUGIN_FLOORS.index(parts[1]) if parts[0] == "plugin" and parts[1:2] != parts[1:] else None

    floors = {name: floor(name) for name in arrows()}
    upwards = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in others
        if (own := floors[name]) is not None and (its := floors.get(other)) is not None and its > own
    ]
    assert not upwards


def test_the_rule_covers_the_parts_it_speaks_of() -> None:
    parts = {within(path).split("/")[0] for path in MODULES}
    assert parts.issuperset({*FLOORS, *(f"{name}.py" for name in ENTRIES)})
    assert "megatron" in imported(PACKAGE / "attention" / "core_attention.py")
    assert "flash_attn" in imported(PACKAGE / "attention" / "kernels" / "fa4_backend.py")


def test_importing_the_plans_brings_neither_torch_nor_megatron() -> None:
    script = f"""
import pkgutil, importlib, sys
import wlb_megatron
for part in {PURE}:
    package = importlib.import_module("wlb_megatron." + part)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
assert not {{"torch", "megatron", "transformer_engine"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_no_file_pickles_or_builds_shell_strings() -> None:
    """But for the pipe between a process and the child that it started, which nobody else writes to."""
    for path in [*MODULES, *sorted((ROOT / "scripts").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        if path != PACKAGE / "child.py":
            assert "pickle" not in imported(path), path
        assert "shell=True" not in text and "os.system" not in text, path
        assert not re.search(r"allow_pickle\s*=\s*True", text), path
        if path.is_relative_to(PACKAGE):
            assert not re.search(r"weights_only\s*=\s*False", text), path


def anchor(heading: str) -> str:
    """A Markdown heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "scripts/bench/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_between_documents_and_named_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), link
    for name in re.findall(r"`((?:docs|scripts|tests|wlb_megatron)/[\w./]+\.\w+)`", text):
        assert (ROOT / name).exists(), name


ARCHIVED = re.compile(r"\((lab-2026-12|cdfedf7)\)")
"""The mark of a command whose script is no longer in the tree, but at this tag or commit."""


def test_every_script_that_is_named_somewhere_is_there() -> None:
    """By its path, or as the module that `python -m` starts; in a document a paragraph may name archived ones."""
    scripts = [path for kind in ("py", "sh", "sbatch") for path in (ROOT / "scripts").rglob(f"*.{kind}")]
    for page in [*DOCUMENTS, *MODULES, *scripts, *(ROOT / "tests").glob("*.py")]:
        text = page.read_text(encoding="utf-8")
        if page in DOCUMENTS:
            text = "\n\n".join(part for part in text.split("\n\n") if not ARCHIVED.search(part))
        for name in re.findall(r"\bscripts/[\w/]+\.(?:py|sh|sbatch)\b", text):
            assert (ROOT / name).exists(), f"{page} names {name}"
        for name in re.findall(r"(?<![\w/-])scripts(?:\.\w+)+", text):
            module = ROOT / name.replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").exists(), f"{page} names {name}"


TAKES_FLAGS = ("refusals.py", "plugin/take_over.py")
"""Beside plugin/flags/, which reads them: what looks at any flag, or sets some."""

AS_MEGATRON_CALLS = ("plugin/plans/resume.py",)
"""Wrappers of functions of Megatron's that have its arguments as a parameter."""


@cache
def functions() -> list[tuple[Path, ast.FunctionDef]]:
    return [(path, node) for path in MODULES for node in nodes(path) if isinstance(node, ast.FunctionDef)]


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def test_megatrons_arguments_go_no_further_than_the_door() -> None:
    def takes_arguments(function: ast.FunctionDef) -> bool:
        annotations = [one.annotation for one in parameters_of(function) if one.arg == "args"]
        return any(getattr(annotation, "id", "") == "Any" for annotation in annotations)

    named = [(path, function) for path, function in functions() if function.name != "__torch_function__"]
    modules = {within(path) for path, function in named if takes_arguments(function)}
    beyond = {where for where in modules if not where.startswith("plugin/flags/")}
    assert beyond == {*TAKES_FLAGS, *AS_MEGATRON_CALLS}


MOST_PARAMETERS = 8
LONG_SIGNATURES = {"_merge", "_spread", "_sum_pairs"}
"""Functions that still take more, the first three as Triton's kernels do. No other may."""


def test_functions_take_records_not_many_arguments() -> None:
    def taken(function: ast.FunctionDef) -> set[str]:
        return {parameter.arg for parameter in parameters_of(function)} - {"self", "cls"}

    taking_many = {function.name for _, function in functions() if len(taken(function)) > MOST_PARAMETERS}
    assert taking_many <= LONG_SIGNATURES
