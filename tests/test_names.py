"""Names that code and docstrings take from the project's modules: each exists where it is looked for."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "wlb_megatron"
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py"))]
PARTS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
MODULE_NAME = re.compile(rf"(?<![\w./-])(?:wlb_megatron\.)?(?:{'|'.join(PARTS)})(?:\.[A-Za-z_]\w*)+")


@cache
def source(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def defined(path: Path) -> set[str]:
    """Names that a module has once it is imported: all that is bound outside functions, and what `global` makes."""
    names, blocks = set(), [tree(path).body]
    while blocks:
        for node in blocks.pop():
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            named = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
            names |= {name.id for name in named if isinstance(name.ctx, ast.Store)}
            blocks += [getattr(node, part) for part in ("body", "orelse", "finalbody") if hasattr(node, part)]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
    return names


def has(module: str, name: str) -> bool:
    path = source(module)
    return (path is not None and name in defined(path)) or source(f"{module}.{name}") is not None


def test_every_name_taken_from_a_module_of_the_project_is_there():
    """In functions, too, and where it is set or read as an attribute of the module."""
    missing, seen = [], 0
    for path in FILES:
        modules: dict[str, str] = {}
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            if (node.module or "").split(".")[0] not in ("wlb_megatron", "scripts"):
                continue
            for alias in node.names:
                seen += 1
                if not has(str(node.module), alias.name):
                    missing.append(f"{path}:{node.lineno}: {node.module}.{alias.name}")
                if source(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module and not has(module, node.attr):
                    missing.append(f"{path}:{node.lineno}: {module}.{node.attr}")
    assert seen > 1000 and not missing, "\n".join(missing)


def test_docstrings_and_strings_name_modules_where_they_are():
    missing, seen = [], 0
    for path in FILES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            for mentioned in MODULE_NAME.findall(node.value):
                module = mentioned if mentioned.startswith("wlb_megatron.") else f"wlb_megatron.{mentioned}"
                seen += 1
                while module.count(".") > 1 and source(module) is None:
                    module, name = module.rsplit(".", 1)
                    if source(module) and not has(module, name) and name not in ("py", "md", "png"):
                        missing.append(f"{path}:{node.lineno}: {mentioned}")
    assert seen > 20 and not missing, "\n".join(missing)
