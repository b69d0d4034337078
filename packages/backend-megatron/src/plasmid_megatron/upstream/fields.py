"""Names and types of the fields of Megatron's configuration classes, without importing Megatron.

A process of its own asks the installed release once; the answer is kept by version. Importing Megatron takes seconds.
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
"""Tables of a recipe's ``[trainer]`` and the classes whose fields they take."""
CHECKS = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list | tuple),
    "dict": lambda value: isinstance(value, dict),
}


def check_fields(table: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError unless every name is a field of the table's class and every value of its type.

    Where the package is not installed, nothing is known of its fields: a recipe can be read, and is refused when a run
    is to start.
    """
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return
    known = fields()[table]
    for name, value in values.items():
        where = f"{name} is no field of {CLASSES[table]} of {PACKAGE} {version(PACKAGE)}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(where + (f"; did you mean {close[0]!r}?" if close else ""))
        takes = known[name]
        if not takes:
            raise ValueError(f"{name} holds what a recipe cannot say (a function or an object)")
        if not any(_takes(kind, value) for kind in takes):
            raise ValueError(f"{name} must be {' or '.join(_shown(kind) for kind in takes)}, got {value!r}")


@lru_cache(maxsize=1)
def fields() -> dict[str, dict[str, list[str]]]:
    """By table and field: the types that it takes; none for what cannot be written in TOML. ``=x`` is the text x."""
    file = _cache() / f"{PACKAGE}-{version(PACKAGE)}.json"
    if file.is_file():
        known: dict[str, dict[str, list[str]]] = json.loads(file.read_text(encoding="utf-8"))
        return known
    done = subprocess.run(
        [sys.executable, "-m", "plasmid_megatron.upstream.read_fields"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"the fields of {PACKAGE} cannot be read: {last}")
    known = json.loads(done.stdout.splitlines()[-1])
    _keep(file, json.dumps(known))
    return known


def _takes(kind: str, value: Any) -> bool:
    return value == kind[1:] if kind.startswith("=") else CHECKS[kind](value)


def _shown(kind: str) -> str:
    return repr(kind[1:]) if kind.startswith("=") else kind


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plasmid"


def _keep(file: Path, text: str) -> None:
    """Write the file at once, so that nobody reads half of it; a folder that cannot be written costs time only."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        return
