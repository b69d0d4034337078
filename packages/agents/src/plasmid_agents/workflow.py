"""The workflow `agent`: each prompt goes to a program that knows nothing of training and asks the policy by HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from plasmid.components import Rollout, Workflow
from plasmid.errors import PluginError
from plasmid.plugins.functions import FunctionName
from plasmid.protocols import RunContext
from plasmid.types import Prompt, Sample
from plasmid.utils.child_environment import child_environment
from plasmid.utils.seeds import seed_of
from plasmid_workflows.execution import RolloutFailed
from plasmid_workflows.tools.tool_calls import PARSERS
from pydantic import Field, PrivateAttr

from .launch import AgentFailed, FunctionHost, Result, Task, check_command, check_function, run_command
from .session import Rules, Session

if TYPE_CHECKING:
    from .server import AgentServer

Format = Literal["hermes", "llama3", "mistral", "python", "qwen-xml"]


class Agent(Workflow):
    """An agent per rollout, a function or a program, that reaches the policy through OpenAI's or Anthropic's API."""

    kind: Literal["agent"] = "agent"
    function: str = ""
    """The agent as a Python function, sync or async: ``module:function`` or ``file.py:function``."""
    command: tuple[str, ...] = ()
    """The agent as a program with its arguments. The prompt comes on standard input."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy in one rollout; then requests are refused, and the samples count as cut off."""
    max_tokens: Literal["all"] | int = "all"
    """Tokens that the policy may draw in one rollout, over all turns; then as with max_turns."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time for one agent; past it the agent is killed, and its rollout becomes a sample with an error."""
    tool_calls: Format = "hermes"
    """How the policy writes calls of tools."""
    reasoning: Literal["text", "think"] = "text"
    """What the policy writes before ``</think>`` is part of its text, or is told apart from it: as
    ``reasoning_content`` to OpenAI's clients, as thinking to Anthropic's."""
    keep_past: bool = False
    """Go on from what the policy drew where the chat template would now leave out words of it, such as earlier
    reasoning. Otherwise what the template shows begins another sample."""
    unfollowed: Literal["refuse", "ignore"] = "refuse"
    """What becomes of requests that ask for what the run does not follow (another temperature, a forced tool, a
    response format, a seed): an error that names it, or nothing."""
    environment: tuple[str, ...] = ()
    """Names of further environment variables of the run that agents get, such as keys for their tools. Without it they
    get ``PATH``, ``HOME``, the locale and the like, and those of the policy's server."""
    max_file_bytes: int = Field(1 << 30, ge=4096)
    """Maximum size of a file that an agent writes, in bytes. The output of a program is such a file."""
    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for agents in containers or on other machines."""
    advertised_host: str = "auto"
    """Name by which agents reach the server; ``auto`` is the address it listens on, or the loopback for ``0.0.0.0``."""

    _server: AgentServer | None = PrivateAttr(None)
    _functions: FunctionHost | None = PrivateAttr(None)
    _seed: int = PrivateAttr(0)
    _environment: dict[str, str] = PrivateAttr(default_factory=dict)

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if bool(self.function) == bool(self.command):
            yield 'needs either function = "file.py:name" or command = ["program", "argument"], one of them'
        if isinstance(self.max_tokens, int) and self.max_tokens < 1:
            yield f"max_tokens must be 'all' or at least 1, got {self.max_tokens}"
        try:
            if self.function:
                check_function(FunctionName.parse(self.function))
        except ValueError as error:
            yield f"function: {error}"
        try:
            if self.command:
                check_command(self.command)
        except ValueError as error:
            yield f"command: {error}"

    async def open(self, context: RunContext) -> None:
        """Start the server, and import the function. Raises `PluginError`."""
        from .server import AgentServer  # settings are read without the web server

        missing = [name for name in self.environment if name not in os.environ]
        if missing:
            raise PluginError(f"workflow.environment: {missing[0]} is not set where the run was started; set it")
        self._seed, self._environment = context.seed, child_environment(self.environment)
        if self.function:
            name = FunctionName.parse(self.function)
            self._functions = FunctionHost(name, self._environment, max_file_bytes=self.max_file_bytes)
            await self._functions.start()
        loopback = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        advertised = loopback if self.advertised_host == "auto" else self.advertised_host
        self._server = AgentServer(host=self.host, advertised=advertised)
        try:
            await self._server.start()
        except OSError as error:
            raise PluginError(f"workflow.host: cannot listen on {self.host}: {error.strerror or error}") from None

    async def close(self) -> None:
        """Stop the server and all agents."""
        if self._functions is not None:
            await asyncio.to_thread(self._functions.close)
        if self._server is not None:
            await self._server.close()

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        assert self._server is not None, "open comes first"
        session = Session(rollout, self._rules())
        error: str | None = None
        result = Result()
        with self._server.serving(session) as (url, key):
            task = Task.of(prompt, url=url, key=key, seed=seed_of(self._seed, rollout.id))
            try:
                result = await asyncio.wait_for(self._agent(task), self.timeout_s)
            except TimeoutError:
                error = f"the agent took longer than workflow.timeout_s = {self.timeout_s:g}"
            except AgentFailed as failure:
                # an agent cannot be blamed for what it does without the policy
                error = None if session.is_spent else f"the agent failed: {failure}"
            finally:
                await session.close()
        if session.error is not None:
            raise RolloutFailed(session.error)
        if error is not None:
            return session.failed(prompt, error)
        if not session.num_turns:
            raise RolloutFailed("the agent never asked the policy; check that it uses the base URL it was started with")
        return session.samples(prompt, answer=result.answer, metadata=result.metadata)

    async def _agent(self, task: Task) -> Result:
        if self._functions is not None:
            return await self._functions.run(task)
        return await run_command(self.command, task, self._environment, max_file_bytes=self.max_file_bytes)

    def _rules(self) -> Rules:
        return Rules(
            max_turns=self.max_turns,
            max_tokens=None if self.max_tokens == "all" else self.max_tokens,
            parser=PARSERS[self.tool_calls],
            keep_past=self.keep_past,
            thinks=self.reasoning == "think",
            unfollowed=self.unfollowed,
        )
