"""Script that runs environments of other libraries: PYTHON program.py verifiers|openenv SETTINGS [--tasks]

It runs in the library's Python environment, where Plasmid is not installed, so it must not import Plasmid. With
``--tasks`` it prints the tasks as rows of a data file. Otherwise it serves rollouts over JSON lines (`launch.service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any, TextIO

GENERATION = 256
"""Number of rollouts that share a serving context of verifiers, which keeps a client per endpoint until it is
closed."""


class Verifiers:
    """A taskset of verifiers and its agents, configured by ``[env]`` in verifiers' own format."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._vf = importlib.import_module("verifiers.v1")
        self._slot = importlib.import_module("verifiers.v1.env").RunSlot
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._env_config = loaders.resolve_env_config(settings)
        self._tasks = list(self._new_env().taskset)
        self._serving: _Serving | None = None
        os.environ["PLASMID_SESSION_KEY"] = "unused"  # the URL identifies the session, but verifiers requires a key

    def _new_env(self) -> Any:
        return self._vf.load_environment(self._env_config)

    def rows(self) -> Iterator[dict[str, Any]]:
        for index, task in enumerate(self._tasks):
            system, given = task.data.system_prompt, task.data.prompt
            before = [{"role": "system", "content": system}] if system else []
            if not isinstance(given, str):
                given = task.data.prompt_text
            yield {"prompt": [*before, {"role": "user", "content": given}], "task": index}

    async def run(self, task: dict[str, Any]) -> dict[str, Any]:
        number = task["metadata"].get("task")
        if not isinstance(number, int) or not 0 <= number < len(self._tasks):
            raise ValueError(f"column 'task' of the row must be 0 to {len(self._tasks) - 1}, got {number!r}")
        if self._serving is None or self._serving.count >= GENERATION:
            self._serving = _Serving(self._new_env())
        async with self._serving.use() as env:
            episode = await env.run_slot(self._slot(self._tasks[number]), self._context(task))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        rewards = [float(trace.reward) for trace in traces]
        metrics: dict[str, float] = {}
        for trace in traces:
            metrics |= {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
            metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {"answer": traces[-1].last_reply, "reward": sum(rewards) / len(rewards), "metrics": metrics}

    def _context(self, task: dict[str, Any]) -> Any:
        client = self._vf.EvalClientConfig(base_url=task["base_url"], api_key_var="PLASMID_SESSION_KEY")
        return self._vf.ModelContext(client=client, model="policy", sampling=self._vf.SamplingConfig())


class _Serving:
    """Serving context of verifiers; closed once it has been replaced and its last rollout has ended."""

    def __init__(self, env: Any) -> None:
        self.count = self._users = 0
        self._env, self._lock = env, asyncio.Lock()
        self._stack: contextlib.AsyncExitStack | None = None

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Any]:
        self.count, self._users = self.count + 1, self._users + 1
        try:
            async with self._lock:
                if self._stack is None:
                    self._stack = contextlib.AsyncExitStack()
                    await self._stack.enter_async_context(self._env.serving())
            yield self._env
        finally:
            self._users -= 1
            if self._users == 0 and self.count >= GENERATION and self._stack is not None:
                await self._stack.aclose()


class OpenEnv:
    """A server of OpenEnv: the policy's reply is an action, and the policy reads the resulting observation."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        self._url = settings["url"]
        self._action, self._observation = settings.get("action", "message"), settings.get("observation", "")
        self._constant = settings.get("constant", {})
        self._max_steps = settings.get("max_steps", 50)

    def rows(self) -> Iterator[dict[str, Any]]:
        raise ValueError("an OpenEnv server lists no tasks; write the rows yourself")

    async def run(self, task: dict[str, Any]) -> dict[str, Any]:
        messages = list(task["messages"])
        rewards, reply, done = list[float](), "", False
        async with self._client(base_url=self._url) as client:
            result = await client.reset(seed=task["seed"] % (1 << 31))
            while not (done := bool(result.done)) and len(rewards) < self._max_steps:
                messages.append({"role": "user", "content": self._text(result.observation)})
                reply = await asyncio.to_thread(_send, task, messages)
                messages.append({"role": "assistant", "content": reply})
                result = await client.step(self._parse(reply))
                rewards.append(float(result.reward or 0.0))
        metrics = {"steps": len(rewards), "done": float(done)}
        return {"answer": reply, "reward": sum(rewards), "turn_rewards": rewards, "metrics": metrics}

    def _text(self, observation: Any) -> str:
        if self._observation:
            observation = observation.get(self._observation, "")
        return observation if isinstance(observation, str) else json.dumps(observation)

    def _parse(self, reply: str) -> dict[str, Any]:
        if self._action:
            return {**self._constant, self._action: reply}
        action = json.loads(reply)
        if not isinstance(action, dict):
            raise TypeError("the policy's action is not a JSON object")
        return {**self._constant, **action}


def _send(task: dict[str, Any], messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {task['api_key']}"}
    request = urllib.request.Request(f"{task['base_url']}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


LIBRARIES: dict[str, Any] = {"verifiers": Verifiers, "openenv": OpenEnv}


async def serve(library: Verifiers | OpenEnv, output: TextIO) -> None:
    """Read tasks and cancellations, and run all tasks concurrently."""
    running: dict[int, asyncio.Task[None]] = {}

    def write(line: dict[str, Any]) -> None:
        output.write(json.dumps(line, allow_nan=False) + "\n")
        output.flush()

    async def work(number: int, task: dict[str, Any]) -> None:
        try:
            write({"id": number, "result": await library.run(task)})
        except Exception as error:  # noqa: BLE001 - boundary: only this rollout fails
            write({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            running.pop(number, None)

    write({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        message = json.loads(line)
        if "cancel" in message:
            if (found := running.get(message["cancel"])) is not None:
                found.cancel()
        else:
            running[message["id"]] = asyncio.create_task(work(message["id"], message["task"]))


def main() -> None:
    """Run the program."""
    # redirect output of libraries to standard error
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    sys.path.insert(0, os.getcwd())  # allow imports of the user's tasksets
    # programs installed with the library, such as uv
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    library: Verifiers | OpenEnv = LIBRARIES[name](settings)
    if "--tasks" in sys.argv:
        for row in library.rows():
            output.write(json.dumps(row) + "\n")
        output.flush()
    else:
        asyncio.run(serve(library, output))
    os._exit(0)  # do not wait for threads that still expect a reply


if __name__ == "__main__":
    main()
