"""APIs of external servers: the extension point, and OpenAI's completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from plasmid.components import Component, kind_of
from plasmid.config.run import ModelConfig
from plasmid.types import Completion, Floats, GenerateRequest, Ints, SamplingParams, StopReason, VersionSpan
from plasmid.types.top_tokens import TopChoice, TopTokens
from plasmid_models.tokenization.tokenizer import Tokenizer

STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ERROR}

MAX_TOKEN_RATIO, EXTRA_TOKENS = 2, 16
"""Limit on the tokens of a completion, as a factor and an additional number. Some servers return text only, which may
have more tokens when it is tokenized again than were generated."""
MIN_LOGPROB, ROUNDING = -1e4, 1e-3
"""Range of log-probabilities: some servers return -9999 for a probability of 0; rounding can yield more than 0."""
MAX_REASON = 1000
"""Maximum length of a server's error message, in characters."""


class ServedModel:
    """The model of an external server: its name there, and the tokenizer of the recipe's ``model``."""

    def __init__(self, name: str, model: ModelConfig, *, prompt: Literal["tokens", "text"]) -> None:
        """``prompt`` selects the content of requests; in text, special tokens are spelled out."""
        self.name, self._model, self._prompt = name, model, prompt

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, opened on first use."""
        return Tokenizer.of(self._model)

    def prompt_of(self, request: GenerateRequest) -> str | list[int]:
        """Return the tokens of a request, or their text."""
        ids = request.token_ids
        return ids.tolist() if self._prompt == "tokens" else self.tokenizer.decode(ids, keep_special=True)


TokenLogprobs = Sequence[tuple[Any, Any]]
"""Ids and log-probabilities of some tokens at one position, in any order, as an untrusted response contains them."""


class ServerApi(Component, slot="server_apis"):
    """How to request completions from external servers: ``rollout.api`` of the engine ``server``."""

    path: ClassVar[str]
    """Path of requests."""
    probe: ClassVar[str] = ""
    """Path that only servers with this API answer, used by ``api = "auto"`` for detection; empty for none."""
    names_model: ClassVar[bool] = False
    """Whether requests contain the model name."""
    sampling_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings of `SamplingParams.OPTIONAL` that requests contain."""
    can_score: ClassVar[bool] = False
    """Whether servers return log-probabilities of given tokens: `scoring_payload` and `token_logprobs` are defined."""
    can_score_top: ClassVar[bool] = False
    """Whether servers also return the most likely tokens at each position of given tokens: `scoring_payload` supports
    ``top_k``, and `top_logprobs` is defined."""

    @abstractmethod
    def payload(self, request: GenerateRequest, model: ServedModel) -> dict[str, Any]:
        """Return the body of a request."""

    @abstractmethod
    def completion(self, request: GenerateRequest, answer: Any, model: ServedModel) -> Completion:
        """Convert a response, which is untrusted, to a completion (`make_completion`).

        Raises `KeyError`, `TypeError`, `ValueError` or `IndexError` for an invalid response.
        """

    def scoring_payload(self, token_ids: Ints, *, first: int, model: ServedModel, top_k: int = 0) -> dict[str, Any]:
        """Return the body of a request for log-probabilities of these tokens from position ``first`` (1 or more) on.

        ``top_k`` is only passed if it is more than 0, for `top_logprobs`.
        """
        raise NotImplementedError(f"{kind_of(self)}: can_score, but has no scoring_payload")

    def token_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[Any]:
        """Return the log-probabilities [L - first], unchecked, of a response to `scoring_payload`, which is untrusted.

        Raises the errors of `completion`, also if the response is for different tokens.
        """
        raise NotImplementedError(f"{kind_of(self)}: can_score, but has no token_logprobs")

    def top_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[TokenLogprobs]:
        """Return the most likely tokens at each position from ``first`` on, unchecked, as `token_logprobs` does."""
        raise NotImplementedError(f"{kind_of(self)}: can_score_top, but has no top_logprobs")


class CompletionsApi(ServerApi):
    """``/v1/completions`` of OpenAI. The text of a response is tokenized, unless the server returns tokens.

    Scores given tokens by ``prompt_logprobs``, which is not part of OpenAI's API but of some servers.
    """

    kind: Literal["openai"] = "openai"
    path: ClassVar[str] = "/v1/completions"
    names_model: ClassVar[bool] = True
    sampling_settings: ClassVar[frozenset[str]] = frozenset({"frequency_penalty", "presence_penalty", "logit_bias"})
    can_score: ClassVar[bool] = True
    can_score_top: ClassVar[bool] = True

    def payload(self, request: GenerateRequest, model: ServedModel) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "model": model.name,
            "prompt": model.prompt_of(request),
            "max_tokens": count_remaining_tokens(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**31,
            "logprobs": 1,
            **_changed_settings(sampling),
        }

    def completion(self, request: GenerateRequest, answer: Any, model: ServedModel) -> Completion:
        choice = answer["choices"][0]
        returned = choice.get("token_ids")
        ids = np.asarray(returned, np.int32) if returned is not None else model.tokenizer.encode(str(choice["text"]))
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        known = len(values) == len(ids)
        logprobs = [np.nan if value is None else value for value in values] if known else [np.nan] * len(ids)
        return make_completion(request, ids, np.array(logprobs, np.float32), choice["finish_reason"])

    def scoring_payload(self, token_ids: Ints, *, first: int, model: ServedModel, top_k: int = 0) -> dict[str, Any]:
        prompt = token_ids.tolist()
        return {"model": model.name, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}

    def token_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[Any]:
        tokens = zip(map(str, token_ids[first:].tolist()), self._entries(answer, token_ids, first), strict=True)
        return [entry[token]["logprob"] for token, entry in tokens]

    def top_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[TokenLogprobs]:
        # servers add the given token to the most likely ones; `check_top` selects the latter
        entries = self._entries(answer, token_ids, first)
        return [[(int(token), about["logprob"]) for token, about in entry.items()] for entry in entries]

    def _entries(self, answer: Any, token_ids: Ints, first: int) -> list[dict[str, Any]]:
        """Return the log-probabilities at each position from ``first`` on, by token id.

        Raises ValueError if those of a position do not include the given token.
        """
        choice = answer["choices"][0]
        found = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
        if not isinstance(found, list):
            raise ValueError("the server returned no prompt_logprobs; use a server that does, or set teacher.api")
        check_count(len(found), len(token_ids))
        tokens = [(str(token), found[place]) for place, token in enumerate(token_ids.tolist()) if place >= first]
        if missing := [token for token, entry in tokens if not isinstance(entry, dict) or token not in entry]:
            raise ValueError(f"got no log-probability of token {missing[0]}, which was sent")
        return [entry for _, entry in tokens]


def check_count(found: int, expected: int) -> None:
    """Raise ValueError unless a response has a log-probability for each token."""
    if found != expected:
        raise ValueError(f"got {found} log-probabilities for {expected} tokens")


def check_logprobs(values: list[Any], count: int) -> Floats:
    """Return a server's log-probabilities as [count] float32. Raises ValueError for anything that cannot be one."""
    check_count(len(values), count)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_LOGPROB <= value <= ROUNDING:
            raise ValueError(f"got the log-probability {value!r:.100}; it must be a number from {MIN_LOGPROB:g} to 0")
    return np.minimum(np.array(values, np.float32), np.float32(0))


def check_top(rows: Sequence[TokenLogprobs], count: int, *, choice: TopChoice) -> TopTokens:
    """Return the most likely ones of a server's tokens at ``count`` positions.

    Raises ValueError unless every position has at least that many different tokens of the policy.
    """
    check_count(len(rows), count)
    found = TopTokens.unknown(count, choice.count)
    for place, row in enumerate(rows):
        ids = [token for token, _ in row]
        if len(set(ids)) < choice.count:
            raise ValueError(f"got {len(set(ids))} tokens at a position, {choice.count} were requested")
        if wrong := [token for token in ids if type(token) is not int or not 0 <= token < choice.num_tokens]:
            raise ValueError(
                f"got token {wrong[0]!r:.40}, but the policy has the tokens from 0 to {choice.num_tokens - 1}; lower "
                "algorithm.top_k"
            )
        values = check_logprobs([value for _, value in row], len(row))
        best = np.argsort(-values, kind="stable")[: choice.count]
        found.token_ids[place], found.logprobs[place] = np.asarray(ids, np.int32)[best], values[best]
    return found


def count_remaining_tokens(request: GenerateRequest) -> int:
    """Return how many more tokens may be generated."""
    return max(1, request.sampling.max_new_tokens - request.num_generated)


def _changed_settings(sampling: SamplingParams) -> Mapping[str, Any]:
    """Return non-default settings only, because not every server knows them."""
    settings = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": list(sampling.stop)}
    plain = {"top_k": "all", "min_p": 0.0, "stop": []}
    ids = {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
    return {name: value for name, value in settings.items() if value != plain[name]} | ids | dict(sampling.optional)


def make_completion(
    request: GenerateRequest, ids: Ints, logprobs: Floats, reason: str, error: str = "aborted by the server"
) -> Completion:
    """Build a completion from a server's response. Raises ValueError for an invalid one."""
    stop = STOPS.get(reason, StopReason.STOP)
    if len(ids) > MAX_TOKEN_RATIO * count_remaining_tokens(request) + EXTRA_TOKENS:
        raise ValueError(f"got {len(ids)} tokens, at most {count_remaining_tokens(request)} were requested")
    if len(ids) and ids.min() < 0:
        raise ValueError(f"got token {ids.min()}")
    if np.isinf(logprobs).any():
        raise ValueError("got an infinite log-probability")
    return Completion(
        request_id=request.id,
        token_ids=ids,
        logprobs=logprobs,
        versions=(VersionSpan(version=0, start=0, end=len(ids)),) if len(ids) else (),
        stop_reason=stop,
        error=error[:MAX_REASON] if stop is StopReason.ERROR else None,
    )


def failed_completion(request: GenerateRequest, error: str) -> Completion:
    """Return a completion without tokens that carries the error."""
    return make_completion(request, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", error)
