"""Plain data of recipe files and ``key=value`` overrides, with bounds on what TOML may hold."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

MAX_RECIPE_BYTES = 16 << 20
"""Largest recipe file."""
MAX_DEPTH = 40
"""Most tables and lists within each other."""
MAX_INTEGER = 1 << 63
"""TOML's integers have 64 bits."""


def read_toml(path: Path) -> dict[str, Any]:
    """One recipe file as plain data."""
    try:
        text = _read(path).decode("utf-8-sig")
        return _checked(str(path), tomllib.loads(text.replace("\r\n", "\n")))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested more than {MAX_DEPTH} deep") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits, or a NUL in the name
        raise ConfigError(f"{path}: cannot read the recipe: {error}") from None


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe without a writer, too
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{path}: cannot read the recipe: is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: cannot read the recipe: is no regular file")
        content = file.read(MAX_RECIPE_BYTES + 1)
    if len(content) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{path}: cannot read the recipe: is larger than {MAX_RECIPE_BYTES >> 20} MiB")
    return content


def parse_override(text: str) -> dict[str, Any]:
    """``trainer.lr=1e-6`` -> ``{"trainer": {"lr": 1e-6}}``; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} must look like key=value, for example trainer.lr=1e-6")
    try:
        leaf: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        leaf = value
    except RecursionError:
        raise ConfigError(f"{key}: nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ConfigError(f"{key}: cannot be read: {error}") from None
    *parents, last = key.split(".")
    tree: dict[str, Any] = {last: leaf}
    for parent in reversed(parents):
        tree = {parent: tree}
    return _checked("override", tree)


def _checked(where: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data, unless something in it is too deep or too large for what reads it. Raises `ConfigError`."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while waiting:
        at, value = waiting.pop()
        if len(at) > MAX_DEPTH:
            raise ConfigError(f"{where}: {'.'.join(at[:3])} ...: nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            waiting += [((*at, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [((*at, str(index)), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER:
            raise ConfigError(
                f"{where}: {'.'.join(at)}: an integer must have at most 64 bits, got one of {value.bit_length()}"
            )
        elif isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{where}: {'.'.join(at)}: must not hold a NUL character, got {value!r}")
    return data
