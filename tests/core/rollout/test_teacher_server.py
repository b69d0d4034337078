"""A teacher on a real HTTP server: its log-probabilities are those of its model, and invalid responses are refused."""

import asyncio
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError, EngineError
from plasmid.testing.rewards import make_sample
from plasmid_models.source import has_teacher
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.lifecycle.validation import check
from plasmid_runtime.planning.plan import read_configs
from plasmid_runtime.rollout.scored.teacher_scores import add_teacher_logprobs, add_teacher_top
from plasmid_serving.remote.apis import CompletionsApi
from transformers import AutoModelForCausalLM

from tests.core.rollout.model_server import ModelServer

TOKENS = np.array([7, 9, 12, 8, 30, 11, 10], np.int32)
APIS = ["openai", "sglang"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), num_layers=1, seed=11, initializer_range=0.2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_model):
    data = tmp_path_factory.mktemp("taught") / "prompts.jsonl"
    data.write_text('{"prompt": "say 1: ", "target": 1}\n' * 4)
    return {
        "model": {"path": str(tiny_model)},
        "sampling": {"max_new_tokens": 6},
        "data": {"path": str(data)},
        "trainer": {"kind": "fsdp"},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "opd"},
        "run": {"rollout_timeout_s": 30.0},
    }


@pytest.fixture(scope="module")
def servers(plain, teacher):
    plain = {**plain, "algorithm": {"kind": "grpo"}, "rewards": [{"kind": "number"}], "data": {"path": "none"}}
    made = {api: ModelServer(teacher, plain, sglang=api == "sglang") for api in APIS}
    yield made
    for server in made.values():
        server.close()


@pytest.fixture
def reset(servers):
    """Reset the servers' answers, which a test may have changed."""
    saved = {api: server.encode for api, server in servers.items()}

    def restore():
        for api, server in servers.items():
            server.faults, server.bodies, server.headers, server.refuse, server.delay_s = [], [], [], "", 0.0
            server.change, server.encode = (lambda answer: answer), saved[api]

    restore()
    yield
    restore()


@pytest.fixture(params=APIS)
def server(request, servers, reset):
    return servers[request.param]


def taught(plain, server, **settings):
    return resolve(merge(plain, {"teacher": {"kind": "server", "url": server.url, "backoff_s": 0.01, **settings}}))


def asked(config, token_ids=TOKENS, *, first=3, change=None, deadline_s=30.0, top=False):
    """Return the server's answer after connecting; ``change`` is called in between."""

    async def ask():
        client = pickle.loads(pickle.dumps(await config.teacher.connect(config)))  # as workers get it
        if change is not None:
            change()
        try:
            score = client.score_top if top else client.score
            return await score(token_ids, first=first, deadline_s=deadline_s)
        finally:
            await client.disconnect()

    return asyncio.run(ask())


def test_the_values_are_those_of_the_servers_model(plain, teacher, server):
    found = asked(taught(plain, server))
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].log_softmax(-1)
    wanted = [float(expected[place - 1, TOKENS[place]]) for place in range(3, len(TOKENS))]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.dtype == np.float32
    body = server.bodies[-1]
    assert body.get("prompt", body.get("input_ids")) == TOKENS.tolist()
    assert body.get("logprob_start_len", 2) == 2  # the prompt's own values are not computed


def scored_by(method, config, *samples):
    """Return the samples with the answers of the recipe's teacher server."""

    async def score():
        client = await config.teacher.connect(config)
        try:
            return await method(client, samples, deadline_s=30.0)
        finally:
            await client.disconnect()

    return asyncio.run(score())


def test_a_sample_gets_values_on_its_loss_tokens_only(plain, server):
    mask = np.array([0, 0, 1, 1, 0, 1, 0], bool)
    sample = make_sample("x", token_ids=TOKENS, loss_mask=mask, rollout_logprobs=np.zeros(7, np.float32))
    config = taught(plain, server)
    whole = asked(config, first=1)

    (scored,) = scored_by(add_teacher_logprobs, config, sample)
    np.testing.assert_allclose(scored.teacher_logprobs, np.where(mask, np.append(0, whole), 0), atol=1e-6)
    assert scored.stop_reason == sample.stop_reason and scored.timings["teacher_s"] > 0
    assert server.bodies[-1].get("prompt", server.bodies[-1].get("input_ids")) == TOKENS[:6].tolist()
    server.refuse = "8, 30, 11]"
    (failed,) = scored_by(add_teacher_logprobs, config, sample)
    assert failed.stop_reason == "error" and ": 400: " in failed.error and failed.error.startswith("teacher: http://")


GKD = {"algorithm": {"kind": "gkd", "top_k": 5}}


def expected_top(teacher, count=5):
    """Return the most likely tokens at each position of `TOKENS` except the first, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    with torch.no_grad():
        logprobs = model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.topk(count, dim=-1)


def test_the_top_tokens_are_those_of_the_servers_model(plain, teacher, server):
    found = asked(taught(merge(plain, GKD), server), top=True)
    expected = expected_top(teacher)
    order = np.argsort(-found.logprobs, 1)
    np.testing.assert_array_equal(np.take_along_axis(found.token_ids, order, 1), expected.indices[2:])
    np.testing.assert_allclose(np.take_along_axis(found.logprobs, order, 1), expected.values[2:], atol=1e-5)
    assert (found.token_ids.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    body = server.bodies[-1]
    assert body.get("prompt_logprobs", body.get("top_logprobs_num")) == 5


def test_a_sample_gets_top_tokens_for_its_loss_tokens_only(plain, teacher, server):
    mask = np.array([0, 0, 1, 1, 0, 1, 0], bool)
    sample = make_sample("x", token_ids=TOKENS, loss_mask=mask, rollout_logprobs=np.zeros(7, np.float32))
    nothing = replace(sample, loss_mask=np.zeros(7, bool))
    config = taught(merge(plain, GKD), server)

    scored, untrained = scored_by(add_teacher_top, config, sample, nothing)
    found = {token for row in expected_top(teacher).indices[[1, 2, 4]].tolist() for token in row}
    assert scored.teacher_top.token_ids.shape == (3, 5) and scored.teacher_logprobs is None
    assert set(scored.teacher_top.token_ids.ravel().tolist()) == found and scored.timings["teacher_s"] > 0
    assert untrained == nothing
    server.refuse = "8, 30, 11]"
    failed, _ = scored_by(add_teacher_top, config, sample, nothing)
    assert failed.stop_reason == "error" and failed.error.startswith("teacher: http://")


def test_a_busy_server_is_asked_again_and_a_slow_one_until_the_deadline(plain, server):
    def make_busy():
        server.faults = [503, 429]

    config = taught(plain, server)
    np.testing.assert_array_equal(asked(config, change=make_busy), asked(config))

    def make_slow():
        server.delay_s = 30.0

    with pytest.raises(EngineError, match=r"^teacher: no answer from http://127.0.0.1:\d+ within 0.5 s$"):
        asked(config, change=make_slow, deadline_s=0.5)


def values_of(answer):
    """Return the places of log-probabilities in an answer of either API, as (container, key), in order."""
    if "meta_info" in answer:
        return [(row, 0) for row in answer["meta_info"]["input_token_logprobs"]][1:]
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    return [(entry, "logprob") for row in rows for entry in row.values()]


def replaced(value):
    def change(answer):
        container, key = values_of(answer)[-1]
        container[key] = value
        return answer

    return change


def cut(answer):
    rows = answer["meta_info"]["input_token_logprobs"] if "meta_info" in answer else None
    (answer["choices"][0]["prompt_logprobs"] if rows is None else rows).pop()
    return answer


def of_another_token(answer):
    if "meta_info" in answer:
        answer["meta_info"]["input_token_logprobs"][-1][1] = 5
    else:
        answer["choices"][0]["prompt_logprobs"][-1] = {"5": {"logprob": -1.0}}
    return answer


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (cut, r"got \d log-probabilities for \d tokens"),
        (of_another_token, "got (no|the) log-probability of token (10|5)"),
        (replaced(math.nan), "got the log-probability nan; it must be a number from -10000 to 0"),
        (replaced(-math.inf), "got the log-probability -inf"),
        (replaced(0.5), "got the log-probability 0.5"),
        (replaced(True), "got the log-probability True"),
        (replaced("-1.0"), "got the log-probability '-1.0'"),
        (replaced(None), "got the log-probability None"),
        (replaced(10**400), "got the log-probability 1000"),
        (lambda answer: {}, "'(choices|meta_info)'"),
        (lambda answer: [], "list indices|no attribute"),
        (lambda answer: {"choices": [{}], "meta_info": {}}, "returned no prompt_logprobs|'input_token_logprobs'"),
    ],
)
def test_an_answer_without_a_log_probability_for_each_token_is_refused_in_one_line(plain, server, change, line):
    def corrupt():
        server.change = change

    with pytest.raises(EngineError, match=rf"^teacher: http://\S+: not a valid answer: [^\n]*({line})[^\n]*$") as error:
        asked(taught(plain, server), change=corrupt)
    assert len(str(error.value)) < 400


def test_an_endless_answer_is_cut_off(plain, server):
    def flood():
        server.change = lambda answer: {**answer, "more": "x" * (2 << 20)}

    with pytest.raises(EngineError, match=r"the response has more than \d+ bytes"):
        asked(taught(plain, server), change=flood)


def test_another_tokenizer_is_refused_before_anything_is_sampled(plain, server):
    encode = server.encode
    server.encode = lambda text: [id_ + (i == 3) for i, id_ in enumerate(encode(text))]
    wanted = r"^teacher.url: the tokenizer of \S+ differs from the policy's: where the policy encodes '.*' as "
    with pytest.raises(EngineError, match=rf"{wanted}token \d+, it has token \d+; use a teacher with the policy's"):
        asked(taught(plain, server))
    server.encode = lambda text: [*encode(text), 4]
    with pytest.raises(EngineError, match=r"it encodes a text as \d+ tokens, the policy as \d+"):
        asked(taught(plain, server))
    assert server.bodies == []


def test_a_server_without_a_tokenizer_is_used_with_a_warning(plain, server, caplog):
    server.encode = None
    assert len(asked(taught(plain, server))) == 4
    assert "has no /tokenize, so its tokenizer cannot be compared" in caplog.text


def test_a_server_that_is_not_there_is_named_with_its_table(plain, server, monkeypatch):
    with pytest.raises(EngineError, match=r"^teacher.url: cannot reach http://127.0.0.1:9: ConnectError"):
        asked(resolve(merge(plain, {"teacher": {"kind": "server", "url": "http://127.0.0.1:9"}})))
    monkeypatch.delenv("SOME_KEY", raising=False)
    config = taught(plain, server, api_key_env="SOME_KEY")
    with pytest.raises(ConfigError, match=r"^teacher.api_key_env: SOME_KEY is not set in the environment$"):
        check(config)
    monkeypatch.setenv("SOME_KEY", "secret")
    asked(config)
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling.temperature: must be 1 or 0 with teacher.kind = 'server', got"),
        ({"teacher": {"path": "x"}}, r"teacher.path: "),
        ({"teacher": {"kind": "serve"}}, r"teacher.kind: 'serve' is not installed; did you mean 'server'\?"),
        ({"algorithm": {"kind": "grpo"}, "rewards": [{"kind": "number"}]}, r"teacher: algorithm 'grpo' .*never reads"),
    ],
)
def test_recipes_that_a_server_cannot_teach_are_refused(plain, changes, line):
    settings = {"teacher": {"kind": "server", "url": "http://host:1"}}
    with pytest.raises(ConfigError, match=line):
        resolve(merge(merge(plain, settings), changes))


def test_a_teacher_server_needs_no_model_in_trainer_or_plan(plain, teacher):
    served = resolve(merge(plain, {"teacher": {"kind": "server", "url": "http://host:1/v1"}}))
    assert list(served.needed_models) == ["model"] and not has_teacher(served)
    inside = resolve(merge(plain, {"teacher": {"path": str(teacher)}}))
    assert list(inside.needed_models.items())[1:] == [("teacher", str(teacher))] and has_teacher(inside)
    assert read_configs(served).keys() == {"model"} and read_configs(inside).keys() == {"model", "teacher"}


def test_restricted_sampling_is_refused_before_anything_starts(plain):
    changes = {"teacher": {"kind": "server", "url": "http://host:1"}, "sampling": {"top_p": 0.9}}
    with pytest.raises(ConfigError, match=r"^teacher.kind: 'server' computes log-probabilities over all tokens, but"):
        check(resolve(merge(plain, changes)))


def top_rows(answer):
    """Return the places of the most likely tokens at the last position of an answer of either API, as (container,
    key)."""
    if "meta_info" in answer:
        return answer["meta_info"]["input_top_logprobs"][-1]
    return answer["choices"][0]["prompt_logprobs"][-1]


def without_one(answer):
    rows = top_rows(answer)
    if isinstance(rows, list):
        rows.pop()
    else:
        rest = [key for key in rows if key != str(TOKENS[-1])][3:]
        for key in rest:  # the sent token and three others remain
            del rows[key]
    return answer


def with_token(token):
    def change(answer):
        rows = top_rows(answer)
        if isinstance(rows, list):
            rows[0][1] = token
        else:
            rows[str(token)] = {"logprob": -0.1}
        return answer

    return change


def without_top(answer):
    if "meta_info" in answer:
        del answer["meta_info"]["input_top_logprobs"]
    else:
        del answer["choices"][0]["prompt_logprobs"]
    return answer


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without_one, "got 4 tokens at a position, 5 were requested"),
        (with_token(10**6), r"got token 1000000, but the policy has the tokens from 0 to \d+; lower algorithm.top_k"),
        (with_token(-1), "got token -1, but the policy has the tokens from 0"),
        (without_top, "'input_top_logprobs'|returned no prompt_logprobs"),
        (cut, r"got \d log-probabilities for \d tokens"),
        (of_another_token, "got (no|the) log-probability of token (10|5)"),
    ],
)
def test_an_answer_without_enough_top_tokens_is_refused_in_one_line(plain, server, change, line):
    def corrupt():
        server.change = change

    with pytest.raises(EngineError, match=rf"^teacher: http://\S+: not a valid answer: [^\n]*({line})[^\n]*$"):
        asked(taught(merge(plain, GKD), server), change=corrupt, top=True)


def test_top_tokens_that_a_server_or_a_vocabulary_lacks_are_refused(plain, server):
    api = type("Api", (CompletionsApi,), {"can_score_top": False})()
    settings = {"teacher": {"kind": "server", "url": server.url}}
    config = resolve(merge(merge(plain, GKD), settings))
    refused = config.teacher.model_copy(update={"api": api})
    with pytest.raises(EngineError, match=r"API 'openai' does not return the most likely tokens at each"):
        asyncio.run(refused.connect(config))
    view = SimpleNamespace(key="teacher", needs=config.algorithm.needs(), samplings={})
    (line,) = refused.find_errors(view)
    assert line.startswith(
        "teacher.api: 'openai' does not return the most likely tokens at each position, which the algorithm"
    )
    many = merge(merge(plain, settings), {"algorithm": {"kind": "gkd", "top_k": 10**6}})
    with pytest.raises(ConfigError, match=r"needs the teacher's 1000000 most likely tokens, but the vocabulary of"):
        check(resolve(many))
    inside = merge(plain, {"teacher": {"path": "auto"}, "algorithm": {"kind": "gkd", "top_k": 10**6}})
    with pytest.raises(ConfigError, match=r"^algorithm: needs the teacher's 1000000 most likely .*lower algorithm.t"):
        check(resolve(inside))
