"""Trackio tracker: a database on this machine, or a Space on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.trust import ACTIVE, INERT

from .run_identity import RunTracker, import_package, read_config, run_identity


class Trackio(RunTracker):
    """Logs to a Trackio run, stored under TRACKIO_DIR or in a Space: `trackio show --project plasmid`."""

    kind: Literal["trackio"] = "trackio"
    project: Annotated[str, INERT] = "plasmid"
    """Project of the run."""
    name: Annotated[str, INERT] = "auto"
    """Name of the run, which identifies it on resume; ``auto`` uses the name of the run folder and four digits of a
    hash of its path."""
    group: Annotated[str, INERT] = "none"
    """Group of the run in the dashboard; ``none`` for no group."""
    space: Annotated[str, ACTIVE] = "none"
    """Space on the Hugging Face Hub to send metrics to, ``user/name``; ``none`` stores them on this machine. The token
    is read from the environment (HF_TOKEN)."""

    def packages(self) -> Mapping[str, str]:
        return {"trackio": "plasmid[trackio]"}

    async def open(self, context: RunContext) -> None:
        """Start a run, or continue that of this run folder. Raises `PluginError`."""
        trackio = import_package("trackio")
        folder = context.run_dir.resolve()
        try:
            self._run = trackio.init(
                project=self.project,
                name=f"{folder.name}-{run_identity(folder)[:4]}" if self.name == "auto" else self.name,
                group=None if self.group == "none" else self.group,
                space_id=None if self.space == "none" else self.space,
                config=read_config(folder),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PluginError(f"trackers: trackio cannot start: {reason}") from error
