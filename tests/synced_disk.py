"""Model of a disk that loses unsynced writes when the power fails."""

import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path


class Disk:
    """The content of files and folders at their last fsync: what a disk has if it writes as late as possible.

    A file whose name was synced and whose content was not is empty. Renames and removals take effect once the folder is
    synced. With a ``root``, unsynced writes below it are recorded too; a disk may contain any part of them.
    """

    def __init__(self, root=None):
        self.moments = []
        """State of the disk after each fsync: content by inode of files, and of folders as inodes by name."""
        self.written = []
        """The same for everything that had been written below the root at that moment."""
        self._files, self._folders, self._held, self._root = {}, {}, {}, root
        self._lock, self._fsync = threading.Lock(), os.fsync

    @contextmanager
    def recorded(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", self.fsync)
            yield
        for handle in self._held.values():
            os.close(handle)

    def fsync(self, handle):
        self._fsync(handle)
        with self._lock:
            link, found = Path(f"/proc/self/fd/{handle}"), os.fstat(handle)
            if found.st_ino not in self._held:
                self._held[found.st_ino] = os.dup(handle)  # no other file gets this inode
            if link.is_dir():
                self._folders = self._folders | {found.st_ino: list_folder(link)}
            else:
                self._files = self._files | {found.st_ino: link.read_bytes()}
            self.moments.append((self._files, self._folders))
            files, folders = {}, {}
            if self._root is not None:
                _read_tree(self._root, files, folders)
            self.written.append((files, folders))

    def has(self, moment, name, inode):
        """Return True if the folder with that inode has an entry with this name on the disk."""
        return name in self.moments[moment][1].get(inode, {})

    def restore(self, moment, name, inode, target, *, chance=None):
        """Restore the folder ``name`` of the folder with that inode to its state on the disk, if it existed.

        With ``chance``, any number, parts of the unsynced writes are on the disk as well: any first bytes of files, and
        any changes of folders.
        """
        found = self._entries(moment, inode, chance).get(name)
        if found is None:
            return
        if not found[1]:
            target.write_bytes(self._content(moment, found[0], chance))
            return
        target.mkdir()
        for below in self._entries(moment, found[0], chance):
            self.restore(moment, below, found[0], target / below, chance=chance)

    def _entries(self, moment, inode, chance):
        synced, written = self.moments[moment][1].get(inode, {}), self.written[moment][1].get(inode)
        if chance is None or written is None:
            return synced
        return (synced, written)[hash((chance, inode)) % 2]

    def _content(self, moment, inode, chance):
        synced, written = self.moments[moment][0].get(inode, b""), self.written[moment][0].get(inode)
        if chance is None or written is None:
            return synced
        if not written.startswith(synced):
            return written
        return written[: len(synced) + hash((chance, inode)) % (len(written) - len(synced) + 1)]


def list_folder(path):
    """Return the inodes of a folder's entries, and whether they are folders, by name."""
    with os.scandir(path) as entries:
        kept = (entry for entry in entries if entry.is_dir() or entry.is_file())  # no sockets
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in kept}


def _read_tree(path, files, folders):
    with suppress(OSError):  # it was removed meanwhile
        found = folders[path.stat().st_ino] = list_folder(path)
        for name, (inode, is_folder) in found.items():
            if is_folder:
                _read_tree(path / name, files, folders)
            else:
                with suppress(OSError):
                    files[inode] = (path / name).read_bytes()
