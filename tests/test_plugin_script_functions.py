"""Which of a script's functions are Megatron's own, and what becomes of those that are not."""

import importlib.util
from typing import Any

import pytest

from wlb_megatron.plugin import script_functions
from wlb_megatron.plugin.script_functions import is_megatrons, loss_to_call, settle
from wlb_megatron.refusals import Refused, RefusedHere

SCRIPT = '''
from functools import lru_cache, partial
import math

def get_batch(data_iterator):
    return next(data_iterator)

def loss_func(loss_mask, output_tensor, model=None):
    """Its loss."""
    return sum(output_tensor), len(output_tensor), {"lm loss": 1}

def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """One step."""
    tokens, loss_mask = get_batch(data_iterator)
    if return_schedule_plan:
        return None, partial(loss_func, loss_mask, model=model)
    return model(tokens), partial(loss_func, loss_mask, model=model)

def provider(samples, vp_stage=None):
    return samples
'''
LIKE_IT = {
    "comments and layout": {"next(data_iterator)": "next(  # of a batch\n        data_iterator)"},
    "docstrings": {"One step.": "One step of ours.", '    """Its loss."""\n': ""},
    "annotations": {"(samples, ": "(samples: list, "},
    "other lines": {"import math": "import math, os\n\ndef more():\n    return 2\n"},
    "another name of the loss": {
        "partial(loss_func,": "partial(their_loss,",
        "def loss_func": "def their_loss",
    },
    "a loss without the model": {", loss_mask, model=model)": ", loss_mask)"},
    "another loss": {"sum(output_tensor)": "2 * sum(output_tensor)"},
}
UNLIKE_IT = {
    "the step": {"model(tokens)": "model(tokens) * 2"},
    "a helper of the step": {"next(data_iterator)": "next(data_iterator)[::-1]"},
    "what the loss is given": {"loss_mask, model=model)": "loss_mask, model=model, scale=2)"},
    "a decorated helper": {
        "def get_batch": "def twice(f):\n    return lambda *a: f(*a)\n\n@twice\ndef get_batch"
    },
}
"""What a fork replaces in SCRIPT, and by what."""


def changed(replaced: dict[str, str]) -> str:
    text = SCRIPT
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a module of a text, in a file of its own. Megatron's functions are those of SCRIPT."""

    def made(text: str) -> Any:
        path = tmp_path / f"script_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    megatrons = made(SCRIPT)
    functions = (megatrons.get_batch, megatrons.loss_func, megatrons.forward_step, megatrons.provider)
    trees = [script_functions._syntax(function) for function in functions]
    known = frozenset(script_functions.digest(tree) for tree in trees if tree is not None)
    monkeypatch.setattr(script_functions, "MEGATRONS", known)
    return made


@pytest.mark.parametrize("what", LIKE_IT)
def test_a_forks_other_lines_do_not_matter(what, script):
    module = script(changed(LIKE_IT[what]))
    assert is_megatrons(module.forward_step) and is_megatrons(module.provider)


@pytest.mark.parametrize("what", UNLIKE_IT)
def test_what_changes_a_step_is_seen_also_in_its_helpers(what, script):
    module = script(changed(UNLIKE_IT[what]))
    assert not is_megatrons(module.forward_step) and is_megatrons(module.provider)


def handed(module: Any, *, replace: bool = False) -> None:
    settle(module.forward_step, module.provider, replace=replace)


def test_megatrons_own_are_replaced_without_a_word(script, capsys):
    handed(script(SCRIPT))
    assert loss_to_call(None, distills=False) is None and capsys.readouterr().out == ""
    distilling = loss_to_call("a model", distills=True)
    assert distilling is not None and distilling([1], [2, 3]) == (5, 2, {"lm loss": 1})


def test_a_loss_function_of_the_scripts_own_is_called_with_and_without_a_model(script, capsys):
    for parameters, factor, expected in (("", "2", 10), (", model=None", "2 * len(model)", 50)):
        ours = {"sum(output_tensor)": f"{factor} * sum(output_tensor)", ", model=None)": f"{parameters})"}
        handed(script(changed(ours)))
        function = loss_to_call("wlb_m", distills=False)
        assert function is not None and function([1, 1], [2, 3])[0] == expected
        assert "calls the script's own loss function loss_func (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (("model(tokens)", "model(tokens) * 2"), "forward step forward_step ("),
        (("return samples", "return samples * 2"), "dataset provider provider ("),
        (("output_tensor, model=None):", "output_tensor, scale):"), "loss function loss_func ("),
    ],
)
def test_what_cannot_be_called_is_refused_or_replaced_with_a_line(what, named, script, capsys):
    module = script(SCRIPT.replace(*what))
    with pytest.raises(Refused, match="--wlb-replace-script-functions") as refused:
        handed(module)
    assert f"the script's own {named}{module.__file__}:" in str(refused.value)
    handed(module, replace=True)
    assert f"replaces the script's own {named}{module.__file__}:" in capsys.readouterr().out
    assert loss_to_call(None, distills=False) is None


def test_a_loss_function_that_counts_no_tokens_ends_the_run(script):
    handed(script(SCRIPT.replace("len(output_tensor), {", "{")))
    function = loss_to_call(None, distills=False)
    assert function is not None
    with pytest.raises(RefusedHere, match="must return the sum of its losses, the number of tokens and"):
        function([1], [2])


def test_what_has_no_source_is_not_megatrons(script):
    made: dict[str, Any] = {}
    exec("def forward_step(data_iterator, model):\n    return 1", made)
    with pytest.raises(Refused, match=r"forward step forward_step \(<string>:1\), dataset provider builtin"):
        settle(made["forward_step"], print, replace=False)
