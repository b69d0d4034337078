"""Write into folders, and copy out of folders, that somebody else may have put links into.

A link of another's making would have a file outside of the folder overwritten, or copied to where it is published.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import ModelError


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file that takes the name ``path`` at the end, or vanishes if anything goes wrong.

    What is there under that name is replaced and not written to, also if it is a link. ``durable``: the content is on
    the disk before the name changes. Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # what a process that was killed has left, or a link
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole file, which replaces what is there. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def append_to(path: Path, mode: str = "a", **options: Any) -> IO[Any]:
    """Open a file to write at its end; it is made if it is not there. Raises `OSError` if it is a link."""
    return open(path, mode, opener=_open_no_link, **options)


def append_private(path: Path) -> IO[bytes]:
    """Open a file to write bytes at its end that no other user of the machine can read. Raises `OSError` if a link."""
    descriptor = _open_no_link(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # it may be there from a run that was interrupted
    file = os.fdopen(descriptor, "ab")
    file.seek(0, os.SEEK_END)
    return file


def open_to_lock(path: Path) -> int:
    """The handle of a file to read and write, which is made if it is not there. Raises `OSError` if it is a link."""
    return _open_no_link(str(path), os.O_RDWR | os.O_CREAT)


def copy_file(file: Path, folder: Path, target: Path) -> None:
    """Copy a file of ``folder`` to the new file ``target``. Raises `ModelError` if it is a link out of the folder."""
    check_link(file, folder)
    target.unlink(missing_ok=True)
    with file.open("rb") as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)


def in_folder(where: Path, name: str) -> str:
    """The name, which the file ``where`` gives. Raises `ModelError` if it is that of a file in another folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(f"{where}: {name!r:.100} is not the name of a file in the folder")
    return name


def check_link(file: Path, folder: Path) -> None:
    """Raise `ModelError` if a file of the folder is a link out of it, except into a cache of Hugging Face."""
    if file.is_symlink() and not _stays(file.resolve(), folder.resolve()):
        raise ModelError(
            f"{file}: is a link out of its folder, to {file.resolve()}, and would be copied; put the file there, "
            "or remove the link"
        )


def _stays(file: Path, folder: Path) -> bool:
    """True if the file is in the folder, or a blob of a model in a cache of Hugging Face, where folders are links."""
    cached = file.parent.name == "blobs" and file.parent.parent.name.startswith("models--")
    return file.is_relative_to(folder) or cached


def _open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "is a link, which is not written through", path) from None
        raise
