"""Public names of `plasmid`, whose modules are imported when they are first used."""

import ast
import inspect
import subprocess
import sys

import plasmid
import pytest
from plasmid import lazy_exports


def test_the_names_for_type_checkers_are_those_of_the_package(monkeypatch):
    tree = ast.parse(inspect.getsource(plasmid))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {node.module: tuple(name.name for name in node.names) for node in block.body}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert typed == ast.literal_eval(call.args[1])
    assert sorted(name for names in typed.values() for name in names) == sorted(plasmid.__all__)


def test_every_name_can_be_imported_and_no_other():
    found = {name: getattr(plasmid, name) for name in plasmid.__all__}
    assert found["RunConfig"] is sys.modules["plasmid.config.run"].RunConfig
    assert set(plasmid.__all__) < set(dir(plasmid))
    with pytest.raises(AttributeError, match="module 'plasmid' has no attribute 'nothing'"):
        plasmid.nothing  # noqa: B018


def test_a_name_is_imported_once(monkeypatch):
    imported = []
    importing = lazy_exports.import_module
    monkeypatch.setattr(lazy_exports, "import_module", lambda name: imported.append(name) or importing(name))
    monkeypatch.delattr(plasmid, "Role", raising=False)
    assert plasmid.Role is plasmid.Role and imported == ["plasmid.types"]


@pytest.mark.parametrize("module", ["plasmid_sglang.launch", "plasmid_serving.processes.launch"])
def test_processes_of_servers_start_without_importing_settings(module):
    """The import takes 0.3 s in each of the processes that a server starts one after the other."""
    subprocess.run([sys.executable, "-c", f"import sys, {module}; assert 'pydantic' not in sys.modules"], check=True)
