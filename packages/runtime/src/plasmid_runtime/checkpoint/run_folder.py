"""The folder of one run: where it is, and what lies in it."""

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
from pathlib import Path
from typing import Any

from plasmid.components import DataFacts
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, ConfigError
from plasmid.plugins.registry import versions
from plasmid.utils.safe_files import open_to_lock, write_text

from ..cluster.node_agent import library_versions

log = logging.getLogger(__name__)
LOCK = ".lock"
"""Stays where it is: a file that is removed while another process opens it would lock nothing."""


class RunFolder:
    """Paths of one run. Nothing is created before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.info = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.logs = path / "logs"

    def create(self, config: RunConfig, data: DataFacts | None = None) -> None:
        """Make the folder and write the resolved configuration, facts of the data, and the versions of everything."""
        self.check_links()
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            write_text(self.config, config.model_dump_json(indent=1))
            write_text(self.info, json.dumps({**_info(config), **({"data": asdict(data)} if data else {})}, indent=1))
        except OSError as error:
            raise ConfigError(
                f"run.dir: cannot write to {self.path}: {(error.strerror or str(error)).lower()}"
            ) from error

    def check_links(self) -> None:
        """Raise `ConfigError` if a file or folder that a run would write to is a link, which may lead anywhere."""
        for file in (self.metrics, self.evaluations, self.samples, self.logs, *sorted(self.logs.glob("*"))):
            if file.is_symlink():
                raise ConfigError(f"run.dir: {file} is a link, which is not written through; remove it")

    def vacate(self) -> None:
        """Make the folder free for another run; its logs stay."""
        for file in (self.config, self.info):
            file.unlink(missing_ok=True)

    def samples_of(self, name: str, step: int) -> Path:
        """Sample file of a batch (``batch``), or of what was dropped after the last one (``end``)."""
        return self.samples / f"{name}-{step:06d}.parquet"


def new_folder(config: RunConfig) -> RunFolder:
    """A folder that no run has used: ``run.dir``, or ``runs/<recipe>`` with a number where that is taken."""
    if config.run.dir != "auto":
        path = Path(config.run.dir)
        if (path / "config.json").exists():
            raise ConfigError(
                f"run.dir: {path} holds a run already; continue it with --resume, choose another folder, or remove it"
            )
        return RunFolder(path)
    return unused_folder(Path("runs") / config.recipe)


def unused_folder(base: Path) -> RunFolder:
    """A folder of this name, with a number where it is taken."""
    number = 1
    while _numbered(base, number).exists():
        number += 1
    return RunFolder(_numbered(base, number))


def newest_folder(config: RunConfig) -> RunFolder:
    """The run to resume: ``run.dir``, or the newest ``runs/<recipe>`` that has a checkpoint."""
    if config.run.dir != "auto":
        path = Path(config.run.dir)
        if not (path / "config.json").exists():
            raise CheckpointError(f"run.dir: {path} holds no run to resume; start without --resume")
        return RunFolder(path)
    base = Path("runs") / config.recipe
    number, found = 1, []
    while _numbered(base, number).exists():
        found.append(_numbered(base, number))
        number += 1
    with_checkpoint = [path for path in found if any(path.glob("checkpoints/batch-*/state.json"))]
    if not with_checkpoint:
        raise CheckpointError(f"{base}: no run with a checkpoint to resume; start without --resume, or set run.dir")
    return RunFolder(with_checkpoint[-1])


def _numbered(base: Path, number: int) -> Path:
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def _info(config: RunConfig) -> dict[str, Any]:
    return {
        "recipe": config.recipe,
        "seed": config.run.seed,
        "started": time.time(),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "plugins": versions(),
        "libraries": library_versions(),
    }


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made if it is not there. The end of this process gives it back, however it ends.

    Raises `ConfigError` if another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_to_lock(folder / LOCK)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    try:
        _lock(file, folder)
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(file)


def check_lockable(folder: Path) -> None:
    """Raise `ConfigError` where `lock_folder` would; nothing is written."""
    try:
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
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 1000).decode(errors="replace") or "another process"
        raise ConfigError(
            f"run.dir: {folder} is in use by {holder}; wait until it ends, stop it, or choose another folder"
        ) from None
    except OSError as error:  # some network file systems cannot lock
        log.warning("%s cannot be locked (%s): do not start two runs in it", folder, error.strerror)
