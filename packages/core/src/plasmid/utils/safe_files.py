"""Write into, and copy from, folders that may contain links of untrusted origin.

Following such a link could overwrite a file outside of the folder, or publish a copy of it.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import ModelError

PIECE_BYTES = 2 << 20
MIN_EARLY_BYTES = 1 << 20
"""Size from which data is written to disk early; smaller disk writes would be slow."""


@contextmanager
def replace_file(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """Write a file atomically: it gets the name ``path`` at the end, and is deleted if an error occurs.

    Replaces an existing file or link instead of writing to it. With ``durable``, content and then name are synced to
    disk before this returns. Raises `OSError`, also if ``path`` is a device or a pipe.
    """
    check_replaceable(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_to_disk(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_early(file: IO[bytes], data: memoryview) -> None:
    """Write bytes at the current position and start writing them to disk, so that the next sync takes less time.

    Otherwise Linux collects gigabytes of written data in memory, and then delays the process that writes them.
    """
    for start in range(0, len(data), PIECE_BYTES):
        piece, position = data[start : start + PIECE_BYTES], file.tell()
        file.write(piece)
        if len(piece) >= MIN_EARLY_BYTES and sys.platform == "linux":
            file.flush()
            os.posix_fadvise(file.fileno(), position, len(piece), os.POSIX_FADV_DONTNEED)  # unwritten data stays


def check_replaceable(path: Path) -> None:
    """Raise `OSError` if the path is a device, a pipe or a socket: root could replace ``/dev/null``."""
    if os.path.lexists(path):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "is a device, a pipe or a socket, which is not replaced", str(path))


def check_readable(path: Path) -> None:
    """Raise `OSError` if the path exists and is not a regular file: reading a pipe would wait for a writer."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def check_entries(folder: Path) -> None:
    """Raise `OSError` if a folder has an entry that is neither a file nor a folder: libraries that read it would wait.

    Broken links count as missing files.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            check_readable(path)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file atomically, replacing an existing one. Raises `OSError`."""
    with replace_file(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably, so that they survive a power loss. Raises `OSError`."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_to_disk(folder.parent)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for a program that is not trusted, and remove it at the end, however deep the program made it."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        with suppress(OSError):
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a folder. Follows no links. `shutil.rmtree` takes a stack frame and a descriptor for each level.

    Moves the contents of nested folders to the top level, so that only one level is open at a time. Raises `OSError`.
    """
    top, moved = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), uuid.uuid4().hex
    numbers = itertools.count()
    try:
        while names := os.listdir(top):
            for name in names:
                try:
                    os.unlink(name, dir_fd=top)
                    continue
                except IsADirectoryError:
                    os.chmod(name, stat.S_IRWXU, dir_fd=top)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for below in os.listdir(inner):
                        os.rename(below, f"{moved}-{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def sync_to_disk(*paths: Path) -> None:
    """Sync the content of files, or the names in folders, so that they survive a power loss. Raises `OSError`."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Call `sync_to_disk` for a folder, everything below it, and its parent. Raises `OSError`."""
    sync_to_disk(*(path for path in folder.rglob("*") if not path.is_symlink()), folder, folder.parent)


def append_to(path: Path, mode: str = "a", **options: Any) -> IO[Any]:
    """Open a file for appending, and create it if it is missing. Raises `OSError` if it is a link."""
    return open(path, mode, opener=_open_no_link, **options)


def append_private(path: Path) -> IO[bytes]:
    """Open a file for appending bytes, readable only by this user. Raises `OSError` if it is a link."""
    descriptor = _open_no_link(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # it may be there from a run that was interrupted
    file = os.fdopen(descriptor, "ab")
    file.seek(0, os.SEEK_END)
    return file


def open_to_lock(path: Path) -> int:
    """Open a descriptor for reading and writing, and create the file if missing. Raises `OSError` if it is a link."""
    return _open_no_link(str(path), os.O_RDWR | os.O_CREAT)


def copy_file(file: Path, folder: Path, target: Path) -> None:
    """Copy a file of ``folder`` to the new file ``target``. Raises `ModelError` if it is a link out of the folder."""
    check_link(file, folder)
    target.unlink(missing_ok=True)
    with file.open("rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)


def apply_umask(path: Path) -> None:
    """Give a file default permissions, as some libraries create files that only their owner can read.

    Raises `OSError`.
    """
    probe = path.with_name(f".{path.name}.mode")
    probe.unlink(missing_ok=True)
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def check_in_folder(where: Path, name: str) -> str:
    """Return a name read from the file ``where``. Raises `ModelError` if it refers to another folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(f"{where}: {name!r:.100} is not the name of a file in the folder")
    return name


def check_link(file: Path, folder: Path) -> None:
    """Raise `ModelError` if a file of the folder is a link out of it, except into a cache of Hugging Face."""
    if file.is_symlink() and not _is_inside(file.resolve(), folder.resolve()):
        raise ModelError(
            f"{file}: is a link out of its folder, to {file.resolve()}, and would be copied; put the file there, "
            "or remove the link"
        )


def _is_inside(file: Path, folder: Path) -> bool:
    """Return True if the file is in the folder, or a blob in a Hugging Face cache, whose folders consist of links."""
    cached = file.parent.name == "blobs" and file.parent.parent.name.startswith("models--")
    return file.is_relative_to(folder) or cached


def _open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "is a link; links are not followed when writing", path) from None
        raise
