"""The process that renders chat templates, which are programs that come with models: it has little memory and can end.

Started as a file, so that it imports nothing but Jinja. A request is a pickle on standard input, an answer a letter
(``=`` or ``!``) and a text on standard output, each behind its length in eight bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2 << 30
"""Address space of the process."""


class Generation(Extension):
    """``{% generation %}``, by which some templates mark what an assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Take what is within it as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_within"), [], [], body).set_lineno(line)

    def _within(self, caller: Macro) -> str:
        return str(caller())


def main() -> None:
    """Answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sources: dict[int, str] = {}
    templates: dict[int, Template] = {}
    with os.fdopen(0, "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        while head := requests.read(8):
            number, source, arguments = pickle.loads(requests.read(struct.unpack(">Q", head)[0]))
            try:
                if source is not None:
                    sources[number] = source
                if number not in templates:
                    templates[number] = environment().from_string(sources[number])
                answer = "=" + templates[number].render(**arguments)
                data = answer.encode("utf-8", "surrogatepass")
            except Exception as error:  # noqa: BLE001 - boundary: templates are programs
                data = f"!{str(error) or type(error).__name__}".encode("utf-8", "surrogatepass")
            answers.write(struct.pack(">Q", len(data)) + data)
            answers.flush()


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = to_json
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = strftime_now
    return found


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    """How a template refuses messages."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """The time as templates ask for it."""
    return datetime.now().strftime(format)


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    main()
