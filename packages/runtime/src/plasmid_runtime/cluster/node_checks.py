"""Check every machine before a run starts, and copy plugin files to machines that lack them."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Actor, Node, call
from plasmid.utils.waiting import run_together

from .node_agent import NodeAgent, PluginFile, strip_build_tags

TIMEOUT_S = 120.0
"""Maximum time for a machine to respond, in seconds; it may have to import the recipe's plugins."""
COPIED_PLUGINS = "plugins"
"""Subfolder of the run folder with copies of plugin files that some machine lacks."""


async def prepare_nodes(config: RunConfig, nodes: Sequence[Node], run_dir: Path) -> RunConfig:
    """Check every machine except the driver's. Returns the recipe for the run's processes. Raises `ConfigError`.

    Plugin files that differ between machines are copied into the run folder, which all machines share.
    """
    others = [node for node in nodes if node.agent is not None]
    if not others:
        return config
    await _check_versions(others)
    await _check_shared_folder(others, run_dir.absolute())
    config = await _with_plugins(config, others, run_dir.absolute() / COPIED_PLUGINS)
    dump = config.model_dump(mode="json")
    found = await run_together(call(agent, TIMEOUT_S, NodeAgent.find_missing_files, dump) for agent in _agents(others))
    _raise([f"node {node.address}: {line}" for node, lines in zip(others, found, strict=True) for line in lines])
    return config


async def _check_versions(nodes: Sequence[Node]) -> None:
    here, lines = strip_build_tags(), []
    answers = await run_together(call(agent, TIMEOUT_S, NodeAgent.versions) for agent in _agents(nodes))
    for node, there in zip(nodes, answers, strict=True):
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                lines.append(
                    f"node {node.address}: {name} is {_version(there.get(name))} there and {_version(here.get(name))} "
                    "on the driver's machine; install the same version on all machines"
                )
    _raise(lines)


def _version(version: str | None) -> str:
    return "missing" if version is None else version


async def _check_shared_folder(nodes: Sequence[Node], run_dir: Path) -> None:
    token = uuid.uuid4().hex
    file = run_dir / f".seen-by-all-{token}"
    try:
        file.write_text(token)
        seen = await run_together(call(agent, TIMEOUT_S, NodeAgent.sees_file, file, token) for agent in _agents(nodes))
    finally:
        file.unlink(missing_ok=True)
    _raise(
        [
            f"run.dir: node {node.address} does not see files that the driver writes to {run_dir}; set it to a folder "
            "that all machines share"
            for node, it_does in zip(nodes, seen, strict=True)
            if not it_does
        ]
    )


async def _with_plugins(config: RunConfig, nodes: Sequence[Node], folder: Path) -> RunConfig:
    files = [PluginFile.of(Path(name)) for name in config.plugins]
    if not files:
        return config
    answers = await run_together(
        call(agent, TIMEOUT_S, NodeAgent.find_differing_plugins, files) for agent in _agents(nodes)
    )
    lacking = {path for paths in answers for path in paths}
    paths = [file.path for file in files]
    for index, path in enumerate(paths):
        if path in lacking:
            paths[index] = folder / str(index) / path.name  # the file name determines the module's name
            paths[index].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, paths[index])
    return config.model_copy(update={"plugins": tuple(map(str, paths))})


def _agents(nodes: Sequence[Node]) -> list[Actor]:
    return [node.agent for node in nodes if node.agent is not None]


def _raise(lines: Sequence[str]) -> None:
    if lines:
        raise ConfigError("\n".join(lines))
