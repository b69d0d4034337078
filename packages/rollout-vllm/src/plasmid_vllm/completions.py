"""Request bodies for the vLLM server, and completions from its responses."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from plasmid.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid.types.routing import Experts, get_unknown_id
from plasmid_serving.completions import STOP_REASONS, failed_completion

SEED_BITS = 63
TIES = 16
"""Number of log-probabilities to request beyond top-k: vLLM also keeps tokens that tie with the last one."""
STEP = 0x9E3779B97F4A7C15
"""An odd number, so that a resumed request gets a seed different from its original one."""
GRAMMARS = {"regex": "regex", "json_schema": "json", "ebnf": "grammar"}
"""Fields of vLLM's ``StructuredOutputsParams`` by the name of the setting."""

RECORD_AS, EXPERTS_FROM = "record_as", "experts_from"
"""Keys in vLLM's ``extra_args`` of a request whose experts are recorded: its name, and the first token to record."""


def request_body(request: GenerateRequest, *, rid: str, max_new_tokens: int) -> dict[str, Any]:
    """Return the body of ``/generate``."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0 if sampling.top_k == "all" else sampling.top_k,
        "min_p": sampling.min_p,
        # vLLM counts random draws from the start of its own request
        "seed": (request.seed + request.num_generated * STEP) % (1 << SEED_BITS),
        "logprobs": sampling.top_k + TIES if _has_sets(request) and sampling.top_k != "all" else 0,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    params |= optional_fields(sampling, max_new_tokens=max_new_tokens)
    if request.routing is not None:
        params["extra_args"] = {RECORD_AS: rid, EXPERTS_FROM: request.experts_from}
    return {"rid": rid, "token_ids": [int(token) for token in request.token_ids], "sampling": params}


def optional_fields(sampling: SamplingParams, *, max_new_tokens: int) -> dict[str, Any]:
    """Return the optional settings that are in effect, in vLLM's names."""
    settings = dict(sampling.optional)
    fields: dict[str, Any] = {}
    for name, own in GRAMMARS.items():
        if name in settings:
            fields["structured_outputs"] = {own: settings.pop(name)}
    if "min_new_tokens" in settings:
        fields["min_tokens"] = min(settings.pop("min_new_tokens"), max_new_tokens)
    return fields | settings


def _has_sets(request: GenerateRequest) -> bool:
    """Return whether sampling truncates the vocabulary. Greedy decoding does not sample."""
    return request.wants_kept_set and request.sampling.is_restricted


def completion(request: GenerateRequest, status: int, answer: Mapping[str, Any]) -> Completion:
    """Convert a response to a completion. A rejected request fails, because other servers would reject it, too."""
    if status != 200:
        return failed_completion(request, f"the server rejected the request: {answer.get('error', answer)}")
    stop = STOP_REASONS.get(answer["reason"])
    if stop is None:
        return failed_completion(request, f"the server aborted the request: {answer['reason']}")
    count = len(answer["token_ids"])
    kept = None
    if request.wants_kept_set:
        kept = KeptSet.whole(count)
        if _has_sets(request):
            sets = [np.array(tokens, np.int32) for tokens in answer["sets"]]
            kept = KeptSet.of(sets, np.minimum(answer["log_mass"], 0.0))
    try:
        experts = _experts(request, answer)
    except ValueError as error:
        return failed_completion(request, f"the server returned invalid experts: {error}")
    return Completion(
        request_id=request.id,
        token_ids=np.array(answer["token_ids"], np.int32),
        logprobs=np.minimum(np.array(answer["logprobs"], np.float32), 0.0),
        kept=kept,
        experts=experts,
        versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in answer["versions"] if a < b),
        stop_reason=stop,
    )


def _experts(request: GenerateRequest, answer: Mapping[str, Any]) -> Experts | None:
    """Decode the experts of the tokens from ``experts_from``; none if an aborted request never started.

    Raises ValueError for invalid ids: these would select another expert, or memory outside of the weights.
    """
    routing = request.routing
    if routing is None:
        return None
    ids = np.frombuffer(base64.b64decode(answer["experts"], validate=True), routing.dtype)
    known = ids[ids != get_unknown_id(routing.dtype)]
    if known.size and known.max() >= routing.experts:
        raise ValueError(f"id {known.max()}, but the model has {routing.experts} experts per layer")
    return ids.reshape(-1, routing.layers, routing.choices).copy()


def encode_completion(output: Any, *, with_sets: bool) -> dict[str, Any]:
    """Return the response to a request. With ``with_sets``, it contains the kept tokens at each position and the log of
    their mass."""
    drawn, count = output.logprobs, len(output.token_ids)
    starts = drawn.start_indices[:count] if count else []
    answer = {
        "token_ids": list(output.token_ids),
        "logprobs": [drawn.logprobs[start] for start in starts],  # the first entry of a position is the sampled token's
        "versions": [[int(span.version), span.start, span.end] for span in output.weight_versions or ()],
        "reason": output.finish_reason,
    }
    if with_sets:
        sets, masses = [], []
        for start, end in zip(starts, drawn.end_indices[:count] if count else [], strict=True):
            tokens, first = np.unique(drawn.token_ids[start:end], return_index=True)
            values = np.array(drawn.logprobs[start:end])[first]
            is_left = np.isfinite(values)
            sets.append(tokens[is_left].tolist())
            masses.append(float(np.logaddexp.reduce(values[is_left])))
        answer |= {"sets": sets, "log_mass": masses}
    return answer
