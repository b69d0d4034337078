"""Python as a tool, in the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from plasmid.components.interaction import Tool, ToolError
from plasmid_sandbox import Program, Sandbox, SandboxSettings


class PythonTool(Tool):
    """Runs Python programs, each in a sandbox of its own, and gives back what they print."""

    kind: Literal["python"] = "python"
    isolated: ClassVar[bool] = False
    sandbox: SandboxSettings = SandboxSettings()
    """What programs may use."""

    def warm(self) -> None:
        Sandbox(self.sandbox).check()

    def implementation(self) -> Callable[..., Any]:
        return self.python

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: a whole program; nothing is kept from earlier calls
        """
        outcome = Sandbox(self.sandbox).run(Program(source=code))
        printed = outcome.stdout.decode(errors="replace")
        if outcome.error is not None:
            raise ToolError(f"{outcome.error}\n{printed}".strip())
        return printed
