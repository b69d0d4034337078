"""Manifests of checkpoints: size and hash of every file, to detect damage before anything is loaded.

The hash is XXH3 (128 bits), which is faster to compute than a disk writes. It detects damage, not tampering.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash
from plasmid.errors import CheckpointError, ModelError
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import check_in_folder

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SAMPLES = "samples.json"
"""File in a checkpoint with the entries of the run's sample files. A checkpoint with this file must have a manifest,
because all versions of Plasmid that write it also write a manifest."""
CHUNK_BYTES = 256 << 10
"""Number of bytes to read and hash at a time. They fit into a core's cache: five times as fast as with 4 MiB."""
STATE = "state.json"
"""File in a checkpoint that every manifest lists."""
LISTED = (".json", ".jsonl", ".parquet")
"""Suffixes of files directly in a checkpoint that a manifest must list. It must list all files in subfolders."""
MAX_THREADS = 8
"""Maximum number of hashing threads; more are limited by memory and disk bandwidth."""
MAX_SIZE = 1 << 63
"""Limit of the sizes that a manifest may list, in bytes; no file system has larger files."""


class Entry(NamedTuple):
    """Entry of one file in a manifest."""

    size: int
    """Bytes."""
    hash: str
    """XXH3-128, hexadecimal."""


def hash_files(files: Iterable[Path]) -> list[Entry]:
    """Return size and hash of each file, hashed in parallel. Raises `OSError`."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_hash, files))


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files currently below ``folder``. Raises `OSError`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    entries = hash_files(files)
    found = {file.relative_to(folder).as_posix(): entry for file, entry in zip(files, entries, strict=True)}
    (folder / MANIFEST).write_text(dump_entries(found), encoding="utf-8")


def dump_entries(entries: Mapping[str, Entry]) -> str:
    """Return the entries as JSON for `read_entries`."""
    return json.dumps({name: list(entry) for name, entry in entries.items()}, indent=0)


def read_entries(file: Path) -> dict[str, Entry]:
    """Read the entries by file name. Raises `OSError`, and `ValueError` if the file is not a manifest."""
    try:
        read = {str(name): Entry(size, hash_) for name, (size, hash_) in read_json(file).items()}
        if not all(
            isinstance(size, int) and size < MAX_SIZE and isinstance(hash_, str) for size, hash_ in read.values()
        ):
            raise TypeError
        return {check_in_folder(file, name): entry for name, entry in read.items()}
    except (TypeError, AttributeError, ModelError):
        raise ValueError("not a manifest") from None


def find_damage(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Return a message for each file that is missing or does not match its entry, as ``state.json is missing``."""
    sizes = {name: _size(folder / name) for name in entries}
    found = {name: _size_damage(folder / name, name, sizes[name], entries[name].size) for name in entries}
    whole = [name for name, damage in found.items() if not damage]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for name, damage in zip(
            whole, pool.map(lambda name: _find_damage(folder, name, entries[name]), whole), strict=True
        ):
            found[name] = damage
    return [damage for damage in found.values() if damage]


def describe_damage(checkpoint: Path, *, below: str = "") -> str | None:
    """Describe the damage of a checkpoint's files, or of those ``below`` a folder of it; None if there is none."""
    try:
        entries = read_entries(checkpoint / MANIFEST)
    except FileNotFoundError:
        if (checkpoint / SAMPLES).exists():
            return f"{MANIFEST} is missing"
        log.warning("%s: written by an older version without %s; cannot be checked for damage", checkpoint, MANIFEST)
        return None
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({_reason(error)})"
    if STATE not in entries:
        return f"{MANIFEST} does not list {STATE}"
    found = find_damage(checkpoint, {name: entry for name, entry in entries.items() if name.startswith(below)})
    found += [f"{name} is not in {MANIFEST}" for name in _find_unlisted(checkpoint, entries) if name.startswith(below)]
    if not found:
        return None
    return found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1} more files are damaged"


def check_weights(path: Path) -> None:
    """Raise `CheckpointError` if ``path`` is a run's checkpoint, or the trainer's folder in one, and is damaged.

    Folders that were not written by a run have no manifest and are not checked.
    """
    checkpoint = next((folder for folder in (path, path.absolute().parent) if (folder / STATE).is_file()), None)
    if checkpoint is None or not (checkpoint / "trainer").is_dir():
        return
    damage = describe_damage(checkpoint, below="trainer/")
    if damage is not None:
        raise CheckpointError(f"{checkpoint}: damaged: {damage}; use another checkpoint of the run")


def _find_unlisted(checkpoint: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Return the files of a checkpoint that its manifest should list and does not; a resume would load them."""
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    own = sorted(file.as_posix() for file in files if len(file.parts) > 1 or file.suffix in LISTED)
    return [name for name in own if name not in entries and name != MANIFEST]


def _find_damage(folder: Path, name: str, expected: Entry) -> str:
    try:
        return "" if _hash(folder / name) == expected else f"{name} does not match its hash"
    except OSError as error:
        return f"{name} cannot be read ({_reason(error)})"


def _size(file: Path) -> int | None:
    """Return the size of a regular file in bytes; None if there is no such file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _size_damage(file: Path, name: str, size: int | None, expected: int) -> str:
    if size is None:
        return f"{name} is {'not a regular file' if os.path.lexists(file) else 'missing'}"
    return "" if size == expected else f"{name} has {size} bytes instead of {expected}"


def _hash(file: Path) -> Entry:
    state, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            state.update(buffer[:count])
            size += count
    return Entry(size, state.hexdigest())


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
