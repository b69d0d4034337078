"""Find the files of a split in a Hugging Face ``datasets`` folder, and read its rows."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import DataError, ModelError, one_line
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import check_in_folder

from .file_slices import FileSlice
from .parquet_rows import ParquetFile
from .row_files import RowFile

SHARD = re.compile(r"-\d+-of-\d+$")
ENDS = 1 << 16
"""Number of bytes at each end of a file that its digest covers, besides name and size; files may be very large."""


def open_split(path: str, split: str) -> list[RowFile]:
    """Open a split; ``auto`` is the only one, or ``train``. Raises `DataError`."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"data.path: no such folder: {folder} (searched from {Path.cwd()})")
    if (folder / "dataset_dict.json").is_file():
        name = _choose(_split_names(folder / "dataset_dict.json"), split, folder)
        return [DatasetRows.from_saved_folder(folder / name)]
    if (folder / "state.json").is_file():
        _choose(_split_names(folder / "state.json"), split, folder)
        return [DatasetRows.from_saved_folder(folder)]
    shards = _shards(folder)
    if not shards:
        raise DataError(
            f"data.path: {folder} is not a folder of the package datasets: it has no dataset_dict.json, no state.json "
            "and no *.parquet or *.arrow files"
        )
    files = shards[_choose(list(shards), split, folder)]
    return [_open(file) for file in files]


def _split_names(file: Path) -> list[str]:
    """Read the names of splits from a file written by ``save_to_disk``. Raises `DataError`."""
    try:
        found = read_json(file)
        names = found["splits"] if file.name == "dataset_dict.json" else [found.get("_split") or "train"]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a split has no name")
        return [check_in_folder(file, name) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read: {one_line(error)}") from None
    except ModelError as error:
        raise DataError(str(error)) from None


def _choose(names: list[str], split: str, folder: Path) -> str:
    wanted = split
    if split == "auto":
        wanted = names[0] if len(names) == 1 else "train"
    if wanted in names:
        return wanted
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DataError(f"data.split: {folder} has no split {wanted!r}; it has {', '.join(sorted(names))}{hint}")


def _shards(folder: Path) -> dict[str, list[Path]]:
    """Group files by split: ``train.parquet``, ``data/train-00000-of-00002.parquet``, ``train/0000.parquet``, ..."""
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.rglob("*.parquet"), *folder.rglob("*.arrow")]):
        stem = SHARD.sub("", file.stem)
        numbered = re.fullmatch(r"(part-?)?\d+", stem) is not None
        split = file.parent.name if numbered else stem.rpartition("-")[2] if file.suffix == ".arrow" else stem
        others = found.setdefault(split, [])
        if others and others[0].parent != file.parent:
            raise DataError(
                f"data.path: {folder} has several datasets with a split {split!r}; set the folder of one: "
                f"{others[0].parent} or {file.parent}"
            )
        others.append(file)
    return found


def _open(file: Path) -> RowFile:
    return ParquetFile(FileSlice(path=file)) if file.suffix == ".parquet" else DatasetRows.from_arrow_file(file)


class DatasetRows:
    """Rows that ``datasets`` memory-maps."""

    def __init__(self, path: Path, dataset: Any, digest: str) -> None:
        self.path, self.digest, self._dataset = path, digest, dataset
        if not len(dataset):
            raise DataError(f"{path}: has no rows; every run needs at least one prompt")

    @classmethod
    def from_saved_folder(cls, folder: Path) -> DatasetRows:
        """Open a folder written by ``save_to_disk``. Raises `DataError`."""
        files = sorted(folder.glob("*.arrow"))
        return cls(folder, _load(folder), _digest([folder / "state.json", *files]))

    @classmethod
    def from_arrow_file(cls, file: Path) -> DatasetRows:
        """Open one Arrow file. Raises `DataError`."""
        return cls(file, _load(file), _digest([file]))

    def __len__(self) -> int:
        return len(self._dataset)

    def number(self, index: int) -> int:
        return index + 1

    def index(self, number: int) -> int:
        return number - 1

    def row(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._dataset[index]
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._dataset)


def _load(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(
            f"data.kind: {path} needs the package datasets, which is not installed; "
            "pip install 'plasmid-runtime[datasets]'"
        ) from None
    try:
        return datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
    except Exception as error:  # boundary: broken files make the package raise anything
        raise DataError(f"data.path: {path} cannot be read: {one_line(error)}") from error


def _digest(files: list[Path]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            state.update(content.read(ENDS))
            content.seek(max(ENDS, size - ENDS))
            state.update(content.read())
    return state.hexdigest()
