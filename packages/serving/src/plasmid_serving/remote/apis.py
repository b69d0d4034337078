"""Requests to servers of others and their answers: ``/generate`` on token ids, and OpenAI's completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from plasmid.types import Completion, Floats, GenerateRequest, Ints, SamplingParams, StopReason, VersionSpan

STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ERROR}

MOST_TOKENS, FEW_TOKENS = 2, 16
"""A text may have more tokens than were drawn, since it is tokenised anew: at most so many times, and so many more."""
MAX_REASON = 1000
"""Characters of a server's own words that are kept."""


class Api(Protocol):
    """One way of asking."""

    path: str

    def payload(self, request: GenerateRequest) -> dict[str, Any]:
        """The body of a request."""
        ...

    def completion(self, request: GenerateRequest, answer: Any) -> Completion:
        """What an answer says. Raises `KeyError`, `TypeError`, `ValueError` or `IndexError` if it is not one."""
        ...


class GenerateApi:
    """``/generate``: token ids in and out, log-probabilities at the sampling temperature."""

    path = "/generate"

    def payload(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "input_ids": request.token_ids.tolist(),
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k == "all" else sampling.top_k,
                "min_p": sampling.min_p,
                "max_new_tokens": _left(request),
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "no_stop_trim": True,
            },
        }

    def completion(self, request: GenerateRequest, answer: Any) -> Completion:
        drawn = answer["meta_info"]["output_token_logprobs"]
        reason = answer["meta_info"]["finish_reason"]
        ids = np.array([token for _, token, *_ in drawn], np.int32)
        logprobs = np.array([np.nan if value is None else value for value, *_ in drawn], np.float32)
        return _completion(request, ids, logprobs, reason["type"], str(reason.get("message", "the server gave up")))


class CompletionsApi:
    """``/v1/completions``. Tokens of an answer are those of its text, unless the server tells them itself."""

    path = "/v1/completions"

    def __init__(self, model: str, *, encode: Callable[[str], Ints], spell: Callable[[Ints], str] | None) -> None:
        """``spell`` writes prompts out as text; None sends their tokens."""
        self._model, self._encode, self._spell = model, encode, spell

    def payload(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        spell = self._spell
        return {
            "model": self._model,
            "prompt": request.token_ids.tolist() if spell is None else spell(request.token_ids),
            "max_tokens": _left(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % 2**31,
            "logprobs": 1,
            **_unusual(sampling),
        }

    def completion(self, request: GenerateRequest, answer: Any) -> Completion:
        choice = answer["choices"][0]
        told = choice.get("token_ids")
        ids = np.asarray(told, np.int32) if told is not None else self._encode(str(choice["text"]))
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        known = len(values) == len(ids)
        logprobs = [np.nan if value is None else value for value in values] if known else [np.nan] * len(ids)
        return _completion(request, ids, np.array(logprobs, np.float32), choice["finish_reason"], "the server gave up")


def _left(request: GenerateRequest) -> int:
    return max(1, request.sampling.max_new_tokens - request.num_generated)


def _unusual(sampling: SamplingParams) -> Mapping[str, Any]:
    """Settings that not every server knows are sent only where they say something."""
    settings = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": list(sampling.stop)}
    plain = {"top_k": "all", "min_p": 0.0, "stop": []}
    ids = {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
    return {name: value for name, value in settings.items() if value != plain[name]} | ids


def _completion(request: GenerateRequest, ids: Ints, logprobs: Floats, reason: str, error: str) -> Completion:
    stop = STOPS.get(reason, StopReason.STOP)
    if len(ids) > MOST_TOKENS * _left(request) + FEW_TOKENS:
        raise ValueError(f"{len(ids)} tokens came, {_left(request)} were asked for")
    if len(ids) and ids.min() < 0:
        raise ValueError(f"a token is {ids.min()}")
    if np.isinf(logprobs).any():
        raise ValueError("a log-probability is infinite")
    return Completion(
        request_id=request.id,
        token_ids=ids,
        logprobs=logprobs,
        versions=(VersionSpan(version=0, start=0, end=len(ids)),) if len(ids) else (),
        stop_reason=stop,
        error=error[:MAX_REASON] if stop is StopReason.ERROR else None,
    )


def failed(request: GenerateRequest, error: str) -> Completion:
    """No completion, and why."""
    return _completion(request, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", error)
