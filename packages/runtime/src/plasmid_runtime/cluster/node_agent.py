"""Agent on each machine of a run, which reports versions, visible files, and the state of processes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plasmid.config.load import resolve
from plasmid.errors import PlasmidError
from plasmid.plugins.registry import versions

from . import model_files
from .watch.inspection import ProcessSnapshot, inspect_process

SHARED_S = 15.0
"""Maximum time for a new file to appear on another machine, in seconds; network file systems cache listings."""
POLL_S = 0.25


LIBRARIES = ("torch", "transformers", "ray", "numpy", "pyarrow")


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A file named by ``plugins`` or ``--plugin``."""

    path: Path
    """Absolute, on the driver's machine."""
    digest: str

    @staticmethod
    def of(path: Path) -> PluginFile:
        """Hash a file. Raises `OSError`."""
        return PluginFile(path.absolute(), hashlib.sha256(path.read_bytes()).hexdigest())


class NodeAgent:
    """Runs on a machine of the cluster, in the process that reserves the run's GPUs there."""

    def __init__(self, *, shared_s: float = SHARED_S) -> None:
        self._shared_s = shared_s

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, libraries, and packages with plugins."""
        return strip_build_tags()

    async def sees_file(self, path: Path, text: str) -> bool:
        """Return True if this machine sees a file that the driver has just written."""
        deadline = time.monotonic() + self._shared_s
        while _read(path) != text:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def find_differing_plugins(self, files: Sequence[PluginFile]) -> list[Path]:
        """Return the plugin files that are missing or different on this machine."""
        return [file.path for file in files if not file.path.is_file() or PluginFile.of(file.path) != file]

    def find_missing_files(self, config: Mapping[str, Any]) -> list[str]:
        """Return errors for files of the recipe that this machine lacks; ``config`` is a dumped `RunConfig`."""
        try:
            return model_files.find_missing_files(resolve(config, again=False))
        except PlasmidError as error:
            return str(error).splitlines()

    async def inspect_process(self, pid: int, log_file: Path, with_stacks: bool) -> ProcessSnapshot:
        """Call `inspection.inspect_process`."""
        return await asyncio.to_thread(inspect_process, pid, log_file, with_stacks=with_stacks)

    def close(self) -> None:
        """Do nothing; there are no resources to release."""


def strip_build_tags() -> dict[str, str]:
    """Return versions by name, without build tags (``+cpu``), so that builds of one version are equal."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"python": python, **read_library_versions(), **versions()}
    return {name: version.partition("+")[0] for name, version in found.items()}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def read_library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries among `LIBRARIES`."""
    return dict(_library_versions())


@functools.cache
def _library_versions() -> Mapping[str, str]:
    """Return the versions. They are read once per process, because reading one parses all metadata of its package."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
