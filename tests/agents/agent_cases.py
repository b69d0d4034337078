"""A scripted policy behind the real server, and conversations with their expected tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from plasmid.testing.rewards import make_prompt
from plasmid.types import Completion, Ints, SamplingParams, StopReason, VersionSpan
from plasmid_agents.server import AgentServer
from plasmid_agents.session import Session
from plasmid_agents.workflow import Agent
from plasmid_models.testing import SPECIAL, make_tiny_model, make_tiny_tokenizer
from plasmid_workflows.execution import Execution

END = 2
"""Token that ends a turn."""
TEMPLATE = (
    "{% if tools %}{{ '<system>tools:' + (tools | tojson) + '<eos>' }}{% endif %}"
    "{% for m in messages %}{{ '<' + ('user' if m['role'] == 'tool' else m['role']) + '>' }}"
    "{% if m['role'] == 'tool' %}{{ 'result:' }}{% endif %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FORGETS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('/think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}",
)
"""Chat template that omits reasoning from earlier turns, as the templates of reasoning models do."""
WEATHER = {
    "name": "weather",
    "description": "the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


CHARACTERS = sorted(set(string.printable))


def make_chat_tokenizer(path: Path) -> Path:
    """Create a character tokenizer for ASCII, with the template above."""
    make_tiny_tokenizer(path)
    file = path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["vocab"] = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    file.write_text(json.dumps(data))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


def make_chat_model(path: Path, **settings) -> Path:
    """Create a tiny model whose vocabulary is all of ASCII."""
    sizes = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "max_position_embeddings": 1024, "num_layers": 1}
    make_tiny_model(path, **{**sizes, **settings})
    return make_chat_tokenizer(path)


class ScriptedEngine:
    """Implements `EngineClient`: chooses answers by the end of the conversation, or takes them from a list in order."""

    def __init__(self, tokenizer, script: Sequence[str] | Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.requests = []
        self.aborted: list[str] = []
        self.left: list[str] = []
        self.version = 0
        self.cut_at: list[int] = []
        """Lengths at which the next requests are aborted; each abort is followed by a new version."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.error: str | None = None
        self._whole: dict[str, Ints] = {}

    async def generate(self, request) -> Completion:
        self.requests.append(request)
        await self.hold.wait()
        if self.error is not None:
            return self._completion(request, np.zeros(0, np.int32), StopReason.ERROR)
        if request.id not in self._whole:
            self._whole[request.id] = self._answer(request)
        ids = self._whole[request.id][request.num_generated :]
        room = request.sampling.max_new_tokens - request.num_generated
        if self.cut_at:
            part = self._completion(request, ids[: self.cut_at.pop(0)], StopReason.ABORT)
            self.version += 1
            return part
        stop = StopReason.LENGTH if len(ids) > room else StopReason.STOP
        return self._completion(request, ids[:room], stop)

    def _answer(self, request) -> Ints:
        if callable(self._script):
            text = self._script(self._tokenizer.decode(request.token_ids))
        else:
            text = self._script[len(self._whole)]
        stops = [text.find(word) + len(word) for word in request.sampling.stop if word in text]
        ids = self._tokenizer.encode(text[: min(stops)] if stops else text)
        return ids if stops else np.append(ids, END).astype(np.int32)

    def _completion(self, request, ids: Ints, stop: StopReason) -> Completion:
        spans = (VersionSpan(version=self.version, start=0, end=len(ids)),) if len(ids) else ()
        # a log-probability that tells which token of which request it belongs to
        logprobs = -(1.0 + np.arange(len(ids)) + request.num_generated + len(self._whole) / 100)
        return Completion(
            request_id=request.id,
            token_ids=np.asarray(ids, np.int32),
            logprobs=logprobs.astype(np.float32),
            versions=spans,
            stop_reason=stop,
            error=self.error if stop is StopReason.ERROR else None,
        )

    async def abort(self, request_ids) -> None:
        self.aborted += request_ids

    async def end_sessions(self, session_ids) -> None:
        self.left += session_ids


def make_settings(**changes) -> Agent:
    """Create the settings of an agent workflow."""
    return Agent(**{"command": ("true",), "max_turns": 20, **changes})


def make_rollout(tokenizer, script, *, name="5/0", sampling=None, max_length=1024) -> Execution:
    """Create a rollout with a scripted policy."""
    engine = script if hasattr(script, "generate") else ScriptedEngine(tokenizer, script)
    return Execution(
        id=name,
        group_id=5,
        sampling=SamplingParams(**{"max_new_tokens": 200, **(sampling or {})}),
        client=engine,
        codec=tokenizer,
        seed=1,
        deadline_s=30.0,
        max_length=max_length,
    )


class Served:
    """A session with its own server."""

    def __init__(self, rollout: Execution, settings: Agent) -> None:
        self.rollout, self.engine = rollout, rollout.client
        self.session = Session(rollout, settings)
        self.url = self.key = ""

    def samples(self, *, answer=None):
        """End the session and return its samples."""
        return self.session.samples(make_prompt("unused"), answer=answer, metadata={})


@contextlib.asynccontextmanager
async def served(tokenizer, script, *, settings=None, keep_alive_s=5.0, **rollout):
    """Start a server with one session."""
    server = AgentServer(host="127.0.0.1", advertised="127.0.0.1", keep_alive_s=keep_alive_s)
    await server.start()
    one = Served(make_rollout(tokenizer, script, **rollout), settings or make_settings())
    try:
        with server.serve_session(one.session) as (one.url, one.key):
            yield one
    finally:
        await one.session.close()
        await server.close()


def shown(tokenizer, sample) -> list[tuple[bool, str]]:
    """Split the text of a sample into runs: whether they are trained on, and their text with special tokens."""
    runs: list[tuple[bool, str]] = []
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1), len(sample.token_ids)]
    for start, end in itertools.pairwise(edges):
        text = tokenizer.decode(sample.token_ids[start:end], keep_special=True)
        runs.append((bool(sample.loss_mask[start]), text))
    return runs
