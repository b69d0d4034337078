"""Public names of packages, whose modules are imported when they are first used."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import plasmid
import pytest
from plasmid import lazy_exports

PACKAGES = (
    "plasmid",
    "plasmid_agents",
    "plasmid_agents.launch",
    "plasmid_rewards",
    "plasmid_sandbox",
    "plasmid_workflows",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_names_for_type_checkers_are_those_of_the_package(name):
    package = import_module(name)
    tree = ast.parse(inspect.getsource(package))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {node.module: tuple(name.name for name in node.names) for node in block.body}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert typed == ast.literal_eval(call.args[1])
    assert sorted(name for names in typed.values() for name in names) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


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


def test_processes_of_servers_agents_and_workers_start_without_importing_settings():
    """The import takes 0.3 s in each of the processes that a server starts one after the other, and in each worker."""
    modules = (
        "plasmid_sglang.launch",
        "plasmid_serving.processes.launch",
        "plasmid_agents.launch.fork_server",
        "plasmid_sandbox.worker",
    )
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'pydantic' not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", code, *modules], check=True)
