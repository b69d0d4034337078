"""Conversions in parts. Several processes can write them, and finished parts are kept if a conversion is interrupted.

The unfinished folder contains the folder `RECORDS`: ``job.json`` describes the conversion, and each finished part has
a file with the names, sizes and hashes of its files, which is written after them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plasmid.components import Converter, OpenCheckpoint, PartWriter, TensorInfo
from plasmid.errors import ModelError
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import check_in_folder, make_folder, sync_to_disk, write_text
from plasmid_models.manifest import Entry, find_damage, hash_files

if TYPE_CHECKING:
    from torch import Tensor

RECORDS = "conversion"
JOB = "job.json"


class Progress(Protocol):
    """Observer of a conversion."""

    def start(self, num_bytes: int | None, kept: int) -> None:
        """Begin. ``num_bytes`` is the size of all tensors, None if unknown; an earlier attempt wrote ``kept`` of it."""
        ...

    def advance(self, name: str, num_bytes: int) -> None:
        """Report a tensor that has been read."""
        ...


def pack(groups: Iterable[Sequence[TensorInfo]], max_bytes: int) -> list[list[TensorInfo]]:
    """Combine consecutive groups to parts of up to ``max_bytes``; a part exceeds it only if a single group does."""
    parts: list[list[TensorInfo]] = []
    filled = 0
    for group in groups:
        size = sum(info.num_bytes for info in group)
        if not parts or filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1] += group
        filled += size
    return parts


def describe_job(source: Path, reader: Converter, writer: Converter, opened: OpenCheckpoint) -> dict[str, Any]:
    """Return everything that a conversion depends on, as JSON types; parts of a different conversion are not kept."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    facts = [(path, path.stat()) for path in files]
    described = {
        "version": version("plasmid-convert"),
        "source": str(source.absolute()),
        "files": [[path.relative_to(source).as_posix(), found.st_size, found.st_mtime_ns] for path, found in facts],
        "reader": reader.model_dump(mode="json"),
        "writer": writer.model_dump(mode="json"),
        "tensors": [[info.name, info.dtype, info.shape] for info in opened.tensors],
    }
    return json.loads(json.dumps(described))  # type: ignore[no-any-return]


def can_continue(stage: Path, job: Mapping[str, Any]) -> bool:
    """Return True if the folder was begun by the same conversion."""
    try:
        return bool(read_json(stage / RECORDS / JOB) == job)
    except (OSError, ValueError):
        return False


def begin(stage: Path, job: Mapping[str, Any]) -> None:
    """Mark an empty folder as unfinished. Raises `OSError`."""
    make_folder(stage / RECORDS)
    write_text(stage / RECORDS / JOB, json.dumps(job), durable=True)


def has_finished_parts(stage: Path) -> bool:
    """Return True if there are finished parts, which the next attempt keeps."""
    return any((stage / RECORDS).glob("part-*.json"))


def read_records(stage: Path) -> dict[int, dict[str, Any]]:
    """Return the records of finished parts whose files are intact, by number, and remove all other files."""
    records = {}
    for file in (stage / RECORDS).glob("part-*.json"):
        try:
            record = read_json(file)
            number, hashes = (
                int(record["number"]),
                {check_in_folder(file, n): Entry(*e) for n, e in record["hashes"].items()},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ModelError):
            continue
        if _record(stage, number) == file and not find_damage(stage, hashes):
            records[number] = record
    kept = {stage / name for record in records.values() for name in record["hashes"]}
    kept |= {_record(stage, number) for number in records} | {stage / RECORDS / JOB}
    for path in list(stage.rglob("*")):
        if path.is_symlink() or (path.is_file() and path not in kept):
            path.unlink()
    return records


class PartFiles:
    """Writes parts, each followed by its record. Syncs and hashes a part in a thread while the next one is written."""

    def __init__(
        self,
        stage: Path,
        plan: Sequence[Sequence[TensorInfo]],
        *,
        opened: OpenCheckpoint,
        writer: PartWriter,
        advance: Callable[[str, int], None],
    ) -> None:
        """Calls ``advance`` as `Progress.advance`."""
        self._stage, self._plan, self._opened, self._writer, self._advance = stage, plan, opened, writer, advance

    def write(self, numbers: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write the parts ``numbers``, and yield number and record of each one that is on disk.

        Takes the next number before the part of the last one is on disk. Raises `ModelError` or `OSError`.
        """
        with ThreadPoolExecutor(1) as pool:  # also after an interruption, it finishes the part that is written
            last: Future[dict[str, Any]] | None = None
            for number in numbers:
                written = self._write(number)
                if last is not None:
                    yield (record := last.result())["number"], record
                last = pool.submit(self._finish, written)
            if last is not None:
                yield (record := last.result())["number"], record

    def _write(self, number: int) -> dict[str, Any]:
        part, count = self._plan[number], len(self._plan)
        with closing(read_ahead(self._opened.read({info.name for info in part}))) as tensors:
            return {"number": number, **self._writer.write(number, count, part, self._count(tensors))}

    def _count(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            size = tensor.nbytes
            yield name, tensor
            del tensor  # its memory is used for the next one
            self._advance(name, size)

    def _finish(self, record: dict[str, Any]) -> dict[str, Any]:
        """Sync the files of a part, then write its record."""
        files = [self._stage / name for name in record["files"]]
        sync_to_disk(*files, self._stage)
        record["hashes"] = {name: list(entry) for name, entry in zip(record["files"], hash_files(files), strict=True)}
        write_text(_record(self._stage, record["number"]), json.dumps(record), durable=True)
        return record


def read_ahead(tensors: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor], None, None]:
    """Iterate in a thread that reads the next tensor while one is written. The thread ends when this is closed."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, tensors, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, tensors, None)
            yield item
            del item  # its memory is used for the next one


def _record(stage: Path, number: int) -> Path:
    return stage / RECORDS / f"part-{number + 1:05}.json"
