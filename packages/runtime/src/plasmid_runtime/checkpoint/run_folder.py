"""The folder of a run: its location, contents and lock."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from plasmid.components import DataFacts
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, ConfigError
from plasmid.plugins.registry import versions
from plasmid.utils.safe_files import make_folder, open_to_lock, write_text

from ..cluster.node_agent import read_library_versions
from .folder import PREFIX, CheckpointFolder

log = logging.getLogger(__name__)
LOCK = ".lock"
"""Name of the lock file. It is never removed: a process that has just opened it would then lock a deleted file."""


class RunFolder:
    """Paths of a run's files. Creates nothing before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.info = path / "run.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.exports = path / "exports"
        self.logs = path / "logs"
        self.hangs = path / "hangs"

    def create(self, config: RunConfig, data: DataFacts | None = None) -> None:
        """Create the folder, with the resolved configuration, facts about the data, and package versions."""
        self.check_links()
        with _explain_write(self.path):
            make_folder(self.samples)
            make_folder(self.logs)
            info = {**_info(config), **({"data": asdict(data)} if data else {})}
            write_text(self.info, json.dumps(info, indent=1), durable=True)
            # last: this file marks a folder as a run
            write_text(self.config, config.model_dump_json(indent=1), durable=True)

    def check_links(self) -> None:
        """Raise `ConfigError` if a file or folder that a run would write to is a link."""
        folders = (self.samples, self.logs, self.hangs, self.checkpoints, self.final, self.exports)
        within = (path for folder in (self.logs, self.checkpoints, self.exports) for path in sorted(folder.glob("*")))
        for file in (self.plan, self.metrics, self.evaluations, *folders, *within):
            if file.is_symlink():
                raise ConfigError(f"run.dir: {file} is a link, and runs do not write through links; remove it")

    def move_aside(self) -> None:
        """Rename the folder's contents except logs, so that another run can use it."""
        for file in (self.config, self.info):
            file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Prepare the folder of a run without checkpoints for another run. Raises `ConfigError`.

        Metrics, evaluations and samples are renamed to ``<name>.before-<n>``; logs are kept.
        """
        self.check_links()
        self.check_unsaved()
        paths = (self.metrics, self.evaluations, self.samples)
        renamed = ({path: path.with_name(f"{path.name}.before-{number}") for path in paths} for number in count(1))
        targets = next(found for found in renamed if not any(target.exists() for target in found.values()))
        with _explain_write(self.path):
            self.move_aside()
            for path, target in targets.items():
                if path.exists() and (path.is_file() or any(path.iterdir())):
                    path.rename(target)
                    log.warning("%s: renamed to %s; remove it if you do not need it", path, target.name)

    def check_unsaved(self) -> None:
        """Raise `ConfigError` unless the folder is unused or has a run without checkpoints, which `clear` renames."""
        if self.config.exists() and not self.info.exists():
            raise ConfigError(
                f"run.dir: {self.path} has a config.json that was not written by a run; choose another folder"
            )
        saved = next(
            (path for path in (self.final, *sorted(self.checkpoints.glob(f"{PREFIX}*"))) if path.exists()), None
        )
        if saved is not None:
            raise ConfigError(
                f"run.dir: {self.path} has results ({saved.relative_to(self.path)}) but no complete checkpoint to "
                "resume from; choose another folder, or remove it"
            )

    def export_of(self, batch: int) -> Path:
        """Return the folder of the policy after this many batches, in Hugging Face format."""
        return self.exports / f"{PREFIX}{batch:06d}"

    def samples_of(self, name: str, step: int) -> Path:
        """Return the sample file of a batch (``batch``), or of groups dropped after the last one (``end``)."""
        return self.samples / f"{name}-{step:06d}.parquet"


def choose_new_folder(config: RunConfig) -> RunFolder:
    """Return an unused folder: ``run.dir``, or ``runs/<recipe>`` with a number appended if it exists."""
    if config.run.dir != "auto":
        path = Path(config.run.dir)
        if (path / "config.json").exists():
            raise ConfigError(
                f"run.dir: {path} already has a run; continue it with --resume, choose another folder, or remove it"
            )
        return RunFolder(path)
    return find_unused_folder(Path("runs") / config.recipe)


def find_unused_folder(base: Path) -> RunFolder:
    """Return a folder with this name, with a number appended if it exists."""
    return RunFolder(next(path for path in _iterate_numbered(base) if not path.exists()))


def find_resumable_folder(config: RunConfig) -> RunFolder | None:
    """Return the run to resume, as `find_newest_folder` does; None without a checkpoint, so that a new run starts."""
    if config.run.dir != "auto":
        path = Path(config.run.dir)
        return RunFolder(path) if _has_checkpoint(path) else None
    try:
        return find_newest_folder(config)
    except CheckpointError:
        return None


def find_newest_folder(config: RunConfig) -> RunFolder:
    """Return the run to resume: ``run.dir``, or the newest ``runs/<recipe>`` with a checkpoint."""
    if config.run.dir != "auto":
        path = Path(config.run.dir)
        if not (path / "config.json").exists():
            raise CheckpointError(f"run.dir: {path} has no run to resume; start without --resume")
        return RunFolder(path)
    base = Path("runs") / config.recipe
    with_checkpoint = [path for path in takewhile(Path.exists, _iterate_numbered(base)) if _has_checkpoint(path)]
    if not with_checkpoint:
        raise CheckpointError(f"{base}: no run with a checkpoint to resume; start without --resume, or set run.dir")
    return RunFolder(with_checkpoint[-1])


def _has_checkpoint(path: Path) -> bool:
    return bool(CheckpointFolder.list_complete(path / "checkpoints"))


def _iterate_numbered(base: Path) -> Iterator[Path]:
    """Yield ``base``, ``base-2``, ``base-3`` and so on."""
    return (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in count(1))


def _info(config: RunConfig) -> dict[str, Any]:
    return {
        "recipe": config.recipe,
        "seed": config.run.seed,
        "started": time.time(),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "plugins": versions(),
        "libraries": read_library_versions(),
    }


@contextmanager
def _explain_write(folder: Path) -> Iterator[None]:
    """Raise `ConfigError` for errors of the file system."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, creating it if needed. The lock is released when the block or the process ends.

    Raises `ConfigError` if another process has locked it.
    """
    with _explain_write(folder):
        make_folder(folder)
        file = open_to_lock(folder / LOCK)
    try:
        _lock(file, folder)
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(file)


def check_lockable(folder: Path) -> None:
    """Raise `ConfigError` if `lock_folder` would raise it, without writing anything."""
    with _explain_write(folder):
        if (folder / LOCK).exists():
            file = os.open(folder / LOCK, os.O_RDWR)
            try:
                _lock(file, folder)
            finally:
                os.close(file)
        elif folder.exists() and not folder.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        else:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            with tempfile.TemporaryFile(dir=there):
                pass


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 1000).decode(errors="replace") or "another process"
        raise ConfigError(
            f"run.dir: {folder} is in use by {holder}; wait until it ends, stop it, or choose another folder"
        ) from None
    except OSError as error:  # some network file systems cannot lock
        log.warning("%s: cannot be locked (%s); do not start two runs in it", folder, error.strerror)
