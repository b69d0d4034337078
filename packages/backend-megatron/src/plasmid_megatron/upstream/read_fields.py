"""Print the fields of Megatron's configuration classes: python -m plasmid_megatron.upstream.read_fields"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from typing import Any

from .fields import CLASSES
from .imports import import_without_compiler

PLAIN = {bool: "bool", int: "int", float: "float", str: "str", list: "list", tuple: "list", dict: "dict"}
DTYPES = ["=float32", "=bfloat16", "=float16"]


def kinds(hint: Any) -> list[str]:
    """Return the values that a recipe may set for a field with this annotation, as in `fields.fields`."""
    import torch

    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(kind for part in typing.get_args(hint) for kind in kinds(part)))
    if origin is typing.Literal:
        return [f"={value}" for value in typing.get_args(hint) if value is not None]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [f"={member}" for member in hint.__members__]
    if hint is torch.dtype:
        return DTYPES
    name = PLAIN.get(origin or hint)
    return [name] if name else []


def read_fields() -> dict[str, dict[str, list[str]]]:
    """Import Megatron and return the accepted types by table and field."""
    with import_without_compiler():
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

    found = {}
    for table, cls in (("transformer", TransformerConfig), ("optimizer", OptimizerConfig)):
        assert cls.__name__ == CLASSES[table]
        hints = typing.get_type_hints(cls)
        found[table] = {field.name: kinds(hints[field.name]) for field in dataclasses.fields(cls) if field.init}
    return found


def main() -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(read_fields()) + "\n")


if __name__ == "__main__":
    main()
