"""SGLang's ``/generate`` API for the engine ``server``, whose servers the run does not start."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from plasmid.types import Completion, GenerateRequest, Ints, SamplingParams
from plasmid_serving.remote.apis import (
    ServedModel,
    ServerApi,
    TokenLogprobs,
    check_count,
    count_remaining_tokens,
    make_completion,
)

from .completions import optional_fields


class GenerateApi(ServerApi):
    """``/generate`` of SGLang: token ids in and out, log-probabilities at the sampling temperature."""

    kind: Literal["sglang"] = "sglang"
    path: ClassVar[str] = "/generate"
    probe: ClassVar[str] = "/get_model_info"
    sampling_settings: ClassVar[frozenset[str]] = frozenset(SamplingParams.OPTIONAL)
    can_score: ClassVar[bool] = True
    can_score_top: ClassVar[bool] = True

    def payload(self, request: GenerateRequest, model: ServedModel) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "input_ids": request.token_ids.tolist(),
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k == "all" else sampling.top_k,
                "min_p": sampling.min_p,
                "max_new_tokens": count_remaining_tokens(request),
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "no_stop_trim": True,
                **optional_fields(sampling),
            },
        }

    def completion(self, request: GenerateRequest, answer: Any, model: ServedModel) -> Completion:
        drawn = answer["meta_info"]["output_token_logprobs"]
        reason = answer["meta_info"]["finish_reason"]
        ids = np.array([token for _, token, *_ in drawn], np.int32)
        logprobs = np.array([np.nan if value is None else value for value, *_ in drawn], np.float32)
        return make_completion(
            request, ids, logprobs, reason["type"], str(reason.get("message", "aborted by the server"))
        )

    def scoring_payload(self, token_ids: Ints, *, first: int, model: ServedModel, top_k: int = 0) -> dict[str, Any]:
        return {
            "input_ids": token_ids.tolist(),
            "return_logprob": True,
            "logprob_start_len": first - 1,  # the first value is always null
            **({"top_logprobs_num": top_k} if top_k else {}),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        }

    def top_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[TokenLogprobs]:
        self.token_logprobs(answer, token_ids, first=first)  # the response must be about these tokens
        rows = answer["meta_info"]["input_top_logprobs"][1:]
        return [[(token, value) for value, token, *_ in row] for row in rows]

    def token_logprobs(self, answer: Any, token_ids: Ints, *, first: int) -> list[Any]:
        found = answer["meta_info"]["input_token_logprobs"]
        check_count(len(found) - 1, len(token_ids) - first)
        for sent, (_, token, *_) in zip(token_ids[first - 1 :].tolist(), found, strict=True):
            if token != sent:
                raise ValueError(f"got the log-probability of token {token!r:.40} instead of {sent}, which was sent")
        return [value for value, *_ in found[1:]]
