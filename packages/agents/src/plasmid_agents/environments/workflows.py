"""The workflows `verifiers` and `openenv`: environments of these libraries, in a separate Python environment."""

from __future__ import annotations

import json
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from plasmid.components import RecipeView
from plasmid.errors import PluginError
from plasmid.utils.child_environment import make_child_environment
from pydantic import Field, PrivateAttr

from ..launch import Result, ServiceHost, Task
from ..workflow import AgentWorkflow

PROGRAM = Path(__file__).with_name("program.py")


class ForeignEnvironment(AgentWorkflow):
    """Base class of workflows that run an environment of another library."""

    python: str
    """Python interpreter of the environment in which the library is installed: ``.venvs/verifiers/bin/python``."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Time limit for importing the library and loading the environment, in seconds."""

    _service: ServiceHost | None = PrivateAttr(None)

    @abstractmethod
    def arguments(self) -> list[str]:
        """Return the library's name and the settings, as arguments of `program.py`."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if shutil.which(self.python) is None:
            yield (
                f"python: no such program: {self.python}; install the library into a separate environment and set "
                "its interpreter"
            )

    async def start_agents(self, environment: Mapping[str, str]) -> None:
        self._service = ServiceHost(
            self._command(),
            {**environment, "PYTHONUNBUFFERED": "1"},
            start_timeout_s=self.start_timeout_s,
            **self.confinement(),
        )
        await self._service.start()

    async def run_agent(self, task: Task, environment: Mapping[str, str]) -> Result:
        assert self._service is not None, "call open first"
        return await self._service.run(task)

    async def end_agents(self) -> None:
        if self._service is not None:
            await self._service.close()

    def list_tasks(self) -> str:
        """Return the environment's tasks as rows of a data file. Raises `PluginError`."""
        done = subprocess.run(
            [*self._command(), "--tasks"], env=make_child_environment(self.environment), capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise PluginError(f"workflow: {self.python}: {lines[-1] if lines else 'no output'}")
        return done.stdout

    def _command(self) -> list[str]:
        # programs that the library starts are next to the interpreter
        return [self.python, str(PROGRAM), *self.arguments()]


class Verifiers(ForeignEnvironment):
    """A taskset of the library verifiers (0.4 or newer) with its harness, tools and rewards."""

    kind: Literal["verifiers"] = "verifiers"
    env: dict[str, Any]
    """Environment in the format of verifiers' table ``[env]``: ``{taskset = {id = "..."}, agent = {...}}``."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        taskset = self.env.get("taskset")
        if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
            yield 'env must contain a taskset: env = { taskset = { id = "gsm8k" } }'

    def arguments(self) -> list[str]:
        return ["verifiers", json.dumps(self.env)]


class OpenEnv(ForeignEnvironment):
    """A server of OpenEnv: each reply of the policy is an action, and the policy reads the resulting observation."""

    kind: Literal["openenv"] = "openenv"
    url: str
    """URL of the server: ``http://host:port``."""
    action: str = "message"
    """Field of the action that holds the policy's reply; empty if the reply is the action itself, as JSON."""
    constant: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of every action."""
    observation: str = ""
    """Field of the observation shown to the policy; empty for the whole observation, as JSON."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            yield f"url must begin with http://, https://, ws:// or wss://, got {self.url!r}"

    def arguments(self) -> list[str]:
        settings = {
            "url": self.url,
            "action": self.action,
            "constant": self.constant,
            "observation": self.observation,
            "max_steps": self.max_turns,
        }
        return ["openenv", json.dumps(settings)]
