"""One process at a time writes into a run's folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import ConfigError
from ...safe_files import open_to_lock

LOCK = ".lock"
"""Stays where it is: a file that is removed while another process opens it would lock nothing."""
log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
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
    """Raise `ConfigError` where `locked` would; nothing is written."""
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
