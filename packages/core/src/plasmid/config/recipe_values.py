"""Parse recipe files and ``key=value`` overrides into plain data, with limits on their size and nesting."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

MAX_RECIPE_BYTES = 16 << 20
"""Maximum size of a recipe file."""
MAX_DEPTH = 40
"""Maximum nesting of tables and lists."""
MAX_INTEGER = 1 << 63
"""TOML's integers have 64 bits."""


LONG_KEY = re.compile(r"""(?:^|[\[{,])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){100}""", re.MULTILINE)
"""A dotted key of over a hundred parts; no setting is nested that deep."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read one recipe file as plain data. Raises `ConfigError`."""
    try:
        text = _read(path).decode("utf-8-sig")
        if LONG_KEY.search(text):  # tomllib would need gigabytes of memory to parse it
            raise RecursionError
        return _check_values(str(path), tomllib.loads(text.replace("\r\n", "\n")))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested more than {MAX_DEPTH} levels deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits, or a NUL in the name
        raise ConfigError(f"{path}: cannot read the recipe: {error}") from None


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not block on a pipe without a writer
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{path}: cannot read the recipe: is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: cannot read the recipe: is not a regular file")
        content = file.read(MAX_RECIPE_BYTES + 1)
    if len(content) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{path}: cannot read the recipe: larger than {MAX_RECIPE_BYTES >> 20} MiB")
    return content


def parse_override(text: str) -> dict[str, Any]:
    """Parse ``trainer.lr=1e-6`` into ``{"trainer": {"lr": 1e-6}}``. A value that is not valid TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} must look like key=value, for example trainer.lr=1e-6")
    try:
        leaf: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        leaf = value
    except RecursionError:
        raise ConfigError(f"{key}: nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ConfigError(f"{key}: cannot be read: {error}") from None
    *parents, last = key.split(".")
    tree: dict[str, Any] = {last: leaf}
    for parent in reversed(parents):
        tree = {parent: tree}
    return _check_values("override", tree)


def _check_values(where: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data. Raises `ConfigError` for values nested too deep, too large integers and NUL characters."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while stack:
        at, value = stack.pop()
        if len(at) > MAX_DEPTH:
            raise ConfigError(f"{where}: {'.'.join(at[:3])} ...: nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            stack += [((*at, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [((*at, str(index)), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER:
            raise ConfigError(
                f"{where}: {'.'.join(at)}: an integer must have at most 64 bits, got {value.bit_length()} bits"
            )
        elif isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{where}: {'.'.join(at)}: must not contain a NUL character, got {value!r}")
    return data
