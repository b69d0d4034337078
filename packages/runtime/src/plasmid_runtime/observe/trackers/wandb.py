"""Weights & Biases tracker, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.trust import INERT

from .run_identity import RunTracker, import_package, read_config, run_identity


class WandB(RunTracker):
    """Logs to a Weights & Biases run. The API key comes from the environment (WANDB_API_KEY) or ``wandb login``."""

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, INERT] = "plasmid"
    """Project of the run."""
    name: Annotated[str, INERT] = "auto"
    """Name of the run; ``auto`` uses the name of the run folder."""
    entity: Annotated[str, INERT] = "auto"
    """User or team that owns the project; ``auto`` uses the default entity of the API key."""
    group: Annotated[str, INERT] = "none"
    """Group of the run in the project; ``none`` for no group."""
    resume: Literal["allow", "must", "never"] = "allow"
    """Whether a resumed run continues its W&B run: ``allow`` if it exists, ``must`` raises an error if it does not,
    ``never`` starts a new one."""
    mode: Literal["online", "offline"] = "online"
    """``online``, or ``offline`` to only write files to ``wandb/`` in the run folder, for ``wandb sync``."""

    def packages(self) -> Mapping[str, str]:
        return {"wandb": "plasmid[wandb]"}

    async def open(self, context: RunContext) -> None:
        """Start a run, or continue that of this run folder. Raises `PluginError`."""
        wandb = import_package("wandb")
        folder = context.run_dir.resolve()
        try:
            self._run = wandb.init(
                project=self.project,
                entity=None if self.entity == "auto" else self.entity,
                group=None if self.group == "none" else self.group,
                name=folder.name if self.name == "auto" else self.name,
                mode=self.mode,
                dir=str(folder),
                # W&B ignores the steps that a resumed run repeats, since they are older than its last one
                id=None if self.resume == "never" else run_identity(folder),
                resume=self.resume,
                config=read_config(folder),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise PluginError(
                f'trackers: wandb cannot start: {reason}; set mode = "offline" to run without it'
            ) from error
