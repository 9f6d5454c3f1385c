"""The script's own forward step, loss function and dataset provider.

The plugin replaces all three. Megatron's own are replaced without a word. They are known by the digests of their
sources, so other lines of a fork's script do not matter. A loss function of the script's own is called on the plugin's
output, in Megatron's form: loss_func(loss_mask, output_tensor[, model]), which returns the loss, the number of tokens
and what is logged. Anything else is refused, unless --wlb-replace-script-functions allows the replacement.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from wlb_megatron.plugin.flags.refusal_printing import say
from wlb_megatron.plugin.job_state import part
from wlb_megatron.refusals import Refused, RefusedHere

_DIGESTS = """
    014ef2974c2d 4620884f9528 467bd3034db9 4eb7249458d5 5e54ae3d1961 5f8f6debf715 692d9c66a09e 761fa34e4e9f
    817b3286ec4f 92ef418e674c 93117a2b125c 999110246dbc 9a1fe1851bfa 9bc85eb3e955 a476012e4d17 a4d3e55bf0a8
    a7c03082bcf4 a9798cb4d766 aca80a6dab58 b52f73a70983 b874fb1855ea bbb86115d929 bbe3633f800c c05ffc30399f
    d11d454c7f4d d2186110b375 e1b6c786b4a4 e7a78aa9d072 ebe91977b28d ec5efe411e3f f28bbd7edee3 f32a93b712e0
"""
MEGATRONS = frozenset(_DIGESTS.split())
"""Digests of forward_step, get_batch, loss_func, train_valid_test_datasets_provider and their helpers in Megatron's
pretrain_gpt.py: of core_r0.18.0, core_r0.19.0, of each commit of main since, of dev, and of pull request 6742; in
pretrain_hybrid.py: of core_r0.18.0, core_r0.19.0, and of each commit of main between them and since."""

_NO_MEANING = ("annotation", "returns", "type_comment")
"""Parts of a function's syntax that change nothing that it does."""


@dataclass(slots=True)
class Script:
    """loss: the function that the script's forward step makes its loss with. is_megatrons: so is its source."""

    loss: Callable[..., Any] | None = None
    is_megatrons: bool = True


def settle(
    step: Callable[..., Any], provider: Callable[..., Any], *, replace: bool, fp16: bool = False
) -> None:
    """Decide what is replaced and what is called of the functions that pretrain() was given. Refused if the script has
    its own and no flag allows to replace them.

    replace: --wlb-replace-script-functions. fp16: losses are divided by the plan's tokens, whatever the loss function
    counts.
    """
    script = part(Script)
    own_functions: dict[str, Callable[..., Any]] = {
        name: function
        for name, function in (("forward step", step), ("dataset provider", provider))
        if not is_megatrons(function)
    }
    script.loss = _loss_of(step)
    script.is_megatrons = script.loss is None or is_megatrons(script.loss)
    if script.loss is not None and not script.is_megatrons and not _takes_our_call(script.loss):
        own_functions["loss function"], script.loss = script.loss, None
    replaced = ", ".join(f"{name} {_place(function)}" for name, function in own_functions.items())
    if own_functions and not replace:
        raise Refused(
            f"wlb_megatron refuses the script's own {replaced}: the plugin runs its own instead, so what the script's "
            "do beyond Megatron's would be lost. Keep Megatron's forward_step and dataset provider, and put the loss "
            "into loss_func(loss_mask, output_tensor, model=None), which the plugin calls; or add "
            "--wlb-replace-script-functions"
        )
    if fp16 and script.loss is not None and not script.is_megatrons:
        raise Refused(
            f"wlb_megatron refuses --fp16 with the script's own loss function {_place(script.loss)}: losses are "
            "divided by the plan's tokens before the backward, and the function may count others; use --bf16"
        )
    if own_functions:
        say(f"replaces the script's own {replaced}")
    if script.loss is not None and not script.is_megatrons:
        say(f"calls the script's own loss function {_place(script.loss)}")


def loss_to_call(model: Any, *, distills: bool) -> Callable[[Any, Any], Any] | None:
    """The script's loss function of (loss_mask, output_tensor), None if Megatron's own does no more than ours.

    distills: with --modelopt-enabled Megatron's adds a distillation loss.
    """
    script = part(Script)
    if script.loss is None or (script.is_megatrons and not distills):
        return None
    takes_model = "model" in inspect.signature(script.loss).parameters
    return partial(_called, partial(script.loss, model=model) if takes_model else script.loss)


def _called(loss: Callable[..., Any], loss_mask: Any, output: Any) -> Any:
    """RefusedHere if it does not return a loss, a number of tokens and what is logged."""
    result = loss(loss_mask, output)
    if len(result) != 3:
        raise RefusedHere(
            f"wlb_megatron: the script's loss function {_place(loss)} must return the sum of its losses, the number of "
            "tokens and a dict of what is logged, because micro-batches differ in tokens"
        )
    return result


def is_megatrons(function: Any) -> bool:
    """Whether it, and each function of the script's that it calls, has a source of Megatron's, or is the plugin's."""
    if (getattr(function, "__module__", None) or "").startswith("wlb_megatron."):
        return True
    trees = map(_syntax, _reached(function))
    return all(tree is not None and digest(tree) in MEGATRONS for tree in trees)


def digest(tree: ast.FunctionDef) -> str:
    """Of what a function does: not of comments, docstrings, annotations or layout. The name of the loss function of a
    forward step does not count either."""
    tree = copy.deepcopy(tree)
    for call in _losses_made(tree):
        call.args[0] = ast.Name("loss_func", ast.Load())
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "model"]
    return hashlib.blake2b(repr(_plain(tree)).encode(), digest_size=6).hexdigest()


def _plain(node: Any) -> Any:
    """Syntax as tuples and lists, the same in each version of Python."""
    if isinstance(node, list):
        return [
            _plain(each)
            for each in node
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _NO_MEANING]
    parts = [(name, _plain(value)) for name, value in fields if value is not None and value != []]
    return type(node).__name__, parts


def _syntax(function: Any) -> ast.FunctionDef | None:
    if not isinstance(function, FunctionType):
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body
    except (OSError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _reached(function: Any) -> Iterator[Any]:
    """The function, then the functions that it names in its script, and so on; none of Megatron's or torch's, and not
    the loss function of a forward step."""
    functions = [function]
    for each in functions:
        yield each
        tree = _syntax(each)
        if tree is None:
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in sorted(names - _loss_names(tree)):
            value = each.__globals__.get(name)
            library = (getattr(value, "__module__", None) or "").split(".")[0] in ("megatron", "torch")
            if isinstance(value, FunctionType) and not library and value not in functions:
                functions.append(value)


def _losses_made(tree: ast.FunctionDef) -> list[ast.Call]:
    """`partial(loss_func, loss_mask, model=model)`, wherever a forward step makes it of a function by its name."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and [getattr(each, "id", None) for each in (node.func, *node.args[1:])] == ["partial", "loss_mask"]
        and isinstance(node.args[0], ast.Name)
    ]


def _loss_names(tree: ast.FunctionDef) -> set[str]:
    return {call.args[0].id for call in _losses_made(tree) if isinstance(call.args[0], ast.Name)}


def _loss_of(step: Any) -> Callable[..., Any] | None:
    """The function with which a forward step makes its loss, where it names it."""
    tree = _syntax(step)
    names = _loss_names(tree) if tree else set()
    return step.__globals__.get(names.pop()) if len(names) == 1 else None


def _takes_our_call(loss: Any) -> bool:
    try:
        parameters = inspect.signature(loss)
        keywords = {"model": None} if "model" in parameters.parameters else {}
        parameters.bind(None, None, **keywords)
    except (TypeError, ValueError):
        return False
    return True


def _place(function: Any) -> str:
    """Its name, file and line."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"
