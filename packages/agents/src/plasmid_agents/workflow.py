"""The workflow `agent`: passes each prompt to an external agent, which uses the policy over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from plasmid.components import RecipeView, Rollout, Workflow
from plasmid.errors import ConfigError, PluginError
from plasmid.plugins.functions import FunctionName
from plasmid.protocols import RunContext
from plasmid.settings.resume import FormerName
from plasmid.settings.trust import ACTIVE
from plasmid.types import Prompt, Sample
from plasmid.utils.child_environment import make_child_environment
from plasmid.utils.seeds import seed_of
from plasmid_sandbox.confinement import landlock
from plasmid_workflows.execution import RolloutFailed
from plasmid_workflows.tools.formats import Format, family_of, find_parser
from plasmid_workflows.tools.parsing import Parser
from pydantic import Field, PrivateAttr

from .launch import AgentFailed, FunctionHost, Result, ServiceHost, Task, check_command, check_function, run_command
from .session import Session

if TYPE_CHECKING:
    from .server import AgentServer

log = logging.getLogger(__name__)
Reasoning = Literal["auto", "text", "think", "harmony"]


class AgentWorkflow(Workflow):
    """Base class of workflows whose agents access the policy through OpenAI's or Anthropic's API."""

    max_turns: int = Field(50, ge=1)
    """Maximum number of policy turns per rollout. Further requests are refused, and the samples count as truncated."""
    max_tokens: Literal["all"] | int = "all"
    """Maximum number of tokens that the policy may generate per rollout, over all turns. Further requests are refused,
    and the samples count as truncated."""
    timeout_s: float = Field(300.0, gt=0)
    """Time limit for one agent, in seconds. An agent that exceeds it is killed, and its rollout becomes a sample with
    an error."""
    tool_calls: Format = "hermes"
    """Format in which the policy writes tool calls; ``auto`` is that of the model's family."""
    reasoning: Reasoning = "text"
    """How to return the policy's reasoning: as part of the text (``text``), or separately, as ``reasoning_content`` to
    OpenAI's clients and as thinking to Anthropic's. The reasoning is the text before ``</think>`` (``think``), or the
    analysis channel of gpt-oss (``harmony``). ``auto`` is the format that plugins register for the model's family, else
    ``text``."""
    keep_past: bool = False
    """Keep earlier text of the policy, such as reasoning, in later turns even if the chat template drops it. If false,
    the conversation as the template renders it starts another sample."""
    unsupported_options: Annotated[Literal["refuse", "ignore"], FormerName("unfollowed")] = "refuse"
    """How to handle request options that the run does not support (a different temperature, a forced tool, a
    response format, a seed): refuse the request with an error that names the option, or ignore the option."""
    environment: tuple[str, ...] = ()
    """Names of additional environment variables to pass to agents, such as keys for their tools. Agents always get
    ``PATH``, ``HOME``, the locale and similar variables, and the base URL and key of the policy's server."""
    max_file_bytes: int = Field(1 << 30, ge=4096)
    """Maximum size of a file that an agent writes, in bytes. It also limits a program's output, which is written to a
    file."""
    confined: Annotated[bool, ACTIVE] = True
    """Isolate agents from other processes of your user: their memory, their environment, and signals to them
    (Landlock: Linux 5.19 or newer, for signals 6.12). Confined agents cannot use ``sudo`` or mount file systems,
    which bubblewrap does; set this to false for agents that need to."""
    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for agents in containers or on other machines."""
    advertised_host: str = "auto"
    """Host name under which agents reach the server; ``auto`` is `host`, or ``127.0.0.1`` if that is
    ``0.0.0.0``."""

    _server: AgentServer | None = PrivateAttr(None)
    _seed: int = PrivateAttr(0)
    _environment: dict[str, str] = PrivateAttr(default_factory=dict)
    _formats: tuple[Parser, Reasoning] | None = PrivateAttr(None)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if isinstance(self.max_tokens, int) and self.max_tokens < 1:
            yield f"max_tokens must be 'all' or at least 1, got {self.max_tokens}"

    @abstractmethod
    async def start_agents(self, environment: Mapping[str, str]) -> None:
        """Start the processes that the agents of all rollouts share. Raises `PluginError`."""

    @abstractmethod
    async def run_agent(self, task: Task, environment: Mapping[str, str]) -> Result:
        """Run the agent of one rollout. Raises `AgentFailed`."""

    async def end_agents(self) -> None:
        """Stop the processes that `start_agents` started."""

    def confinement(self) -> dict[str, Any]:
        """Return the restrictions of every agent process."""
        return {"max_file_bytes": self.max_file_bytes, "confined": self.confined}

    async def open(self, context: RunContext) -> None:
        """Start the server and the agents. Raises `PluginError`."""
        from .server import AgentServer  # lets settings be read without the web server

        self._formats = self._find_formats(context.model_type)
        if self.confined:
            _warn_without_landlock()
        missing = [name for name in self.environment if name not in os.environ]
        if missing:
            raise PluginError(f"workflow.environment: {missing[0]} is not set in the environment of the run")
        self._seed, self._environment = context.seed, make_child_environment(self.environment)
        await self.start_agents(self._environment)
        loopback = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        advertised = loopback if self.advertised_host == "auto" else self.advertised_host
        self._server = AgentServer(host=self.host, advertised=advertised)
        try:
            await self._server.start()
        except OSError as error:
            raise PluginError(f"workflow.host: cannot listen on {self.host}: {error.strerror or error}") from None

    def formats(self) -> tuple[Parser, Reasoning]:
        """Return the parser of tool calls and the format of reasoning."""
        return self._formats or self._find_formats("")

    def _find_formats(self, model_type: str) -> tuple[Parser, Reasoning]:
        parser = find_parser("workflow.tool_calls", self.tool_calls, model_type)
        if self.reasoning != "auto":
            return parser, self.reasoning
        found = family_of(model_type).reasoning or "text"
        if found not in get_args(Reasoning):
            raise ConfigError(
                f"workflow.reasoning: model type {model_type!r} has the format {found!r}, which does not exist; set it "
                f"to one of {', '.join(get_args(Reasoning)[1:])}"
            )
        return parser, found  # type: ignore[return-value]

    async def close(self) -> None:
        """Stop the server and all agents."""
        await self.end_agents()
        if self._server is not None:
            await self._server.close()

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        assert self._server is not None, "call open first"
        session = Session(rollout, self)
        error: str | None = None
        result = Result()
        with self._server.serve_session(session) as (url, key):
            task = Task.of(prompt, url=url, key=key, seed=seed_of(self._seed, rollout.id))
            try:
                result = await asyncio.wait_for(self.run_agent(task, self._environment), self.timeout_s)
            except TimeoutError:
                error = f"the agent took longer than workflow.timeout_s = {self.timeout_s:g}"
            except AgentFailed as failure:
                # failures after the budget ran out are not the agent's fault
                error = None if session.is_spent else f"the agent failed: {failure}"
            finally:
                await session.close()
        if session.error is not None:
            raise RolloutFailed(session.error)
        if error is not None:
            return session.make_failed_samples(prompt, error)
        if not session.num_turns:
            raise RolloutFailed("the agent sent no request to the policy; check that it uses the given base URL")
        return session.samples(prompt, answer=result.answer, metadata=result.metadata)


class Agent(AgentWorkflow):
    """One agent per rollout, a function or a program, that accesses the policy through OpenAI's or Anthropic's API."""

    kind: Literal["agent"] = "agent"
    function: str = ""
    """Agent as a Python function, sync or async: ``module:function`` or ``file.py:function``."""
    command: tuple[str, ...] = ()
    """Agent as a program with its arguments. The prompt comes on standard input."""
    service: tuple[str, ...] = ()
    """Agent as a program that is started once per rollout worker and serves all its rollouts. Tasks come as lines of
    JSON on standard input, results go to standard output in the same way."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Time limit for a service to become ready, in seconds."""

    _functions: FunctionHost | None = PrivateAttr(None)
    _service: ServiceHost | None = PrivateAttr(None)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if sum(map(bool, (self.function, self.command, self.service))) != 1:
            yield (
                'set one of function = "file.py:name", command = ["program", "argument"] or '
                'service = ["program", "argument"]'
            )
        for setting, command in (("command", self.command), ("service", self.service)):
            try:
                if command:
                    check_command(command)
            except ValueError as error:
                yield f"{setting}: {error}"
        try:
            if self.function:
                check_function(FunctionName.parse(self.function))
        except ValueError as error:
            yield f"function: {error}"

    async def start_agents(self, environment: Mapping[str, str]) -> None:
        if self.function:
            name = FunctionName.parse(self.function)
            self._functions = FunctionHost(name, environment, **self.confinement())
            await self._functions.start()
        elif self.service:
            self._service = ServiceHost(
                self.service,
                environment,
                start_timeout_s=self.start_timeout_s,
                **self.confinement(),
            )
            await self._service.start()

    async def run_agent(self, task: Task, environment: Mapping[str, str]) -> Result:
        if self._functions is not None:
            return await self._functions.run(task)
        if self._service is not None:
            return await self._service.run(task)
        return await run_command(self.command, task, environment, **self.confinement())

    async def end_agents(self) -> None:
        if self._functions is not None:
            await asyncio.to_thread(self._functions.close)
        if self._service is not None:
            await self._service.close()


def _warn_without_landlock() -> None:
    """Log a warning if this kernel cannot isolate agents from other processes of the user."""
    found = landlock.version()
    open_ways = ["read the memory and environment of", "signal"] if found < landlock.DOMAIN else ["signal"]
    if found < landlock.SIGNALS:
        log.warning(
            "workflow.confined: this kernel has Landlock of version %d, so agents can %s other processes of your user; "
            "run agents that you do not trust in a container",
            found,
            " and ".join(open_ways),
        )
