"""Reports about one machine of a run: its versions, and which of the driver's files it sees."""

from __future__ import annotations

import asyncio
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

SHARED_S = 15.0
"""Longest time for a new file to be seen on another machine: network file systems keep what they know for a while."""
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
        """Raises OSError if it cannot be read."""
        return PluginFile(path.absolute(), hashlib.sha256(path.read_bytes()).hexdigest())


class NodeAgent:
    """Runs on a machine of the cluster, in the process that holds the run's GPUs there."""

    def __init__(self, *, shared_s: float = SHARED_S) -> None:
        self._shared_s = shared_s

    def versions(self) -> dict[str, str]:
        """Of Python, the libraries and everything that registers plugins."""
        return local_versions()

    async def sees_file(self, path: Path, text: str) -> bool:
        """Whether a file that the driver has just written is here, too."""
        deadline = time.monotonic() + self._shared_s
        while _read(path) != text:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def differing_plugins(self, files: Sequence[PluginFile]) -> list[Path]:
        """Plugin files that are not here, or are others."""
        return [file.path for file in files if not file.path.is_file() or PluginFile.of(file.path) != file]

    def missing_files(self, config: Mapping[str, Any]) -> list[str]:
        """What the recipe names and this machine lacks; ``config`` is a dumped `RunConfig`."""
        try:
            return model_files.missing_files(resolve(config))
        except PlasmidError as error:
            return str(error).splitlines()

    def close(self) -> None:
        """Nothing is held."""


def local_versions() -> dict[str, str]:
    """By name. Builds of one version (``2.11.0+cpu``) count as the same."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"python": python, **library_versions(), **versions()}
    return {name: version.partition("+")[0] for name, version in found.items()}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def library_versions() -> dict[str, str]:
    """Of the libraries that a run depends on most, those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
