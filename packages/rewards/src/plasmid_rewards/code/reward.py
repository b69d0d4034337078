"""Does the program in the text pass its tests?"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import ClassVar, Literal

from plasmid import Prompt, Reward, RunContext, Sample, Score
from plasmid.errors import IsolationError, RewardError
from plasmid.utils.work_clock import QueueingExecutor
from plasmid_sandbox import Outcome, Program, Sandbox, SandboxSettings
from pydantic import Field, PrivateAttr

from ..mathematics.boxed_text import after_thinking
from . import calls
from .cases import CallCase, Case, TextCase, cases_of, same_text, same_value

SANDBOX_S = 60.0
"""Time beyond its limits in which a sandbox is made and has ended."""
BLOCK = re.compile(  # *+ leaves one way only to match spaces, of which a policy may write thousands
    r"^[ \t]*```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


class Code(Reward):
    """1.0 if the Python program in the text passes its tests, else 0.0, also if there is no program.

    The program is the last fenced block after thinking. The target holds the tests: texts for standard input and what
    must be printed, calls of functions and what they must return, or plain assertions. Each program runs in a sandbox
    of its own (``sandbox``), and results are compared outside of it.
    """

    kind: Literal["code"] = "code"
    reads_target: ClassVar[bool] = True
    timeout_s: float = Field(600.0, gt=0)
    """Longest time for the tests of one sample, in seconds; those that have not begun by then fail."""
    score: Literal["all", "fraction"] = "all"
    """Whether all tests must pass, or each one that does counts its part."""
    fenced: bool = True
    """Ask for a fenced block; otherwise a text without one is taken for a program as a whole."""
    max_tests: Literal["all"] | int = "all"
    """Tests of a prompt to run, the first ones."""
    workers: Literal["auto"] | int = "auto"
    """Sandboxes at one time; ``auto`` is one for each core, at most 16."""
    sandbox: SandboxSettings = SandboxSettings()
    """What programs may use."""
    _threads: QueueingExecutor | None = PrivateAttr(None)

    def model_post_init(self, context: object, /) -> None:
        for name in ("max_tests", "workers"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be {type(self).model_fields[name].default!r} or at least 1, got {value}")
        super().model_post_init(context)

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
        cases = cases_of(prompt)
        cases = cases if self.max_tests == "all" else cases[: self.max_tests]
        source = program_in(sample.text, fenced=self.fenced)
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
                wrong = f"no time left of timeout_s = {self.timeout_s:g}" if late else self._print(source, case)
                passed += wrong is None
                error = error or wrong
        fraction = passed / len(cases)
        value = fraction if self.score == "fraction" else float(passed == len(cases))
        return Score(value=value, components={"passed": fraction, "found": 1.0}, error=error)

    def _print(self, source: str, case: TextCase) -> str | None:
        """Why the program fails one test; None if it passes."""
        outcome = self._run(Program(source=source, stdin=case.given.encode(errors="surrogatepass")))
        if outcome.error is not None:
            return outcome.error
        return None if same_text(case.expected, outcome.stdout.decode(errors="replace")) else "wrong output"

    def _call(self, source: str, cases: Sequence[CallCase]) -> tuple[int, str | None]:
        """How many calls return what they must, and why the first of the others does not."""
        outcome = self._run(Program(source=calls.SOURCE, stdin=calls.request(cases), files={"solution.py": source}))
        found = calls.answers(outcome.stdout)
        if outcome.error is not None:
            found.pop(len(cases) - 1, None)  # whatever was answered, the program did not end as it must
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
            raise RewardError(f"code: the sandbox cannot be made: {outcome.error}")
        return outcome


def program_in(text: str, *, fenced: bool = True) -> str | None:
    """The last fenced block of a text, behind its thinking; without ``fenced``, the text if it has no block."""
    text = after_thinking(text)
    blocks = BLOCK.findall(text)
    if blocks:
        return str(blocks[-1])
    return None if fenced or not text.strip() else text
