"""One atomic run state per save: written under a temporary name, renamed when complete, never half there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.config.checkpoint import CheckpointConfig
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.settings.resume import changeable_settings
from plasmid.utils.json_text import read_json

PREFIX = "batch-"
STATE = "state.json"
"""Written last and removed first: a folder with it is a complete checkpoint."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands. Everything here is in a checkpoint."""

    batch: int = 0
    """Batches trained so far."""
    version: int = 0
    """Policy version that the engine holds: publishes so far."""
    unpublished: int = 0
    """Groups trained on since the last publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a checkpoint holds beside the trainer's files and buffered groups; JSON types only."""

    batch: int
    version: int
    producer: Mapping[str, Any]
    components: Mapping[str, Any]
    """State of light components, by their place in the recipe."""
    config: Mapping[str, Any]
    """The resolved configuration that wrote it."""
    evaluations: Sequence[Sequence[Any]] = ()
    """Name and batch of evaluations that had begun and not ended."""

    def text(self) -> str:
        """As JSON, the way it lies in a checkpoint."""
        return json.dumps({name: getattr(self, name) for name in RunState.__slots__}, indent=1)

    def copy(self) -> RunState:
        """As it is now, whatever becomes of what it refers to."""
        return RunState(**json.loads(self.text()))


class CheckpointFolder:
    """The ``checkpoints`` folder of one run."""

    def __init__(self, path: Path, settings: CheckpointConfig) -> None:
        self.path = path
        self._settings = settings

    def begin(self, batch: int) -> Path:
        """A fresh temporary folder to write into. Remains of interrupted saves are removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.discard()
        temporary = self.path / f".tmp-{batch:06d}"
        temporary.mkdir()
        return temporary

    def discard(self) -> None:
        """Remove what saves that did not end have left."""
        for left in self.path.glob(".tmp-*"):
            shutil.rmtree(left, ignore_errors=True)

    def commit(self, temporary: Path, state: RunState) -> Path:
        """Write the state, make everything durable, give the folder its name, remove what retention does not keep."""
        (temporary / STATE).write_text(state.text())
        _sync_to_disk(temporary)
        final = self.of(state.batch)
        _remove(final)  # what is there is not complete: nobody writes a complete one again
        temporary.rename(final)
        _sync(self.path)
        self._retain()
        return final

    def of(self, batch: int) -> Path:
        """Where the checkpoint of a batch is or will be."""
        return self.path / f"{PREFIX}{batch:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return self.complete(self.path)

    @staticmethod
    def complete(path: Path) -> list[Path]:
        """Complete checkpoints in a folder, oldest first."""
        return sorted(
            found
            for found in path.glob(f"{PREFIX}*")
            if found.name.removeprefix(PREFIX).isdecimal() and (found / STATE).is_file()
        )

    def newest(self) -> Path:
        """The newest complete checkpoint. Raises `CheckpointError` if there is none."""
        found = self.all()
        if not found:
            raise CheckpointError(
                f"{self.path}: holds no complete checkpoint to resume from; remove {self.path.parent} or choose "
                "another run.dir, and start without --resume"
            )
        return found[-1]

    def _retain(self) -> None:
        every = self._settings.keep_every
        for path in self.all()[: -self._settings.keep_last]:
            if not (every and int(path.name.removeprefix(PREFIX)) % every == 0):
                _remove(path)


def read_state(path: Path) -> RunState:
    """The state of one checkpoint. Raises `CheckpointError` if it cannot be read."""
    file = path / STATE
    try:
        state = RunState(**read_json(file))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is no checkpoint (it has no {STATE})") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not (isinstance(state.batch, int) and isinstance(state.version, int) and isinstance(state.config, dict)):
        raise CheckpointError(f"{file}: cannot be read: batch, version and config are not what a run writes")
    return state


def check_same_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raise `CheckpointError` naming the first setting that may not change on resume but did."""
    changeable = list(changeable_settings(config))
    before, after = _flat(saved), _flat(config.model_dump(mode="json"))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not any(key == c or key.startswith(f"{c}.") for c in changeable):
            raise CheckpointError(
                f"{key}: was {before.get(key)!r} when the checkpoint was written, is {after.get(key)!r} now; change it "
                "back, or start a new run with checkpoint.start_from=<the checkpoint>"
            )


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        return {path: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{path}.{key}" if path else str(key))
    return flat


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it is none any more from the first moment on."""
    (checkpoint / STATE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _sync_to_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
