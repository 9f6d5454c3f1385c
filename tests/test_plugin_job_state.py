"""The plugin's state has one owner: a second job in the same process begins without the first one's."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from wlb_megatron.plugin import job_state
from wlb_megatron.plugin.job_state import begin_job, part

PLUGIN = Path(job_state.__file__).parent


@dataclass
class Seen:
    names: list[str] = field(default_factory=list)


def test_a_new_job_begins_with_new_parts():
    part(Seen).names.append("first")
    assert part(Seen).names == ["first"]
    begin_job()
    assert part(Seen).names == []


def test_no_module_of_the_plugin_rebinds_its_own_names():
    modules = {
        path.relative_to(PLUGIN).as_posix()
        for path in PLUGIN.rglob("*.py")
        if any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    }
    assert not modules
