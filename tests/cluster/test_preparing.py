"""Checks of every machine before a run starts on it, and distribution of plugin files."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.components import DataFacts
from plasmid.errors import ConfigError
from plasmid.protocols import Node, Resources
from plasmid_cli.display.dry_run import machine_rows, print_plan
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.cluster.node_agent import NodeAgent, PluginFile
from plasmid_runtime.cluster.node_checks import prepare_nodes


class Elsewhere(NodeAgent):
    """A machine with its own files: those in ``here`` do not exist on it."""

    def __init__(self, here, *, versions=None):
        super().__init__(shared_s=0.0)
        self._here, self._versions = here, versions or {}

    def versions(self):
        return super().versions() | self._versions

    async def sees_file(self, path, text):
        return not path.is_relative_to(self._here) and await super().sees_file(path, text)

    def find_differing_plugins(self, files):
        return [file.path for file in files if file.path.is_relative_to(self._here)] or super().find_differing_plugins(
            files
        )


INSTALL = "on the driver's machine; install the same version on all machines"


@pytest.fixture
def config(job, monkeypatch):
    monkeypatch.chdir(job.folder)
    return load_config("job.toml")


def prepared(config, run_dir, agent, *arguments, **options):
    """Return the configuration for the processes of a run with one machine besides the driver's own."""

    async def main():
        cluster = LocalCluster()
        try:
            actor = await cluster.start(agent, *arguments, name="node-1", resources=Resources(), **options)
            away = Node(address="10.0.0.2", cores=1, agent=actor)
            return await prepare_nodes(config, [replace(away, agent=None), away], run_dir)
        finally:
            await cluster.close()

    return asyncio.run(main())


def test_a_machine_that_has_everything_changes_nothing(config, tmp_path):
    found = prepared(config, tmp_path, NodeAgent)
    assert found.plugins == (str(Path("traced.py").absolute()),)
    assert found.model_copy(update={"plugins": config.plugins}) == config
    assert not (tmp_path / "plugins").exists() and not list(tmp_path.glob(".seen*"))


def test_plugin_files_travel_in_the_folder_of_the_run(config, job, tmp_path):
    found = prepared(config, tmp_path, Elsewhere, job.folder)
    (copy,) = map(Path, found.plugins)
    assert copy == tmp_path / "plugins/0/traced.py"
    assert copy.read_text() == (job.folder / "traced.py").read_text()


def test_a_changed_plugin_file_is_reported_as_different(job):
    file = PluginFile.of(job.folder / "traced.py")
    assert NodeAgent().find_differing_plugins([file]) == []
    (job.folder / "traced.py").write_text("# other\n")
    assert NodeAgent().find_differing_plugins([file]) == [job.folder / "traced.py"]


def test_a_folder_that_is_not_shared_is_refused(config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepared(config, tmp_path, Elsewhere, tmp_path)
    assert str(caught.value) == (
        f"run.dir: node 10.0.0.2 does not see files that the driver writes to {tmp_path}; set it to a folder "
        "that all machines share"
    )


def test_other_versions_are_named(config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepared(config, tmp_path, Elsewhere, tmp_path, versions={"plasmid-rewards": "0.0.1", "plasmid-own": "2.0"})
    assert str(caught.value).splitlines() == [
        f"node 10.0.0.2: plasmid-own is 2.0 there and missing {INSTALL}",
        f"node 10.0.0.2: plasmid-rewards is 0.0.1 there and 0.1.0 {INSTALL}",
    ]


def test_files_of_the_recipe_are_looked_for_on_every_machine(config, tmp_path):
    lost = config.model_copy(update={"model": config.model.model_copy(update={"path": "models/lost"})})
    with pytest.raises(ConfigError, match=r"^node 10.0.0.2: model.path: no such folder: models/lost \(searched from "):
        prepared(lost, tmp_path, NodeAgent)


def test_a_dry_run_shows_which_ranks_compute_where(config, capsys):
    assert machine_rows(config) == []
    place = config.placement.model_copy(update={"nodes": 2, "trainer_ranks": 3, "engine_ranks": 2})
    assert machine_rows(config.model_copy(update={"placement": place})) == [
        ("ranks on machine 0", "3", "trainer 0-2"),
        ("ranks on machine 1", "2", "engine 0-1"),
    ]
    placed = config.model_copy(update={"placement": place})
    print_plan(placed, placed, DataFacts(num_prompts=1), [])
    printed = capsys.readouterr().out
    assert "ranks on machine 0" in printed and "trainer 0-2" in printed
    assert "ranks on machine 1" in printed and "engine 0-1" in printed
