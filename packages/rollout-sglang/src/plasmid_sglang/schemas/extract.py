"""Script that prints the names and types of the installed SGLang's server arguments as JSON.

Importing SGLang takes seconds, so `plasmid_sglang.schema` runs this once per version and caches the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def describe(annotation: Any) -> dict[str, Any]:
    """Return ``{"types": [...], "choices": [...]}``; an empty type list accepts any value."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        found = describe(inner)
        choices = next((c for note in notes if (c := getattr(note, "choices", None))), None)
        if choices and "array" not in found["types"]:
            found["choices"] = [c for c in choices if isinstance(c, str | int)]
        return found
    if get_origin(annotation) is Literal:
        args = get_args(annotation)
        names = sorted({NAMES[type(arg)] for arg in args})
        return {"types": names, "choices": [arg for arg in args if arg is not None]}
    if get_origin(annotation) in (Union, types.UnionType):
        return _union([describe(arg) for arg in get_args(annotation)])
    plain = get_origin(annotation) or annotation
    if plain in NAMES:
        return {"types": [NAMES[plain]]}
    if plain in (list, tuple, set):
        return {"types": ["array"]}
    if plain is dict:
        return {"types": ["object"]}
    return {"types": []}


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    known = all(part["types"] for part in parts)
    found: dict[str, Any] = {"types": sorted({name for part in parts for name in part["types"]}) if known else []}
    choices = [part["choices"] for part in parts if "choices" in part]
    if choices and all("choices" in part or part["types"] == ["null"] for part in parts):
        found["choices"] = [choice for part in choices for choice in part]
    return found


def server_schema() -> dict[str, Any]:
    """Return the arguments of SGLang's server."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs, include_extras=True)
    declared = [field.name for field in fields(ServerArgs)] if is_dataclass(ServerArgs) else list(hints)
    return {name: describe(hints[name]) for name in declared if not name.startswith("_")}


def router_schema() -> dict[str, Any]:
    """Return the arguments of SGLang's router."""
    from sglang_router.router_args import RouterArgs

    hints = get_type_hints(RouterArgs, include_extras=True)
    return {field.name: describe(hints[field.name]) for field in fields(RouterArgs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sglang", "sglang-router"])
    schema = server_schema() if parser.parse_args().what == "sglang" else router_schema()
    lines = [f"{json.dumps(name)}: {json.dumps(schema[name])}" for name in sorted(schema)]
    sys.stdout.write("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
