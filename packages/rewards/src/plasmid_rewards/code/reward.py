"""Reward that runs the generated program against its tests."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from plasmid import Prompt, RecipeView, Reward, RunContext, Sample, Score
from plasmid.errors import IsolationError, RewardError
from plasmid.utils.work_clock import QueueingExecutor
from plasmid_sandbox import Outcome, Program, Sandbox, SandboxSettings
from pydantic import Field, PrivateAttr

from ..mathematics.boxed_text import strip_thinking
from . import calls
from .cases import CallCase, Case, TextCase, parse_cases, same_text, same_value

SANDBOX_S = 60.0
"""Allowance for starting and stopping a sandbox, in seconds, on top of its own limits."""
BLOCK = re.compile(  # possessive *+ prevents backtracking over thousands of spaces
    r"^[ \t]*```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


class Code(Reward):
    """1.0 if the Python program in the text passes its tests, else 0.0; also 0.0 if there is no program.

    The program is the last fenced block after thinking. The target holds the tests: standard input with expected
    output, function calls with expected return values, or plain assertions. Each program runs in its own sandbox
    (``sandbox``), and results are compared outside of it.
    """

    kind: Literal["code"] = "code"
    reads_target: ClassVar[bool] = True
    opens_early: ClassVar[bool] = True
    timeout_s: float = Field(600.0, gt=0)
    """Time limit for all tests of one sample, in seconds. Tests that have not started by then fail."""
    score: Literal["all", "fraction"] = "all"
    """``all`` gives 1.0 only if all tests pass; ``fraction`` gives the fraction of tests that pass."""
    fenced: bool = True
    """Require a fenced block. If false, a text without one is run as a program as a whole."""
    max_tests: Literal["all"] | int = "all"
    """Maximum number of tests to run per prompt, taken from the start of the list."""
    workers: Literal["auto"] | int = "auto"
    """Maximum number of concurrent sandboxes; ``auto`` is one per core, at most 16."""
    sandbox: SandboxSettings = SandboxSettings()
    """Resource limits and permissions of the programs."""
    _threads: QueueingExecutor | None = PrivateAttr(None)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name in ("max_tests", "workers"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                yield f"{name} must be {type(self).model_fields[name].default!r} or at least 1, got {value}"

    def limit_s(self, num_samples: int) -> float:
        return super().limit_s(num_samples) + self.sandbox.wall_s + SANDBOX_S

    async def open(self, context: RunContext) -> None:
        try:
            await asyncio.wrap_future(self._pool().submit(Sandbox(self.sandbox).check))
        except IsolationError as error:
            raise RewardError(str(error)) from None

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        cases = parse_cases(prompt)
        cases = cases if self.max_tests == "all" else cases[: self.max_tests]
        source = extract_program(sample.text, fenced=self.fenced)
        if source is None:
            return Score(value=0.0, components={"passed": 0.0, "found": 0.0}, error="no program in the text")
        return await asyncio.wrap_future(self._pool().submit(self._judge, source, cases))

    def _pool(self) -> QueueingExecutor:
        if self._threads is None:
            workers = min(os.cpu_count() or 1, 16) if self.workers == "auto" else self.workers
            self._threads = QueueingExecutor(workers, thread_name_prefix="sandbox")
        return self._threads

    def _judge(self, source: str, cases: Sequence[Case]) -> Score:
        passed, error = 0, None
        until = time.monotonic() + self.timeout_s
        called = [case for case in cases if isinstance(case, CallCase)]
        if called:
            passed, error = self._call(source, called)
        for case in cases:
            if isinstance(case, TextCase) and not (error and self.score == "all"):
                late = time.monotonic() > until
                wrong = f"not run within timeout_s = {self.timeout_s:g}" if late else self._print(source, case)
                passed += wrong is None
                error = error or wrong
        fraction = passed / len(cases)
        value = fraction if self.score == "fraction" else float(passed == len(cases))
        return Score(value=value, components={"passed": fraction, "found": 1.0}, error=error)

    def _print(self, source: str, case: TextCase) -> str | None:
        """Return why the program fails one test, or None if it passes."""
        outcome = self._run(Program(source=source, stdin=case.given.encode(errors="surrogatepass")))
        if outcome.error is not None:
            return outcome.error
        return None if same_text(case.expected, outcome.stdout.decode(errors="replace")) else "wrong output"

    def _call(self, source: str, cases: Sequence[CallCase]) -> tuple[int, str | None]:
        """Return how many calls give the expected value, and the reason for the first failure."""
        outcome = self._run(Program(source=calls.SOURCE, stdin=calls.request(cases), files={"solution.py": source}))
        found = calls.parse_answers(outcome.stdout)
        if outcome.error is not None:
            found.pop(len(cases) - 1, None)  # the program ended abnormally, so its last answer does not count
        passed, first = 0, None
        for index, case in enumerate(cases):
            answer = found.get(index, {"error": outcome.error or "no answer"})
            right = "value" in answer and same_value(case.expected, answer["value"])
            passed += right
            if not right and first is None:
                first = f"{case.function}: {str(answer.get('error', 'wrong value'))[:200]}"
        return passed, first

    def _run(self, program: Program) -> Outcome:
        outcome = Sandbox(self.sandbox).run(program)
        if outcome.refused:
            raise RewardError(f"code: cannot create the sandbox: {outcome.error}")
        return outcome


def extract_program(text: str, *, fenced: bool = True) -> str | None:
    """Return the last fenced block after thinking. Without ``fenced``, a text that has no block is the program."""
    text = strip_thinking(text)
    blocks = BLOCK.findall(text)
    if blocks:
        return str(blocks[-1])
    return None if fenced or not text.strip() else text
