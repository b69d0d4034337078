"""Metrics in Weights & Biases, online or as files to send later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from plasmid.components import Tracker
from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.trust import INERT
from pydantic import PrivateAttr

if TYPE_CHECKING:
    from pathlib import Path


class WandB(Tracker):
    """A Weights & Biases run. The key is taken from the environment (WANDB_API_KEY) or ``wandb login``."""

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, INERT] = "plasmid"
    """Project that the run belongs to."""
    name: Annotated[str, INERT] = "auto"
    """Name of the run; ``auto`` is that of the run's folder."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` only writes files into the run's folder ``wandb/``, for ``wandb sync``."""

    _run: Any = PrivateAttr(None)

    def packages(self) -> Mapping[str, str]:
        return {"wandb": "plasmid[wandb]"}

    async def open(self, context: RunContext) -> None:
        """Start the run, or continue the one that this run folder began. Raises `PluginError`."""
        try:
            import wandb
        except ImportError:
            raise PluginError("trackers: kind 'wandb' needs the package wandb; pip install 'plasmid[wandb]'") from None
        folder = context.run_dir.resolve()
        try:
            self._run = wandb.init(
                project=self.project,
                name=folder.name if self.name == "auto" else self.name,
                mode=self.mode,
                dir=str(folder),
                # steps that a resumed run repeats are older than the last one there, and W&B leaves them out
                id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
                resume="allow",
                config=_config(folder / "config.json"),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise PluginError(
                f'trackers: wandb cannot start: {reason}; set mode = "offline" to go on without'
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of the run's history."""
        if self._run is None:
            raise ValueError("the tracker is not open")
        self._run.log(dict(metrics), step=step)

    async def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config
