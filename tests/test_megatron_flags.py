"""docs/megatron_flags.md speaks of every flag that Megatron's parser has."""

import json
import re
from fnmatch import fnmatchcase

import pytest
from megatron_runs import ROOT, run_script

from wlb_megatron.plugin.flags.versions import WHEEL

LIST = """
import argparse, json
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
groups = {g.title: [a.option_strings[0] for a in g._group_actions if a.option_strings] for g in parser._action_groups}
from megatron.core.package_info import __shortversion__
print(json.dumps([__shortversion__, groups]))
"""


@pytest.mark.megatron
def test_every_flag_of_megatrons_parser_stands_in_the_table(tmp_path):
    text = (ROOT / "docs" / "megatron_flags.md").read_text(encoding="utf-8")
    patterns = set(re.findall(r"`(--[a-z0-9*-]+)", text))
    untouched = set(re.findall(r"\*([^*`\n]+)\*", text[text.index("## What has nothing to do") :]))
    done = run_script(LIST, [], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    version, groups = json.loads(done.stdout.splitlines()[-1])
    if version == WHEEL:
        assert untouched <= set(groups), untouched - set(groups)
        assert f"all {sum(map(len, groups.values()))} flags of megatron-core {version}'s parser" in text
    flags = [flag for title, members in groups.items() if title not in untouched for flag in members]
    missing = [flag for flag in flags if not any(fnmatchcase(flag, pattern) for pattern in patterns)]
    assert not missing
    assert sum(map(len, groups.values())) > 700
