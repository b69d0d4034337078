"""Rows transformed by a recipe's function and columns."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

import numpy as np
from plasmid.errors import DataError, one_line
from plasmid.plugins.functions import FunctionName
from plasmid_models.tokenization.templates import RENDERER, RenderError

from .row_files import RowFile

log = logging.getLogger(__name__)
TEMPLATE = re.compile(r"\{\{|\{%")
DIGESTED_ROWS = 100
"""Number of transformed rows in the digest, which detects changes of the function on resume."""
Function = Callable[[dict[str, Any]], Any]


class RowMapping:
    """Transforms rows: calls ``apply``, then adds ``columns``."""

    def __init__(self, *, columns: Mapping[str, str], apply: str = "none") -> None:
        """Raises `DataError` if the function cannot be loaded."""
        self._columns, self._apply = columns, apply
        self._function = None if apply == "none" else load_function("data.apply", apply)

    def __bool__(self) -> bool:
        return bool(self._columns) or self._function is not None

    @property
    def has_function(self) -> bool:
        """True if the result depends on more than the recipe and the row."""
        return self._function is not None

    def map(self, where: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Transform a row. Returns None if the function drops it; other columns are preserved.

        Raises a `DataError` that starts with ``where``.
        """
        mapped = row if self._function is None else self._call_function(self._function, where, row)
        if mapped is None:
            return None
        added = {name: _value(where, name, source, mapped) for name, source in self._columns.items()}
        return {**mapped, **added}

    def _call_function(self, function: Function, where: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            mapped = function(copy.deepcopy(dict(row)))
        except Exception as error:  # boundary: users' code
            raise DataError(f"{where}: data.apply: {self._apply} raised: {one_line(error)}") from error
        if not isinstance(mapped, Mapping | None):
            raise DataError(
                f"{where}: data.apply: {self._apply} must return a row as a dict, or None to drop it, got "
                f"{mapped!r:.60}"
            )
        if mapped is not None and not all(isinstance(name, str) for name in mapped):
            raise DataError(f"{where}: data.apply: {self._apply} returned a row with column names that are not strings")
        return mapped


class MappedRows:
    """A file whose rows are transformed on access."""

    def __init__(self, file: RowFile, mapping: RowMapping) -> None:
        self._file, self._mapping = file, mapping
        self.path, self.digest = file.path, file.digest
        self._used = np.arange(len(file))
        if mapping.has_function:
            self._scan()

    def _scan(self) -> None:
        """Find the rows that the function drops, and add the first transformed rows to the digest."""
        state, used = hashlib.blake2b(digest_size=8), list[int]()
        for index, row in enumerate(self._file):
            mapped = self._map(index, row)
            if mapped is not None:
                used.append(index)
                if len(used) <= DIGESTED_ROWS:
                    state.update(self._text(index, mapped))
        if not used:
            raise DataError(f"{self.path}: data.apply drops every row; it must return rows as dicts")
        if len(used) < len(self._file):
            log.info("data: data.apply drops %d of %d rows of %s", len(self) - len(used), len(self), self.path)
        self._used = np.array(used)
        self.digest += f":{len(used)}:{state.hexdigest()}"

    def _text(self, index: int, mapped: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(dict(mapped), sort_keys=True, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            where = f"{self.path}:{self._file.number(index)}"
            raise DataError(
                f"{where}: data.apply: the returned row cannot be written as JSON: {one_line(error)}"
            ) from None

    def __len__(self) -> int:
        return len(self._used)

    def number(self, index: int) -> int:
        return self._file.number(int(self._used[index]))

    def index(self, number: int) -> int:
        return int(np.searchsorted(self._used, self._file.index(number)))

    def row(self, index: int) -> Mapping[str, Any]:
        used = int(self._used[index])
        row = self._map(used, self._file.row(used))
        if row is None:
            raise DataError(
                f"{self.path}:{self.number(index)}: data.apply returned None for a row that it returned before"
            )
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self.row, range(len(self)))

    def _map(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self._mapping.map(f"{self.path}:{self._file.number(index)}", row)


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Load a function that a setting names. Raises a `DataError` that starts with the key."""
    try:
        return FunctionName.parse(name).load()
    except Exception as error:  # boundary: importing runs users' code
        raise DataError(f"{key}: {name} cannot be loaded: {one_line(error)}") from error


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not support into text without memory addresses, equal in every process."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, date | time | timedelta | Number | np.generic | bytes):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _value(where: str, name: str, source: str, row: Mapping[str, Any]) -> Any:
    if TEMPLATE.search(source):
        try:
            return RENDERER.render(source, dict(row), strict=True)
        except RenderError as error:
            raise DataError(
                f"{where}: data.columns.{name}: the template raised: {str(error).splitlines()[0]}"
            ) from None
    if source in row:
        return row[source]
    value: Any = row
    for part in source.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(value):
            value = value[int(part[:9])]
        else:
            has = ", ".join(map(str, row)) or "nothing"
            raise DataError(f"{where}: data.columns.{name}: the row has no {source!r}; it has: {has}")
    return value
