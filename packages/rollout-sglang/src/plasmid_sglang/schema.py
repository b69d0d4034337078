"""Argument schemas of SGLang and its router, and validation against them, without importing either."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, cast

from plasmid.errors import ConfigError

Product = Literal["sglang", "sglang-router"]
Schema = Mapping[str, Mapping[str, Any]]
NEWEST: Mapping[Product, str] = {"sglang": "0.5.23", "sglang-router": "0.3.2"}
"""Releases to validate against if the product is not installed."""
TITLES: Mapping[Product, str] = {"sglang": "SGLang", "sglang-router": "the SGLang router"}
SHIPPED = Path(__file__).parent / "schemas"
EXTRACT_S = 120.0
"""Time limit for extracting the schema of an installed release, in seconds."""


def installed_version(product: Product) -> str | None:
    """Return the installed version; None if it is not installed."""
    try:
        return version(product)
    except PackageNotFoundError:
        return None


@cache
def schema_of(product: Product, release: str) -> Schema:
    """Return the arguments of one release: shipped, cached, or extracted once from the installed one, which takes
    seconds."""
    for file in (SHIPPED / f"{product}-{release}.json", _cache_path(product, release)):
        if file.is_file():
            return cast(Schema, json.loads(file.read_text()))
    file = _cache_path(product, release)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(extract(product))
    partial.replace(file)
    return cast(Schema, json.loads(file.read_text()))


def extract(product: Product) -> str:
    """Extract the installed release's schema as JSON in a separate process. Raises `ConfigError`."""
    command = [sys.executable, str(SHIPPED / "extract.py"), product]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXTRACT_S, env=env, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        last = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise ConfigError(f"cannot read the arguments of {TITLES[product]}: {' '.join(last)}") from None
    return done.stdout[done.stdout.index("{") :]


def _cache_path(product: Product, release: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "plasmid" / f"{product}-{release}.json"


def argument_errors(product: Product, table: Mapping[str, Any], *, release: str | None = None) -> Iterator[str]:
    """Yield one error text per invalid argument: unknown names, wrong types, values outside the choices."""
    if not table:
        return
    release = release or installed_version(product) or NEWEST[product]
    schema = schema_of(product, release)
    for name, value in table.items():
        if name not in schema:
            close = difflib.get_close_matches(name, schema, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"{name}: not an argument of {TITLES[product]} {release}{hint}"
        elif not _has_type(value, schema[name]["types"]):
            yield f"{name}: must be {_type_names(schema[name]['types'])}, got {value!r}"
        elif "choices" in schema[name] and value not in schema[name]["choices"]:
            yield f"{name}: must be one of {', '.join(map(repr, schema[name]['choices']))}, got {value!r}"


def has_argument(product: Product, name: str) -> bool:
    """Return whether the installed release, or else the newest, has an argument of this name."""
    return name in schema_of(product, installed_version(product) or NEWEST[product])


def choices(product: Product, name: str) -> tuple[str, Sequence[str]]:
    """Return the installed release, or else the newest, and its choices for an argument; empty if it has none."""
    release = installed_version(product) or NEWEST[product]
    return release, schema_of(product, release).get(name, {}).get("choices", ())


def _has_type(value: Any, types: list[str]) -> bool:
    kinds = {
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list | tuple),
        "object": isinstance(value, Mapping),
    }
    return not types or any(kinds.get(name, False) for name in types)


def _type_names(types: list[str]) -> str:
    words = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "a string"}
    words |= {"array": "a list", "object": "a table"}
    return " or ".join(words[name] for name in types if name != "null")
