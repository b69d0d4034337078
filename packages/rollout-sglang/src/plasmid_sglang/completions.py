"""Bodies of SGLang's ``/generate``, and completions from its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.types import Completion, GenerateRequest, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid_serving.client import empty_completion, failed

REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
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
    if seeded:
        params["sampling_seed"] = request.seed % (1 << SEED_BITS)
    body = {
        "rid": rid,
        "input_ids": [int(token) for token in request.token_ids],
        "sampling_params": params,
        "return_logprob": True,
    }
    return body | {"return_sampling_mask": True} if _has_sets(request) else body


def _has_sets(request: GenerateRequest) -> bool:
    """True if sampling leaves tokens out. Greedy decoding does not sample."""
    return request.wants_kept_set and request.sampling.is_restricted and request.sampling.temperature > 0


def completion(request: GenerateRequest, status: int, answer: Mapping[str, Any], *, has_spans: bool) -> Completion:
    """Return the completion in an answer. A refusal is an error, as no other server would take the request."""
    if status != 200:
        error = answer.get("error", answer)
        text = error.get("message", error) if isinstance(error, Mapping) else error
        if str(text).startswith(f"Request {request.id}~") and str(text).endswith(" was aborted"):
            # 0.5.17 answers so where a pause finds a request that it has not begun: nothing is wrong with it
            return empty_completion(request, StopReason.ABORT)
        return failed(request, f"the server refused the request: {text}")
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    drawn = meta.get("output_token_logprobs") or []
    stop = REASONS.get(reason["type"])
    if stop is None or (stop is StopReason.ABORT and reason.get("status_code") not in (None, 503)):
        return failed(request, f"the server ended the request: {reason.get('message') or reason['type']}")
    logprobs = np.minimum(np.array([logprob for logprob, *_ in drawn], np.float32), 0.0)
    return Completion(
        request_id=request.id,
        token_ids=np.array([token for _, token, *_ in drawn], np.int32),
        logprobs=logprobs,
        kept=_kept_set(request, meta, logprobs),
        versions=tuple(_spans(meta, len(drawn), has_spans=has_spans)),
        stop_reason=stop,
        timings=_timings(meta),
    )


def _kept_set(request: GenerateRequest, meta: Mapping[str, Any], logprobs: NDArray[np.float32]) -> KeptSet | None:
    """SGLang gives each token's log-probability within its set; the whole one is below it by the set's mass."""
    if not request.wants_kept_set:
        return None
    if not _has_sets(request):
        return KeptSet.whole(len(logprobs))
    within = np.array(meta.get("output_token_sampling_logprobs") or [], np.float32)
    sets = [np.array(tokens, np.int32) for tokens in meta.get("output_token_sampling_mask") or []]
    return KeptSet.of(sets, np.minimum(logprobs - within, 0.0))


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
