"""Docstrings of a model's fields, parsed from the source only when help is requested.

pydantic's `use_attribute_docstrings` parses them at class creation, which takes a quarter of the start-up time of `rl`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of documented fields, by name.

    A class that redeclares a field must document it again. Returns nothing for classes without readable source.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            declared = inspect.get_annotations(base)
            docs = {name: text for name, text in docs.items() if name not in declared} | _own_docs(base)
    written = {name: field.description for name, field in cls.model_fields.items() if field.description}
    return {name: text for name, text in docs.items() if name in cls.model_fields} | written


@cache
def _own_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of fields declared in the class itself."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # created dynamically, or the source file is missing
        return {}
    docs = {}
    for field, below in pairwise(getattr(node, "body", ())):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                docs[name] = inspect.cleandoc(text)
    return docs
