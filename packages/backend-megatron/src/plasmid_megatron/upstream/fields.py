"""Names and types of the fields of Megatron's configuration classes, without importing Megatron.

Importing Megatron takes seconds, up to 20 on a machine with GPUs. So a subprocess reads the fields once per installed
version, unless this process has imported Megatron anyway, and they are cached.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGE = "megatron-core"
CLASSES = {"transformer": "TransformerConfig", "optimizer": "OptimizerConfig"}
"""Megatron's configuration class for each of these tables of ``[trainer]``; the table accepts its fields."""
CHECKS = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list | tuple),
    "dict": lambda value: isinstance(value, dict),
}


def check_fields(table: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless every name is a field of the table's class and every value has the field's type.

    If the package is not installed, nothing is checked: the recipe can be loaded, but a run with it cannot start.
    """
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return
    known = fields()[table]
    for name, value in values.items():
        where = f"{name} is not a field of {CLASSES[table]} of {PACKAGE} {version(PACKAGE)}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(where + (f"; did you mean {close[0]!r}?" if close else ""))
        types = known[name]
        if not types:
            raise ValueError(f"{name} takes a function or an object, which a recipe cannot contain")
        if not any(_has_type(kind, value) for kind in types):
            raise ValueError(f"{name} must be {' or '.join(_type_name(kind) for kind in types)}, got {value!r}")


@lru_cache(maxsize=1)
def fields() -> dict[str, dict[str, list[str]]]:
    """Return the accepted types by table and field: keys of `CHECKS`, or ``=x`` for the literal string x.

    The list is empty if the field accepts no type that TOML has.
    """
    file = _cache_folder() / f"{PACKAGE}-{version(PACKAGE)}.json"
    if file.is_file():
        known: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
        return known
    if "megatron.core.optimizer" in sys.modules:
        from .read_fields import read_fields

        known = read_fields()
    else:
        known = _read_in_subprocess()
    _write_cache(file, json.dumps(known))
    return known


def _read_in_subprocess() -> dict[str, dict[str, list[str]]]:
    command = [sys.executable, "-m", "plasmid_megatron.upstream.read_fields"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"cannot read the fields of {PACKAGE}: {last}")
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _has_type(kind: str, value: Any) -> bool:
    return value == kind[1:] if kind.startswith("=") else CHECKS[kind](value)


def _type_name(kind: str) -> str:
    return repr(kind[1:]) if kind.startswith("=") else kind


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plasmid"


def _write_cache(file: Path, text: str) -> None:
    """Write the cache file atomically; ignore errors, which only cost time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        return
