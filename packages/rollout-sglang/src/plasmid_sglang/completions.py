"""Request bodies for SGLang's ``/generate``, and completions from its responses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.types import Completion, GenerateRequest, SamplingParams, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid.types.routing import Experts
from plasmid_serving.completions import STOP_REASONS, empty_completion, failed_completion

SEED_BITS = 63


def request_body(request: GenerateRequest, *, rid: str, max_new_tokens: int, seeded: bool) -> dict[str, Any]:
    """Return the body of ``/generate``."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k == "all" else sampling.top_k,
        "min_p": sampling.min_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    params |= optional_fields(sampling)
    if seeded:
        params["sampling_seed"] = request.seed % (1 << SEED_BITS)
    body = {
        "rid": rid,
        "input_ids": [int(token) for token in request.token_ids],
        "sampling_params": params,
        "return_logprob": True,
    }
    if request.routing is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
    return body | {"return_sampling_mask": True} if _has_sets(request) else body


def optional_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the optional settings that are in effect. SGLang uses the same names for them."""
    fields = dict(sampling.optional)
    if "stop_regex" in fields:
        fields["stop_regex"] = list(sampling.stop_regex)
    if "json_schema" in fields:
        fields["json_schema"] = json.dumps(sampling.json_schema)
    return fields


def _has_sets(request: GenerateRequest) -> bool:
    """Return whether sampling truncates the vocabulary. Greedy decoding does not sample."""
    return request.wants_kept_set and request.sampling.is_restricted and request.sampling.temperature > 0


def completion(request: GenerateRequest, status: int, answer: Mapping[str, Any], *, has_spans: bool) -> Completion:
    """Convert a response to a completion. A rejected request fails, because other servers would reject it, too."""
    if status != 200:
        error = answer.get("error", answer)
        text = error.get("message", error) if isinstance(error, Mapping) else error
        if str(text).startswith(f"Request {request.id}~") and str(text).endswith(" was aborted"):
            # SGLang 0.5.17 responds like this if it is paused before the request has started; the request is valid
            return empty_completion(request, StopReason.ABORT)
        return failed_completion(request, f"the server rejected the request: {text}")
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    drawn = meta.get("output_token_logprobs") or []
    stop = STOP_REASONS.get(reason["type"])
    if stop is None or (stop is StopReason.ABORT and reason.get("status_code") not in (None, 503)):
        return failed_completion(request, f"the server aborted the request: {reason.get('message') or reason['type']}")
    logprobs = np.minimum(np.array([logprob for logprob, *_ in drawn], np.float32), 0.0)
    try:
        experts = _experts(request, meta)
    except ValueError as error:
        return failed_completion(request, f"the server returned invalid experts: {error}")
    return Completion(
        request_id=request.id,
        token_ids=np.array([token for _, token, *_ in drawn], np.int32),
        logprobs=logprobs,
        kept=_kept_set(request, meta, logprobs),
        experts=experts,
        versions=tuple(_spans(meta, len(drawn), has_spans=has_spans)),
        stop_reason=stop,
        timings=_timings(meta),
    )


def _kept_set(request: GenerateRequest, meta: Mapping[str, Any], logprobs: NDArray[np.float32]) -> KeptSet | None:
    """Return the kept sets. SGLang reports log-probabilities within the set and over the whole vocabulary; their
    difference is the log of the set's mass."""
    if not request.wants_kept_set:
        return None
    if not _has_sets(request):
        return KeptSet.whole(len(logprobs))
    within = np.array(meta.get("output_token_sampling_logprobs") or [], np.float32)
    sets = [np.array(tokens, np.int32) for tokens in meta.get("output_token_sampling_mask") or []]
    return KeptSet.of(sets, np.minimum(logprobs - within, 0.0))


def _experts(request: GenerateRequest, meta: Mapping[str, Any]) -> Experts | None:
    """Decode the experts of the tokens from ``experts_from``; none if an aborted request was never finished.

    Raises ValueError for invalid ids: these would select another expert, or memory outside of the weights.
    """
    routing = request.routing
    if routing is None:
        return None
    ids = np.frombuffer(base64.b64decode(meta.get("routed_experts") or "", validate=True), np.int32)
    if ids.size and not 0 <= ids.min() <= ids.max() < routing.experts:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}, but the model has {routing.experts} experts per layer")
    return ids.reshape(-1, routing.layers, routing.choices).astype(routing.dtype)


def _spans(meta: Mapping[str, Any], count: int, *, has_spans: bool) -> Iterator[VersionSpan]:
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or () if has_spans else ()
    if not spans:
        spans = [{"version": meta["weight_version"], "start": 0, "end": count}]
    for span in spans:
        if span["start"] < min(span["end"], count):
            yield VersionSpan(version=int(span["version"]), start=span["start"], end=min(span["end"], count))


def _timings(meta: Mapping[str, Any]) -> dict[str, float]:
    total, first = meta.get("e2e_latency"), meta.get("first_token_latency")
    found = {"queued_s": meta.get("queue_time"), "prefill_s": first}
    if total is not None and first is not None:
        found["decode_s"] = total - first
    return {name: float(seconds) for name, seconds in found.items() if seconds is not None}
