"""Function calls that run inside the sandbox. Expected values stay outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .cases import CallCase

SOURCE = """
import io, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
calls = json.load(sys.stdin)
sys.stdin = io.StringIO()
sys.setrecursionlimit(20000)
space = {"__name__": "solution"}
with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
    exec(compile(file.read(), "solution.py", "exec"), space)
for index, (name, arguments) in enumerate(calls):
    try:
        function = space[name] if name in space else getattr(space["Solution"](), name)
        line = {"index": index, "value": function(*arguments)}
        text = json.dumps(line)
    except Exception as error:
        text = json.dumps({"index": index, "error": f"{type(error).__name__}: {error}"[:200]})
    print(text, file=answers, flush=True)
"""
"""Runs in the sandbox as main.py, next to the program under test."""


def request(cases: Sequence[CallCase]) -> bytes:
    """Serialize the calls for standard input."""
    return json.dumps([[case.function, case.arguments] for case in cases]).encode()


def parse_answers(output: bytes) -> dict[int, Any]:
    """Map the index of a call to ``{"value": ...}`` or ``{"error": ...}``. Other lines are ignored."""
    found: dict[int, Any] = {}
    for line in output.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and isinstance(answer.get("index"), int):
            found.setdefault(answer["index"], answer)
    return found
