"""The launcher over users' own scripts, and what it says about the Megatron it finds."""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked_ranks
import pytest
from megatron_runs import ROOT, cpu_environment, flags, free_port, logged_losses, run_script

from wlb_megatron.plugin import launch as launcher
from wlb_megatron.plugin import pretrain_gpt, take_over
from wlb_megatron.refusals import Refused

USERS_SCRIPT = '''
"""A training script of a user's own: takes pretrain by name, has flags, data and a step that must not be asked."""
from megatron.training import pretrain, print_rank_0
from megatron.training.arguments import parse_and_validate_args
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.core.enums import ModelType

def never(*_, **__):
    raise SystemExit("the plugin did not replace this")

def own_flags(parser):
    parser.add_argument("--team", default="nobody")
    return parser

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=own_flags)
    print(f"trained by {args.team}", flush=True)
    settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(settings, never, ModelType.encoder_or_decoder, never)
'''
WRAPPER = '''
"""What site wrappers do: look at the environment, import what the script needs, then run it."""
import pathlib, runpy
import megatron.training  # before the script, and after the plugin
runpy.run_path(str(pathlib.Path(__file__).with_name("users_script.py")), run_name="__main__")
'''
PATCHED = '''
"""As patches/ make it: no launcher, the plugin is asked for by a flag when megatron.training has been imported."""
import pathlib, runpy
import megatron.training
PATCH
runpy.run_path(str(pathlib.Path(__file__).with_name("users_script.py")), run_name="__main__")
'''


def patch_lines() -> str:
    """What patches/ add to megatron/training/__init__.py."""
    patch = (ROOT / "patches" / "0002-other-scripts.patch").read_text()
    return "\n".join(line[1:] for line in patch.partition("\n@@ ")[2].splitlines() if line.startswith("+"))


def in_a_fresh_process(command: list[str]) -> subprocess.CompletedProcess[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment = {**cpu_environment(), **alone, "MASTER_PORT": str(free_port())}
    how = {"capture_output": True, "text": True, "check": False, "cwd": ROOT}
    return subprocess.run([sys.executable, *command], env=environment, **how)


@pytest.mark.megatron
@pytest.mark.parametrize("start", ["by the launcher", "patched"])
def test_a_wrapped_script_of_ones_own_trains_with_its_flags(start, corpus, tmp_path):
    """A patched one runs where Megatron was imported before, so a forked rank serves; the launcher comes first."""
    patched = PATCHED.replace("PATCH", patch_lines())
    for name, text in (("users_script", USERS_SCRIPT), ("wrapper", WRAPPER)):
        (tmp_path / f"{name}.py").write_text(text)
    job = flags(f"--team us --data-path {corpus} --global-batch-size 2 --train-iters 2")
    job += ["--wlb-replace-script-functions"]
    if start == "patched":
        done = run_script(patched, job, tmp_path)
    else:
        done = in_a_fresh_process(["-m", "wlb_megatron.launch", str(tmp_path / "wrapper.py"), *job])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained by us" in done.stdout
    assert "[wlb] iteration 2" in done.stdout
    assert len(logged_losses(done.stdout)) == 2


HELPER = """
from megatron.training import pretrain as run_pretrain
held = [run_pretrain]
"""
ENABLED_LATE = """
import helper
from wlb_megatron import enable
enable()
"""


STEP_OF_ITS_OWN = """
import torch
from functools import partial
def loss(mask, output):
    return output.sum(), torch.tensor(output.numel(), dtype=torch.int), {}
def batches():
    while True:
        yield torch.arange(65)[None]
def step(data_iterator, model):
    ids = next(data_iterator)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    return model(ids[:, :-1], torch.arange(64)[None], mask, labels=ids[:, 1:]), partial(loss, None)
def provider(samples, vp_stage=None):
    return batches(), None, None
provider.is_distributed = True
"""


def run_late(pretrain: str, corpus: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script that enables the plugin after a helper has been imported, with a step, a loss and data of its own."""
    body = USERS_SCRIPT.replace("pretrain(settings, never, ModelType.encoder_or_decoder, never)", "PRETRAIN")
    call = f"{pretrain}(settings, provider, ModelType.encoder_or_decoder, step)"
    (folder / "helper.py").write_text(HELPER)
    job = f"--global-batch-size 2 --train-iters 2 --data-path {corpus} --wlb-replace-script-functions"
    script = ENABLED_LATE + STEP_OF_ITS_OWN + body.replace("PRETRAIN", call)
    return run_script(script, flags(job), folder)


@pytest.mark.megatron
def test_a_script_trains_though_a_helper_took_pretrain_by_name_before(corpus, tmp_path):
    """Megatron trained without the plugin, and the run succeeded."""
    done = run_late("helper.run_pretrain", corpus, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[wlb] iteration 2" in done.stdout


@pytest.mark.megatron
def test_a_pretrain_that_was_held_out_of_sight_ends_with_a_line_at_its_first_step(corpus, tmp_path):
    done = run_late("helper.held[0]", corpus, tmp_path)
    assert done.returncode == 1
    assert "the data of this training step are not the plugin's" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def launched(corpus: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The user's script by the launcher, with functions of its own."""
    (folder / "users_script.py").write_text(USERS_SCRIPT)
    job = flags(f"--global-batch-size 2 --train-iters 2 --data-path {corpus}", *more)
    assert "--eval-iters" in job and "--eval-interval" not in job
    arguments = [str(folder / "users_script.py"), *job]
    return forked_ranks.run(["-m", "wlb_megatron.launch"], arguments, 1, cpu_environment(), timeout=60)


@pytest.mark.megatron
def test_a_step_and_data_of_a_scripts_own_are_refused_with_their_lines(corpus, tmp_path):
    """They were replaced without a word."""
    done = launched(corpus, tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("wlb_megatron: error: ")]
    place = f"never ({tmp_path / 'users_script.py'}:8)"
    assert f"the script's own forward step {place}, dataset provider {place}: " in line
    assert "--wlb-replace-script-functions" in line and "Traceback" not in done.stderr


@pytest.mark.megatron
def test_the_same_flags_train_with_the_plugin_off_though_nothing_is_evaluated(corpus, tmp_path):
    """Megatron counts samples by --eval-interval, which has no default: an A/B ended in its TypeError."""
    done = launched(corpus, tmp_path, "--wlb-off")
    # It has come to the script's own data provider.
    assert "the plugin did not replace this" in done.stderr, done.stderr[-2000:]


def test_a_patched_fork_runs_without_the_plugin_installed_unless_a_flag_asks_for_it():
    bare = [sys.executable, "-I", "-S", "-c", patch_lines()]  # no site packages, no folder of this project
    for flags_given, missing in ((["--lr", "1"], False), (["--wlb-log", "steps.jsonl"], True)):
        done = subprocess.run([*bare, *flags_given], capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == missing, done.stderr
        assert ("No module named 'wlb_megatron'" in done.stderr) == missing


@pytest.mark.megatron
def test_a_release_that_moved_a_parameter_or_lacks_a_package_is_told_by_name(tmp_path):
    """Signatures are checked before anything is replaced: never half installed."""
    script = """
import dataclasses, sys
import megatron.training.arguments as arguments
from wlb_megatron.plugin import hooks
from wlb_megatron.refusals import Refused

def moved(place, takes):
    hooks.HOOKS = (*kept, dataclasses.replace(kept[0], place=place, takes=takes))
    try:
        hooks.install()
    except Refused as error:
        return str(error)
    raise SystemExit("installed")

kept, before = hooks.HOOKS, arguments.parse_args
said = moved("megatron.training.arguments:parse_args", ("extra_args_provider", "argv"))
assert "0.19.2" in said and "parse_args takes (extra_args_provider, ignore_unknown_args), not argv" in said, said
sys.modules["a_package"] = None
said = moved("a_package:symbol", ())
assert "needs the package a_package" in said and "pip install a_package" in said, said
assert arguments.parse_args is before
"""
    done = run_script(script, [], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_megatrons_dataset_helpers_are_built_only_where_its_own_datasets_may_be(monkeypatch):
    made: list[str] = []
    compile_helpers = partial(take_over.wrap_compile_helpers, lambda: made.append("made"))
    monkeypatch.setattr(take_over.importlib.util, "find_spec", lambda name: None)
    compile_helpers()
    assert not made
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--wlb-off"])
    compile_helpers()
    assert made


def test_a_yaml_file_that_replaces_all_flags_is_refused_where_flags_are_read(monkeypatch):
    """Megatron's load_yaml returns other arguments than the parser's, and validates them elsewhere."""
    parse_args = partial(
        take_over.wrap_parse_args, lambda provider, unknown: argparse.Namespace(yaml_cfg="run.yaml")
    )
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "run.yaml"])
    with pytest.raises(Refused, match="--yaml-cfg: Megatron then ignores every flag"):
        parse_args()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--wlb-off"])
    assert parse_args().wlb_off


def test_a_script_that_has_parsed_its_flags_before_enable_is_told_so():
    with pytest.raises(Refused, match="call enable\\(\\) before the script parses them"):
        take_over.wrap_pretrain(lambda model_type: None, "gpt")


def test_the_launcher_told_to_help_says_its_usage_and_succeeds(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["launch", "--help"])
    launcher.main()
    printed = capsys.readouterr().out
    assert "--describe" in printed and "--wlb-packing" in printed
    monkeypatch.setattr("sys.argv", ["launch"])
    with pytest.raises(SystemExit, match="usage: torchrun"):
        launcher.main()
    for asked in (
        ["-h"],
        ["--num-layers", "2", "--help"],
    ):  # the entry on a wheel, whatever Megatron can print
        monkeypatch.setattr("sys.argv", ["pretrain_gpt", *asked])
        pretrain_gpt.main()
        assert "--wlb-packing" in capsys.readouterr().out
