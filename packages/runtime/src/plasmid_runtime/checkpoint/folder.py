"""Atomic checkpoints: written under a temporary name and renamed when complete."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.config.loop import CheckpointConfig
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, one_line
from plasmid.settings.resume import find_changeable_settings, find_renamed
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import make_folder, sync_to_disk, sync_tree
from plasmid_models.manifest import MANIFEST, STATE, describe_damage, read_entries, write_manifest

log = logging.getLogger(__name__)
PREFIX = "batch-"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a run, stored in every checkpoint."""

    batch: int = 0
    """Number of batches trained so far."""
    version: int = 0
    """Policy version of the engine: number of publications so far."""
    unpublished: int = 0
    """Number of groups trained on since the last publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State in a checkpoint besides the trainer's files and buffered groups, as JSON types."""

    batch: int
    version: int
    producer: Mapping[str, Any]
    components: Mapping[str, Any]
    """State of light components, by recipe key."""
    config: Mapping[str, Any]
    """The resolved configuration of the run that wrote the checkpoint."""
    evaluations: Sequence[Sequence[Any]] = ()
    """Name and batch of unfinished evaluations."""

    def text(self) -> str:
        """Serialize to JSON, as stored in a checkpoint."""
        return json.dumps({name: getattr(self, name) for name in RunState.__slots__}, indent=1)

    def copy(self) -> RunState:
        """Return a deep copy, independent of later changes."""
        return RunState(**json.loads(self.text()))


class CheckpointFolder:
    """The ``checkpoints`` folder of one run."""

    def __init__(self, path: Path, settings: CheckpointConfig) -> None:
        self.path = path
        self._settings = settings

    def begin(self, batch: int) -> Path:
        """Create a temporary folder to write into. Removes remains of interrupted saves."""
        make_folder(self.path)
        self.discard()
        temporary = self.path / f".tmp-{batch:06d}"
        temporary.mkdir()
        return temporary

    def discard(self) -> None:
        """Remove remains of interrupted saves."""
        for left in self.path.glob(".tmp-*"):
            shutil.rmtree(left, ignore_errors=True)

    def commit(self, temporary: Path, state: RunState) -> Path:
        """Write state and manifest, sync to disk, rename the folder, and delete checkpoints beyond retention."""
        (temporary / STATE).write_text(state.text())
        write_manifest(temporary)
        sync_tree(temporary)
        final = self.of(state.batch)
        _remove(final)  # an existing folder is incomplete: complete checkpoints are never written twice
        temporary.rename(final)
        sync_to_disk(self.path)
        self._retain()
        return final

    def check_space(self, at_least: int) -> None:
        """Raise `CheckpointError` if there is no room for a checkpoint as large as the newest.

        For the first checkpoint, ``at_least`` is the number of bytes to have room for.
        """
        if complete := self.list_all():
            with contextlib.suppress(OSError, ValueError):
                at_least = sum(entry.size for entry in read_entries(complete[-1] / MANIFEST).values())
        free = shutil.disk_usage(self.path).free
        if free < at_least:
            raise CheckpointError(f"it needs about {at_least / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free")

    def of(self, batch: int) -> Path:
        """Return the path of a batch's checkpoint, which may not exist yet."""
        return self.path / f"{PREFIX}{batch:06d}"

    def list_all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return self.list_complete(self.path)

    @staticmethod
    def list_complete(path: Path) -> list[Path]:
        """Complete checkpoints in a folder, oldest first."""
        return sorted((found for found in _checkpoint_folders(path) if _is_complete(found)), key=_batch_of)

    def find_newest(self) -> Path:
        """Return the newest intact checkpoint, see `find_newest_intact`. Raises `CheckpointError` if there is none."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: is not a folder of checkpoints; restore it from a backup, or remove it"
            )
        found = find_newest_intact(self.path)
        if found is None:
            raise CheckpointError(
                f"{self.path}: no checkpoint to resume from, since the run ended before it saved one; start again in "
                "its folder with --resume=auto"
            )
        return found

    def set_aside(self, after: Path) -> None:
        """Rename the damaged checkpoints after this one, so that their batches can be saved again."""
        for path in self.list_all():
            if _batch_of(path) > _batch_of(after):
                _remove(aside := path.with_name(f"{path.name}.damaged"))
                path.rename(aside)
                log.warning("%s: renamed to %s; remove it if you do not need it", path, aside.name)

    def _retain(self) -> None:
        every = self._settings.keep_every
        for path in self.list_all()[: -self._settings.keep_last]:
            if not (every and _batch_of(path) % every == 0):
                _remove(path)


def find_newest_intact(folder: Path) -> Path | None:
    """Return the newest intact checkpoint of a folder, or None if it has no checkpoint. Logs damaged ones.

    Raises `CheckpointError` if all are damaged.
    """
    found = CheckpointFolder.list_complete(folder)
    damaged: list[str] = []
    for unfinished in sorted(path for path in _checkpoint_folders(folder) if path not in found):
        log.warning(
            "%s: ignored, since it has no readable %s: it is incomplete or was being removed", unfinished, STATE
        )
    for path in reversed(found):
        damage = _describe_damage(path)
        if not _is_complete(path):
            continue  # its run is still active, and retention removed it during the check
        if damage is None:
            if damaged:
                log.warning("using the previous checkpoint, %s", path)
            return path
        log.warning("%s: damaged: %s", path, damage)
        damaged.append(f"{path.name} ({damage})")
    if damaged:
        raise CheckpointError(f"{folder}: all checkpoints are damaged: {', '.join(damaged)}; restore one from a backup")
    return None


def check_intact(checkpoint: Path) -> None:
    """Raise `CheckpointError` if a checkpoint is damaged. The error names the previous intact one."""
    damage = _describe_damage(checkpoint)
    if damage is None:
        return
    found = CheckpointFolder.list_complete(checkpoint.absolute().parent)
    before = [path for path in found if _batch_of(path) < _batch_of(checkpoint) and _describe_damage(path) is None]
    rest = f"use the intact one before it, {before[-1].name}" if before else "there is no intact one before it"
    raise CheckpointError(f"{checkpoint}: damaged: {damage}; {rest}")


def read_state(path: Path) -> RunState:
    """Read the state of a checkpoint. Raises `CheckpointError` if this fails."""
    file = path / STATE
    try:
        state = RunState(**read_json(file))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not a checkpoint (it has no {STATE})") from None
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else one_line(error)
        raise CheckpointError(f"{file}: cannot be read: {reason}; use another checkpoint of the run") from error
    if not (isinstance(state.batch, int) and isinstance(state.version, int) and isinstance(state.config, dict)):
        raise CheckpointError(f"{file}: cannot be read: batch, version or config is invalid")
    return state


def check_same_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Raise a `CheckpointError` that names the first changed setting that must not change on resume.

    A setting that the checkpoint lacks, in a table that it has, is new in this version and may have its default value.
    """
    changeable = list(find_changeable_settings(config))
    before, after = _flatten(saved), _flatten(config.model_dump(mode="json"))
    for former, key in find_renamed(config):
        if former in before:
            before[key] = before.pop(former)
    chosen = _flatten(config.model_dump(mode="json", exclude_defaults=True))
    new = {key for key in after.keys() - before.keys() - chosen.keys() if _has_table(saved, key)}
    for key in sorted(before.keys() | after.keys() - new):
        if before.get(key) != after.get(key) and not any(key == c or key.startswith(f"{c}.") for c in changeable):
            was, fix = f"was {before.get(key)!r}", "change it back"
            if key not in before:
                was = "the checkpoint has no such setting"
                fix = "remove it or, if it is new in this version, resume with the version that saved the checkpoint"
            raise CheckpointError(
                f"{key}: must not change on resume, {was}, got {after.get(key)!r}; {fix}, or start a new run with "
                "checkpoint.start_from=<the checkpoint>"
            )


def check_has_optimizer(path: Path, state: RunState) -> None:
    """Raise `CheckpointError` if the checkpoint was saved without the optimizer's state."""
    settings = state.config.get("checkpoint")
    if isinstance(settings, Mapping) and settings.get("optimizer") is False:
        raise CheckpointError(
            f"{path}: cannot be resumed, since it was saved with checkpoint.optimizer = false, without the "
            f"optimizer's state; start a new run from its weights with checkpoint.start_from={path}"
        )


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Return all folders named like checkpoints, complete or not."""
    return [found for found in folder.glob(f"{PREFIX}*") if found.name.removeprefix(PREFIX).isdecimal()]


def _batch_of(checkpoint: Path) -> int:
    """Return the batch number in a folder's name; -1 if there is none. It has at least six digits."""
    number = checkpoint.name.removeprefix(PREFIX)
    return int(number) if checkpoint.name.startswith(PREFIX) and number.isdecimal() else -1


def _is_complete(checkpoint: Path) -> bool:
    """Return True if the checkpoint has a `STATE` file that this user can see.

    A save writes this file last, and removing a checkpoint deletes it first.
    """
    try:
        return (checkpoint / STATE).is_file()
    except OSError:  # the user has no permission to search the folder
        return False


def _describe_damage(checkpoint: Path) -> str | None:
    """Describe a damaged checkpoint, or one whose folder has the name of another batch; None if it is intact."""
    damage, number = describe_damage(checkpoint), _batch_of(checkpoint)
    if damage is None and number >= 0:
        try:
            batch = read_state(checkpoint).batch
        except CheckpointError as error:
            return f"{STATE} was not written by a run ({error})"
        if batch != number:
            return f"{STATE} is of batch {batch}: the folder was renamed, or copied from another one"
    return damage


def _flatten(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        return {path: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flatten(value, f"{path}.{key}" if path else str(key))
    return flat


def _has_table(tree: Any, key: str) -> bool:
    """Return True if the tree has the table of this setting."""
    for name in key.split(".")[:-1]:
        if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
            tree = tree[int(name)]
        elif isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        else:
            return False
    return isinstance(tree, Mapping)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, starting with the file that marks it as complete, or a file with a checkpoint's name."""
    if checkpoint.is_dir():
        if _is_complete(checkpoint):
            (checkpoint / STATE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)
    else:
        checkpoint.unlink(missing_ok=True)
