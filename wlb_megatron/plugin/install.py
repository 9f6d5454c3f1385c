"""Replacing the symbols of hooks.py.

Modules that took the original by name (`from .training import pretrain`) get the replacement as well, so it does not
matter when the hooks are installed; installing twice does nothing the second time. A symbol that is missing, or does
not take a parameter that its wrapper relies on, is an error that names both and the version.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from wlb_megatron.plugin import hooks
from wlb_megatron.plugin.flags.versions import megatron_version, tried_versions
from wlb_megatron.plugin.hooks import Hook
from wlb_megatron.plugin.take_over import is_off
from wlb_megatron.refusals import Refused

ORIGINAL = "__wlb_original__"
_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Names under which packages are installed, where they are imported under another."""


def rows() -> tuple[Hook, ...]:
    """The rows of HOOKS that are for the Megatron that is here."""
    major, minor = (int(part) for part in megatron_version().split(".")[:2])
    here = (major, minor)
    matching = (
        hook for hook in hooks.HOOKS if hook.since <= here and (hook.before is None or here < hook.before)
    )
    return tuple(hook for hook in matching if not hook.optional or _fits(hook))


def _fits(hook: Hook) -> bool:
    try:
        locate(hook)
    except _Misfit:
        return False
    return True


def install() -> None:
    """Replace every symbol of HOOKS; nothing is replaced unless all can be. Safe to call again."""
    located = [(hook, *locate(hook)) for hook in rows()]
    aliases = _aliases([_function(getattr(owner, name)) for _, owner, name in located])
    for hook, owner, name in located:
        symbol = getattr(owner, name)
        original = _function(symbol)
        if hasattr(original, ORIGINAL):
            continue
        replacement = _replacement(hook, original)
        setattr(replacement, ORIGINAL, original)
        setattr(owner, name, property(replacement) if isinstance(symbol, property) else replacement)
        for module, alias in aliases.get(id(original), []):
            setattr(module, alias, replacement)


def _replacement(hook: Hook, original: Any) -> Any:
    """The wrapped symbol, and with --wlb-off the original: nothing of the plugin runs then."""
    wrapped = hook.wrap(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        runs = hook.always or not is_off()
        return (wrapped if runs else original)(*args, **kwargs)

    return replacement


def describe() -> str:
    """The table of replaced symbols, for `python -m wlb_megatron.launch --describe`."""
    replaced = rows()
    lines = [f"megatron-core {megatron_version()}: {len(replaced)} symbols are replaced"]
    symbols = [getattr(*locate(hook)) for hook in replaced]
    aliases = _aliases(symbols)
    for hook, symbol in zip(replaced, symbols, strict=True):
        names = [f"{module.__name__}:{alias}" for module, alias in aliases[id(symbol)]]
        what, *_ = (inspect.getdoc(hook.wrap) or "").split("\n\n")
        lines += [" = ".join(dict.fromkeys([hook.place, *names])), f"    {' '.join(what.split())}"]
    return "\n".join(lines)


class _Misfit(Refused):
    """A symbol that is missing, or takes other parameters."""


def _misfit(what: str) -> _Misfit:
    return _Misfit(
        f"the plugin does not fit this Megatron ({megatron_version()}): {what}. Install a version that was tried "
        f"({tried_versions()})"
    )


def locate(hook: Hook) -> tuple[Any, str]:
    """The object that holds the hook's symbol, and its name there. Refused if this Megatron has another."""
    owner, name = _locate(hook.place)
    parameters = inspect.signature(_function(getattr(owner, name))).parameters
    missing = [parameter for parameter in hook.takes if parameter not in parameters]
    if missing:
        raise _misfit(
            f"{hook.place} takes ({', '.join(parameters)}), not "
            f"{', '.join(missing)}, which wlb_megatron relies on"
        )
    return owner, name


def _function(symbol: Any) -> Any:
    """What a symbol calls: itself, or a property's getter."""
    return symbol.fget if isinstance(symbol, property) else symbol


def _aliases(originals: list[Any]) -> dict[int, list[tuple[Any, str]]]:
    """By id of each object, the names by which loaded modules hold it, Megatron's and any other's."""
    aliases: dict[int, list[tuple[Any, str]]] = {id(original): [] for original in originals}
    for _, module in sorted(sys.modules.items()):
        # Some are no modules, and to ask one that loads itself late for an attribute would load it.
        if isinstance(module, ModuleType):
            for alias, value in list(object.__getattribute__(module, "__dict__").items()):
                if id(value) in aliases:
                    aliases[id(value)].append((module, alias))
    return aliases


def _locate(place: str) -> tuple[Any, str]:
    module_name, path = place.split(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as missing:
        package = getattr(missing, "name", None) if isinstance(missing, ModuleNotFoundError) else None
        if package is not None and not package.startswith("megatron"):
            raise Refused(
                f"megatron-core {megatron_version()} needs the package {package}, which is not installed: "
                f"pip install {_DISTRIBUTIONS.get(package, package)}"
            ) from missing
        raise _misfit(f"there is no {place}, which wlb_megatron replaces ({missing})") from missing
    return owner, name
