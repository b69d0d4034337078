"""Shared code of trackers: import of their packages, and the id of a run folder, with which they continue its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from plasmid.components import Tracker
from plasmid.errors import PluginError
from pydantic import PrivateAttr


def run_identity(folder: Path) -> str:
    """Return 16 hexadecimal digits that identify a run folder."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the resolved configuration of the run in this folder; empty if there is none."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config


def import_package(name: str) -> Any:
    """Import a module of a tracker's package. Raises `PluginError` if the package is not installed."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError:
        raise PluginError(
            f"trackers: kind {package!r} needs the package {package}; pip install 'plasmid[{package}]'"
        ) from None


class RunTracker(Tracker):
    """Base class of trackers whose package has an object for each run."""

    _run: Any = PrivateAttr(None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        if self._run is None:
            raise ValueError("the tracker is not open")
        self._run.log(dict(metrics), step=step)

    async def close(self) -> None:
        """Write buffered metrics, and finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
