"""Functions named in recipes, and the schemas with which a policy can call them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from plasmid.components.interaction import ToolError
from plasmid.errors import one_line
from plasmid.plugins.functions import FunctionName
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$(.*?)(?=^\s*\w+:\s*$|\Z)", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


def import_function(text: str) -> Callable[..., Any]:
    """Import a function by name. Raises `ValueError` if there is none."""
    try:
        return FunctionName.parse(text).load()
    except ImportError as error:
        raise ValueError(one_line(error).removeprefix("ImportError: ")) from None
    except SyntaxError as error:
        raise ValueError(f"cannot read {text}: {one_line(error)}") from None


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return name, description and JSON schema of the arguments, as chat templates expect. Raises `ValueError`."""
    described = inspect.getdoc(function) or ""
    head = re.split(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises):\s*$", described, flags=re.MULTILINE)[0]
    parameters = _remove_titles(arguments_of(function).model_json_schema())
    about = {"name": name_of(function), "description": " ".join(head.split()), "parameters": parameters}
    return {"type": "function", "function": about}


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which the policy calls the function."""
    return str(getattr(function, "__name__", type(function).__name__))


def arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    """Create a model of the function's arguments. Raises `ValueError` if they cannot be passed by name."""
    hints, descriptions = (
        get_type_hints(function, include_extras=True),
        _argument_descriptions(inspect.getdoc(function) or ""),
    )
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{name_of(function)}: tools are called with named arguments, so *{name} is not supported")
        if name not in hints:
            raise ValueError(f"{name_of(function)}: argument {name!r} must have a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=descriptions.get(name)))
    return create_model(name_of(function), __config__=ConfigDict(extra="forbid"), **fields)


def validate_arguments(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments to the types of the function. Raises `ToolError` for invalid ones."""
    try:
        valid = model.model_validate(dict(arguments))
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        raise ToolError("wrong arguments: " + "; ".join(mistakes[:5])) from None
    return {name: getattr(valid, name) for name in model.model_fields}


def _argument_descriptions(described: str) -> dict[str, str]:
    """Return the description of each argument in the docstring."""
    section = SECTION.search(described)
    found = [ARGUMENT.match(line) for line in (section[1] if section else "").splitlines()]
    return {match[1]: match[2].strip() for match in found if match}


def _remove_titles(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k == "title" and isinstance(v, str))}
        return {k: _remove_titles(v) for k, v in kept.items() if not (k == "additionalProperties" and v is False)}
    return [_remove_titles(item) for item in value] if isinstance(value, list) else value
