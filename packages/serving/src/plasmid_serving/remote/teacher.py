"""Client of a teacher that is an external server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from plasmid.components import kind_of
from plasmid.config.run import ModelConfig, RunConfig
from plasmid.errors import ConfigError, EngineError, one_line
from plasmid.types import Floats, Ints
from plasmid.types.top_tokens import TopChoice, TopTokens
from plasmid.utils.json_client import ServerFailure
from plasmid_models.source import teacher_top
from plasmid_models.tokenization.tokenizer import Tokenizer

from .apis import ServedModel, ServerApi, check_logprobs, check_top
from .client import INVALID, MIN_RESPONSE_LIMIT, ServerConnection
from .discovery import ANSWER_S, find_server
from .settings import NO_TOP, ServerTeacher

log = logging.getLogger(__name__)
T = TypeVar("T")
BYTES_PER_VALUE = 256
"""Generous limit on the response size per log-probability, in bytes."""
PROBE = "The 12 foxes: x_1 = 0.5;\n\tdef f(a): return {a}\n\u00c0 \u00e9 \u4f60\u597d \u043c\u0438\u0440 \U0001f642"
"""Text that the server must encode as the policy's tokenizer does, followed by all special tokens."""


class TeacherServer:
    """Implements `TeacherClient`. Picklable: connections are opened where it is used."""

    def __init__(
        self, settings: ServerTeacher, model: ModelConfig, *, served: str, api: ServerApi, top: TopChoice | None
    ) -> None:
        """``served`` is the model's name in requests; ``top`` are the top tokens that are requested, if any."""
        self._settings, self._model, self._api, self._top = settings, model, api, top
        self._served = ServedModel(served, model, prompt="tokens")
        self._json = ServerConnection(settings)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(TeacherServer, served=self._served.name, api=self._api, top=self._top)
        return make, (self._settings, self._model)

    async def score(self, token_ids: Ints, *, first: int, deadline_s: float) -> Floats:
        payload = self._api.scoring_payload(token_ids, first=first, model=self._served)

        def read(answer: Any) -> Floats:
            values = self._api.token_logprobs(answer, token_ids, first=first)
            return check_logprobs(values, len(token_ids) - first)

        return await self._send(payload, read, num_values=len(token_ids), deadline_s=deadline_s)

    async def score_top(self, token_ids: Ints, *, first: int, deadline_s: float) -> TopTokens:
        top = self._top
        assert top is not None, "only called for algorithms that need top tokens"
        payload = self._api.scoring_payload(token_ids, first=first, model=self._served, top_k=top.count)

        def read(answer: Any) -> TopTokens:
            rows = self._api.top_logprobs(answer, token_ids, first=first)
            return check_top(rows, len(token_ids) - first, choice=top)

        num_values = len(token_ids) * (2 + top.count)
        return await self._send(payload, read, num_values=num_values, deadline_s=deadline_s)

    async def _send(
        self, payload: dict[str, Any], read: Callable[[Any], T], *, num_values: int, deadline_s: float
    ) -> T:
        """Send a request and convert the response, which has at most ``num_values`` values. Raises `EngineError`."""
        most = MIN_RESPONSE_LIMIT + num_values * BYTES_PER_VALUE
        try:
            work = self._json.post(payload, path=self._api.path, max_bytes=most)
            return read(await asyncio.wait_for(work, deadline_s))
        except TimeoutError:
            raise EngineError(f"teacher: no answer from {self._json.shown} within {deadline_s:g} s") from None
        except (ServerFailure, ConfigError) as error:  # a key that is missing on this machine is a ConfigError
            raise EngineError(f"teacher: {error}") from None
        except INVALID as error:
            reason = f"not a valid answer: {one_line(error)}"
            raise EngineError(f"teacher: {self._json.describe_error(self._api.path, reason)}") from None

    async def disconnect(self) -> None:
        """Close the connections of this event loop."""
        await self._json.close()

    async def check(self, *, deadline_s: float) -> None:
        """Compare the server's tokenizer with the policy's, and request log-probabilities of a text.

        Raises `EngineError`.
        """
        tokenizer = Tokenizer.of(self._model)
        text = PROBE + "".join(tokenizer.special_tokens)
        ids = tokenizer.encode(text)
        theirs = await self._tokenize(text)
        if theirs is None:
            log.warning(
                "teacher.url: %s has no /tokenize, so its tokenizer cannot be compared with the policy's; "
                "make sure that they are the same",
                self._json.shown,
            )
        elif theirs != ids.tolist():
            raise EngineError(
                f"teacher.url: the tokenizer of {self._json.shown} differs from the policy's: "
                f"{_first_difference(tokenizer, ids, theirs)}; use a teacher with the policy's tokenizer"
            )
        await (self.score if self._top is None else self.score_top)(ids, first=1, deadline_s=deadline_s)

    async def _tokenize(self, text: str) -> list[Any] | None:
        """Return the server's tokens of a text; None if the server has no usable ``/tokenize``."""
        payload = {"model": self._served.name, "prompt": text, "add_special_tokens": False}
        if not self._api.names_model:
            del payload["model"]
        answer = await self._json.send("POST", "/tokenize", payload, limit_s=ANSWER_S)
        if answer.error and not answer.status:
            raise EngineError(f"teacher.url: cannot reach {self._json.shown}: {answer.error}")
        tokens = answer.value.get("tokens") if isinstance(answer.value, dict) else None
        return tokens if isinstance(tokens, list) else None


def _first_difference(tokenizer: Tokenizer, ours: Ints, theirs: list[Any]) -> str:
    pairs = zip(ours.tolist(), theirs, strict=False)
    place = next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(ours), len(theirs)))
    if place >= len(ours):
        return f"it encodes a text as {len(theirs)} tokens, the policy as {len(ours)}"
    text = tokenizer.decode(ours[place : place + 1], keep_special=True)
    other = f"has token {theirs[place]!r:.40}" if place < len(theirs) else "has no more tokens"
    return f"where the policy encodes {text!r:.40} as token {ours[place]}, it {other}"


async def connect(settings: ServerTeacher, config: RunConfig) -> TeacherServer:
    """Detect the server's API and its model, and check that it can score the policy's samples. Raises `EngineError`."""
    api, served = await find_server(settings, config.plugins)
    if not api.can_score:
        raise EngineError(
            f"teacher.url: the server's API {kind_of(api)!r} does not return log-probabilities of given tokens; "
            "set teacher.api"
        )
    top = teacher_top(config.algorithm.needs(), config.model.path)
    if top is not None and not api.can_score_top:
        raise EngineError(f"teacher.url: the server's API {kind_of(api)!r} {NO_TOP}")
    client = TeacherServer(settings, config.model, served=served, api=api, top=top)
    try:
        await client.check(deadline_s=config.run.rollout_timeout_s)
    finally:
        await client.disconnect()
    return client
