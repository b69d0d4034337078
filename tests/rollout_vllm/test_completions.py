"""Requests in vLLM's format, and completions from its responses."""

import base64
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from plasmid.types import StopReason, VersionSpan
from plasmid.types.routing import Routing
from plasmid_vllm.completions import TIES, completion, encode_completion, request_body

from tests.engine_cases import make_request


def sampling_of(**settings):
    return request_body(make_request(1, **settings), rid="1~0", max_new_tokens=5)["sampling"]


def test_sampling_in_vllms_terms():
    body = request_body(make_request(4, tokens=(7, 8)), rid="4~0", max_new_tokens=5)
    assert (body["rid"], body["token_ids"]) == ("4~0", [7, 8])
    assert body["sampling"] == {
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 4,
        "logprobs": 0,
    }
    found = sampling_of(temperature=0.5, top_k=3, top_p=0.9, stop=("x",), stop_token_ids=(4,))
    assert (found["top_k"], found["top_p"], found["stop"], found["stop_token_ids"]) == (3, 0.9, ["x"], [4])


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"5": 1.0}}, {"logit_bias": {"5": 1.0}}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"min_new_tokens": 8}, {"min_tokens": 5}),  # no more than there is room for
        ({"regex": "[a-z]+"}, {"structured_outputs": {"regex": "[a-z]+"}}),
        ({"json_schema": {"type": "object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ],
    ids=str,
)
def test_optional_settings_in_vllms_terms(setting, fields):
    found, plain = sampling_of(**setting), sampling_of()
    assert {name: value for name, value in found.items() if name not in plain} == fields


def test_a_continued_request_has_a_different_seed():
    request = make_request(1)
    seeds = {
        request_body(replace(request, num_generated=n), rid="1~0", max_new_tokens=5)["sampling"]["seed"]
        for n in range(50)
    }
    assert len(seeds) == 50 and all(0 <= seed < 2**63 for seed in seeds)


def test_likely_tokens_are_asked_for_where_sampling_leaves_some_out():
    wants = replace(make_request(1, top_k=3), wants_kept_set=True)
    assert request_body(wants, rid="1~0", max_new_tokens=5)["sampling"]["logprobs"] == 3 + TIES
    greedy = replace(make_request(1, top_k=3, temperature=0.0), wants_kept_set=True)
    assert request_body(greedy, rid="1~0", max_new_tokens=5)["sampling"]["logprobs"] == 0


def output(reason="length"):
    """Create vLLM's output: at each position the sampled token first, then the most likely ones; excluded tokens have
    -inf."""
    rows = [
        [(5, np.log(0.3)), (4, np.log(0.4)), (5, np.log(0.3)), (9, -np.inf)],
        [(2, np.log(0.6)), (2, np.log(0.6)), (8, -np.inf), (7, -np.inf)],
    ]
    ends = np.cumsum([len(row) for row in rows]).tolist()
    logprobs = SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for row in rows for token, _ in row],
        logprobs=[float(value) for row in rows for _, value in row],
    )
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=2)]
    return SimpleNamespace(token_ids=[5, 2], logprobs=logprobs, weight_versions=spans, finish_reason=reason)


def test_tokens_log_probabilities_versions_and_what_was_left():
    request = replace(make_request(1, top_k=3), wants_kept_set=True)
    made = completion(request, 200, encode_completion(output(), with_sets=True))
    assert made.token_ids.tolist() == [5, 2] and made.stop_reason is StopReason.LENGTH
    np.testing.assert_allclose(np.exp(made.logprobs), [0.3, 0.6], rtol=1e-6)
    assert made.versions == (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2))
    assert [part.tolist() for part in np.split(made.kept.token_ids, made.kept.offsets[1:-1])] == [[4, 5], [2]]
    np.testing.assert_allclose(np.exp(made.kept.log_mass), [0.7, 0.6], rtol=1e-6)
    plain = completion(make_request(1), 200, encode_completion(output("abort"), with_sets=False))
    assert plain.kept is None and plain.stop_reason is StopReason.ABORT


def test_a_request_that_was_aborted_before_its_first_token_is_empty():
    nothing = SimpleNamespace(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort")
    wants = replace(make_request(1, top_k=3), wants_kept_set=True)
    for request in (make_request(1), wants):
        made = completion(request, 200, encode_completion(nothing, with_sets=request.wants_kept_set))
        assert len(made.token_ids) == 0 and made.versions == () and made.stop_reason is StopReason.ABORT


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (
            400,
            {"error": "temperature must be in [0, 2]"},
            "the server rejected the request: temperature must be in [0, 2]",
        ),
        (200, {"reason": "error"}, "the server aborted the request: error"),
    ],
)
def test_a_rejected_request_gives_a_completion_with_the_error(status, answer, error):
    failed = completion(make_request(1), status, answer)
    assert failed.stop_reason is StopReason.ERROR and failed.error == error


@pytest.mark.parametrize(
    ("sent", "experts", "error"),
    [
        ([3, 7, 255, 255], [[[3, 7]], [[255, 255]]], None),  # 255 stands for experts that were not recorded
        ([], np.zeros((0, 1, 2)).tolist(), None),
        ([3, 8], None, "id 8, but the model has 8 experts per layer"),
        ([1, 2, 3], None, "cannot reshape array of size 3"),
    ],
)
def test_experts_are_those_of_the_model(sent, experts, error):
    request = replace(make_request(1), routing=Routing(layers=1, choices=2, experts=8))
    answer = {"token_ids": [], "logprobs": [], "versions": [], "reason": "stop"}
    answer["experts"] = base64.b64encode(bytes(sent)).decode()
    found = completion(request, 200, answer)
    if error is None:
        assert found.experts.tolist() == experts
    else:
        assert found.stop_reason is StopReason.ERROR
        assert found.error.startswith(f"the server returned invalid experts: {error}")


def test_large_ids_have_two_bytes():
    request = replace(make_request(1), routing=Routing(layers=1, choices=2, experts=300))
    answer = {"token_ids": [], "logprobs": [], "versions": [], "reason": "stop"}
    answer["experts"] = base64.b64encode(np.array([[[299, 5]]], np.uint16).tobytes()).decode()
    assert completion(request, 200, answer).experts.tolist() == [[[299, 5]]]
