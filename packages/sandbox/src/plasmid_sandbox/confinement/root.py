"""A private file system for one process: read-only parts of the host's, and one writable folder of limited size."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from .linux import SYS_MOUNT_SETATTR, SYS_MOVE_MOUNT, SYS_OPEN_TREE, check, libc, mount, syscall

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache")
"""Paths that programs need to start; symbolic links among them are copied as such."""
WORK = "/work"
"""The folder that a program may write to."""
BASE = "/tmp"
"""Folder in which the new root is assembled, in the new mount namespace only."""


def enter(readable: Sequence[str], *, disk_bytes: int, num_files: int, uid: int) -> None:
    """Replace the root of this process's mount namespace. Unlisted paths do not exist in it: /proc, /etc, /home."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    sources = [path for path in (*SYSTEM, *readable) if os.path.exists(path) and path not in links]
    trees = {path: _clone(path, device=False) for path in _find_outermost(sources)}
    trees |= {path: _clone(path, device=True) for path in DEVICES}
    mount("root", BASE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, tree in trees.items():
        _attach(tree, path)
    for path, target in links.items():
        _parent(path)
        os.symlink(target, BASE + path)
    os.mkdir(BASE + WORK)
    options = f"size={disk_bytes},nr_inodes={num_files},mode=700,uid={uid},gid={uid}"
    mount("work", BASE + WORK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    if not os.path.lexists(BASE + "/tmp"):  # a readable folder may be inside it
        os.symlink(WORK, BASE + "/tmp")
    os.chdir(BASE)
    syscall("pivot_root", ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    check(libc().umount2(ctypes.c_char_p(b"."), MNT_DETACH), "umount of the host's root")
    os.chdir("/")
    mount("root", "/", "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _find_outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not inside another one."""
    found: list[str] = []
    for path in sorted(paths, key=len):
        if not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found


def _clone(path: str, *, device: bool) -> int:
    """Create a detached, read-only copy of the mounts at and below a path."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    tree = syscall(SYS_OPEN_TREE, AT_FDCWD, ctypes.c_char_p(path.encode()), flags)
    attributes = ATTR_RDONLY | ATTR_NOSUID | (0 if device else ATTR_NODEV)
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    buffer = ctypes.create_string_buffer(wanted, len(wanted))
    syscall(SYS_MOUNT_SETATTR, tree, ctypes.c_char_p(b""), AT_EMPTY_PATH | AT_RECURSIVE, buffer, len(wanted))
    return tree


def _attach(tree: int, path: str) -> None:
    _parent(path)
    target = BASE + path
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.mkdir(target)
    else:
        Path(target).touch()
    empty, place = ctypes.c_char_p(b""), ctypes.c_char_p(target.encode())
    syscall(SYS_MOVE_MOUNT, tree, empty, AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def _parent(path: str) -> None:
    os.makedirs(os.path.dirname(BASE + path), mode=0o755, exist_ok=True)
