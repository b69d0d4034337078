"""Errors in the format of each API, as read by its own client."""

import asyncio

import httpx
import pytest
from agent_cases import WEATHER, ScriptedEngine, make_settings, served

from tests.lazy_module import LazyModule

anthropic = LazyModule("anthropic")
openai = LazyModule("openai")

ASKED = [{"role": "user", "content": "hi"}]


def ask_openai(tokenizer, *, script=("yes",), settings=None, max_length=1024, **request):
    """Send a request; return the error or the text of the reply, and the number of requests that reached the engine."""

    async def main():
        async with (
            served(tokenizer, script, settings=settings, max_length=max_length) as one,
            openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x") as client,
        ):
            try:
                reply = await client.chat.completions.create(**{"model": "m", "messages": ASKED, **request})
                return reply.choices[0].message.content, one
            except openai.APIError as error:
                return error, one

    return asyncio.run(main())


def ask_anthropic(tokenizer, *, script=("yes",), settings=None, max_length=1024, **request):
    async def main():
        async with (
            served(tokenizer, script, settings=settings, max_length=max_length) as one,
            anthropic.AsyncAnthropic(base_url=one.url, api_key="x") as client,
        ):
            try:
                given = {"model": "m", "max_tokens": 9, "messages": ASKED, **request}
                return (await client.messages.create(**given)).content[0].text, one
            except anthropic.APIError as error:
                return error, one

    return asyncio.run(main())


LEAVE_OUT = 'remove it from the request, or set workflow.unsupported_options = "ignore"'


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ({"temperature": 0.2}, "temperature = 0.2 (the run samples with 1.0)"),
        ({"top_p": 0.9}, "top_p = 0.9 (the run samples with 1.0)"),
        ({"seed": 7}, "seed = 7"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
        ({"logprobs": True}, "logprobs = True"),
        ({"response_format": {"type": "json_object"}}, "response_format = {'type': 'json_object'}"),
        (
            {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"},
            "tool_choice = required",
        ),
    ],
)
def test_unsupported_options_are_refused_or_ignored(tokenizer, request_, names):
    error, one = ask_openai(tokenizer, **request_)
    assert isinstance(error, openai.BadRequestError)
    assert error.body["message"] == f"the run does not support: {names}; {LEAVE_OUT}"
    assert not one.engine.requests
    text, _ = ask_openai(tokenizer, settings=make_settings(unsupported_options="ignore"), **request_)
    assert text == "yes"


def test_options_without_effect_are_accepted(tokenizer):
    neutral = {"temperature": 1.0, "top_p": 1, "n": 1, "presence_penalty": 0, "user": "me", "tool_choice": "auto"}
    assert ask_openai(tokenizer, **neutral, response_format={"type": "text"}, logprobs=False)[0] == "yes"
    assert ask_anthropic(tokenizer, extra_body={"temperature": 1.0}, metadata={"user_id": "me"})[0] == "yes"


def test_anthropic_requests_are_held_to_the_same_rules(tokenizer):
    error, _ = ask_anthropic(tokenizer, extra_body={"temperature": 0.3}, tool_choice={"type": "any"})
    assert isinstance(error, anthropic.BadRequestError)
    assert error.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "the run does not support: temperature = 0.3 (the run samples with 1.0); tool_choice = any; "
            + LEAVE_OUT,
        },
    }


def test_context_length_errors_have_the_format_of_each_api(tokenizer):
    error, _ = ask_openai(tokenizer, max_length=5)
    assert isinstance(error, openai.BadRequestError)
    assert (error.code, error.body["message"]) == ("context_length_exceeded", "5 tokens > 4 maximum")
    error, one = ask_anthropic(tokenizer, max_length=5)
    assert error.body["error"]["message"] == "prompt is too long: 5 tokens > 4 maximum"
    assert not one.session.is_spent and one.session.error is None


def test_a_reply_never_makes_a_sample_longer_than_the_model_takes(tokenizer):
    text, one = ask_openai(tokenizer, script=["a long answer"], max_length=11)
    assert text == "a long"
    assert len(one.samples()[0].token_ids) == 11


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"messages": []}, "messages: list should have at least 1 item after validation, not 0"),
        ({"n": 2}, "n: input should be 1"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        (
            {"messages": [{"role": "assistant", "content": "I"}]},
            "messages: the last message must not be the assistant's",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages.0.content.0.type: input should be 'text', 'input_text' or 'output_text'",
        ),
    ],
)
def test_requests_that_make_no_sense_say_where(tokenizer, request_, message):
    error, one = ask_openai(tokenizer, **request_)
    assert isinstance(error, openai.BadRequestError)
    assert message == error.body["message"]
    assert error.type == "invalid_request_error"
    assert one.session.error is None


def test_tools_are_refused_if_the_template_ignores_them(tiny_model):
    from plasmid_models.tokenization.tokenizer import Tokenizer

    error, _ = ask_openai(Tokenizer(tiny_model), tools=[{"type": "function", "function": WEATHER}])
    assert isinstance(error, openai.BadRequestError)
    assert "tools: the chat template never reads it" in error.body["message"]


def test_an_engine_that_fails_is_a_server_error_and_fails_the_rollout(tokenizer):
    engine = ScriptedEngine(tokenizer, [])
    engine.error = "out of memory"
    error, one = ask_openai(tokenizer, script=engine)
    assert isinstance(error, openai.InternalServerError)
    assert error.body["message"] == "out of memory"
    assert one.session.error == "out of memory"
    assert len(engine.requests) == 1  # not tried again
    error, _ = ask_anthropic(tokenizer, script=engine)
    assert error.body["error"] == {"type": "api_error", "message": "out of memory"}


def test_an_engine_error_during_streaming_is_sent_in_the_stream(tokenizer):
    async def main():
        engine = ScriptedEngine(tokenizer, [])
        engine.error = "out of memory"
        async with served(tokenizer, engine) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
                with pytest.raises(openai.APIError, match="out of memory"):
                    async for _ in await client.chat.completions.create(model="m", messages=ASKED, stream=True):
                        pass
            async with anthropic.AsyncAnthropic(base_url=one.url, api_key="x", max_retries=0) as client:
                with pytest.raises(anthropic.APIError, match="out of memory"):
                    async with client.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
                        async for _ in stream:
                            pass

    asyncio.run(main())


def test_unknown_keys_and_endpoints_are_rejected(tokenizer):
    async def main():
        async with served(tokenizer, ["yes"]) as one:
            root = one.url.rpartition("/")[0]
            async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="guessed") as client:
                with pytest.raises(openai.AuthenticationError, match="unknown base URL or API key"):
                    await client.chat.completions.create(model="m", messages=ASKED)
            async with anthropic.AsyncAnthropic(base_url=root, api_key="guessed") as client:
                with pytest.raises(anthropic.AuthenticationError, match="unknown base URL"):
                    await client.messages.create(model="m", max_tokens=9, messages=ASKED)
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x") as client:
                with pytest.raises(
                    openai.NotFoundError, match="/responses: not found; the endpoints are /v1/chat/completions"
                ):
                    await client.responses.create(model="m", input="hi")
            async with httpx.AsyncClient() as client:
                reply = await client.post(f"{one.url}/v1/chat/completions", content=b"{")
                assert reply.status_code == 400
                assert reply.json()["error"]["message"].startswith("the body is not valid JSON")

    asyncio.run(main())
