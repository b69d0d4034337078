"""Subprocess that renders Jinja templates, which are untrusted programs, with limited memory.

It is started as a script, so that it imports only Jinja. A request on standard input is a pickle; an answer on standard
output is ``=`` (text) or ``!`` (error) followed by a text. Both are preceded by their length in eight bytes.
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

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2 << 30
"""Maximum address space of the process."""


class Generation(Extension):
    """``{% generation %}``, which some templates use to mark the assistant's messages."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block and render its body unchanged."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_within"), [], [], body).set_lineno(line)

    def _within(self, caller: Macro) -> str:
        return str(caller())


def main() -> None:
    """Serve requests until standard input is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sources: dict[int, tuple[str, bool]] = {}
    templates: dict[int, Template] = {}
    with os.fdopen(0, "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        while head := requests.read(8):
            number, new, arguments = pickle.loads(requests.read(struct.unpack(">Q", head)[0]))
            try:
                if new is not None:
                    sources[number] = new
                if number not in templates:
                    source, strict = sources[number]
                    templates[number] = environment(strict=strict).from_string(source)
                answer = "=" + templates[number].render(**arguments)
                data = answer.encode("utf-8", "surrogatepass")
            except Exception as error:  # noqa: BLE001 - boundary: templates are programs
                data = f"!{str(error) or type(error).__name__}".encode("utf-8", "surrogatepass")
            answers.write(struct.pack(">Q", len(data)) + data)
            answers.flush()


def environment(*, strict: bool = False) -> ImmutableSandboxedEnvironment:
    """Create the Jinja environment of transformers' chat templates; ``strict`` rejects undefined variables."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=StrictUndefined if strict else Undefined,
    )
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
    """Return JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    """Let a template reject messages."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the current time in the template's format."""
    return datetime.now().strftime(format)


if __name__ == "__main__":
    sys.setrecursionlimit(1000)
    main()
