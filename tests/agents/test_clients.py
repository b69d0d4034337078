"""The real clients of OpenAI and Anthropic against the server: replies, streams, tools, stop texts, counts."""

import asyncio
import json

import pytest
from agent_cases import CALL, WEATHER, make_settings, served, shown

from tests.lazy_module import LazyModule

anthropic = LazyModule("anthropic")
openai = LazyModule("openai")

TOOL = {"type": "function", "function": WEATHER}
ASKED = [{"role": "user", "content": "weather?"}]


def openai_of(one):
    return openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="any", max_retries=0)


def anthropic_of(one):
    return anthropic.AsyncAnthropic(base_url=one.url, api_key="any", max_retries=0)


def test_a_chat_completion_is_what_the_policy_drew(tokenizer):
    async def main():
        async with served(tokenizer, ["hello there"]) as one, openai_of(one) as client:
            reply = await client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hi"}])
            (sample,) = one.samples()
        return reply, sample

    reply, sample = asyncio.run(main())
    assert reply.choices[0].message.content == "hello there"
    assert (reply.choices[0].finish_reason, reply.model) == ("stop", "gpt-5")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len("hi") + 3, len("hello there") + 1)
    assert shown(tokenizer, sample) == [(False, "<user>hi<eos><assistant>"), (True, "hello there<eos>")]
    assert sample.rollout_logprobs[sample.loss_mask].tolist() == pytest.approx([-1.01 - i for i in range(12)])
    assert [(s.version, s.start, s.end) for s in sample.versions] == [(0, 5, 17)]


def test_a_message_of_anthropic_is_what_the_policy_drew(tokenizer):
    async def main():
        async with served(tokenizer, ["hello there"]) as one, anthropic_of(one) as client:
            reply = await client.messages.create(
                model="claude", max_tokens=50, system="be brief", messages=[{"role": "user", "content": "hi"}]
            )
            (sample,) = one.samples()
        return reply, sample

    reply, sample = asyncio.run(main())
    assert [(block.type, block.text) for block in reply.content] == [("text", "hello there")]
    assert (reply.stop_reason, reply.model, reply.role) == ("end_turn", "claude", "assistant")
    assert reply.usage.output_tokens == 12
    assert shown(tokenizer, sample)[0] == (False, "<system>be brief<eos><user>hi<eos><assistant>")


def test_a_tool_is_called_and_its_result_continues_the_tokens_openai(tokenizer):
    async def main():
        async with served(tokenizer, [f"let me see {CALL}", "it rains"]) as one, openai_of(one) as client:
            first = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
            message = first.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
            history = [*ASKED, message.model_dump(), result]
            second = await client.chat.completions.create(model="m", messages=history, tools=[TOOL])
            return first, second, one.samples()

    first, second, samples = asyncio.run(main())
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content == "let me see"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert second.choices[0].message.content == "it rains"
    (sample,) = samples
    runs = shown(tokenizer, sample)
    assert [trained for trained, _ in runs] == [False, True, False, True]
    assert runs[1] == (True, f"let me see {CALL}<eos>")  # as drawn, though the client sent it back in another form
    assert runs[2] == (False, "<user>result:rain<eos><assistant>")
    assert runs[3] == (True, "it rains<eos>")


def test_a_tool_is_called_and_its_result_continues_the_tokens_anthropic(tokenizer):
    tool = {"name": "weather", "description": "the weather", "input_schema": WEATHER["parameters"]}

    async def main():
        async with served(tokenizer, [f"let me see {CALL}", "it rains"]) as one, anthropic_of(one) as client:
            ask = {"model": "m", "max_tokens": 100, "tools": [tool]}
            first = await client.messages.create(messages=ASKED, **ask)
            results = [{"type": "tool_result", "tool_use_id": first.content[1].id, "content": "rain"}]
            history = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            second = await client.messages.create(messages=history, **ask)
            return first, second, one.samples()

    first, second, samples = asyncio.run(main())
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.content[1].name, first.content[1].input) == ("weather", {"city": "Oslo"})
    assert second.content[0].text == "it rains"
    (sample,) = samples
    assert [text for trained, text in shown(tokenizer, sample) if trained] == [
        f"let me see {CALL}<eos>",
        "it rains<eos>",
    ]


def test_streams_of_openai_add_up_to_the_reply(tokenizer):
    text = "a long answer " * 6
    strict = {"type": "function", "function": {**WEATHER, "strict": True}}

    async def main():
        settings = make_settings(unsupported_options="ignore")
        async with served(tokenizer, [text, f"so {CALL}"], settings=settings) as one, openai_of(one) as client:
            plain = await client.chat.completions.create(
                model="m", messages=ASKED, stream=True, stream_options={"include_usage": True}
            )
            first = [chunk async for chunk in plain]
            async with client.chat.completions.stream(model="m", messages=ASKED, tools=[strict]) as stream:
                async for _ in stream:
                    pass
                return first, await stream.get_final_completion(), one.samples()

    chunks, second, samples = asyncio.run(main())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert len(chunks) > 4
    assert chunks[-1].usage.completion_tokens == len(text) + 1
    (call,) = second.choices[0].message.tool_calls
    assert second.choices[0].message.content == "so"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert second.choices[0].finish_reason == "tool_calls"
    assert len(samples) == 2


def test_streams_of_anthropic_add_up_to_the_reply(tokenizer):
    tool = {"name": "weather", "input_schema": WEATHER["parameters"]}

    async def main():
        ask = {"model": "m", "max_tokens": 100, "messages": ASKED, "tools": [tool]}
        async with (
            served(tokenizer, [f"so {CALL}"]) as one,
            anthropic_of(one) as client,
            client.messages.stream(**ask) as stream,
        ):
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_message(), one.samples()

    kinds, message, samples = asyncio.run(main())
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert message.content[0].text == "so"
    assert message.content[1].input == {"city": "Oslo"}
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(f"so {CALL}") + 1)
    assert message.usage.input_tokens > 10
    assert len(samples) == 1


def test_stop_texts_end_a_turn_and_are_left_out_of_the_reply(tokenizer):
    async def main():
        async with served(tokenizer, ["one. two", "one. two"]) as one:
            async with openai_of(one) as client:
                first = await client.chat.completions.create(model="m", messages=ASKED, stop=[". "])
            async with anthropic_of(one) as client:
                ask = {"model": "m", "max_tokens": 50, "stop_sequences": [". "]}
                second = await client.messages.create(messages=[{"role": "user", "content": "again"}], **ask)
            return first, second, one.samples()

    first, second, samples = asyncio.run(main())
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("one", "stop")
    assert (second.content[0].text, second.stop_reason, second.stop_sequence) == ("one", "stop_sequence", ". ")
    assert [shown(tokenizer, sample)[-1] for sample in samples] == [(True, "one. "), (True, "one. ")]


def test_a_truncated_turn_has_finish_reason_length(tokenizer):
    async def main():
        async with served(tokenizer, ["hello there"] * 2) as one:
            async with openai_of(one) as client:
                first = await client.chat.completions.create(model="m", messages=ASKED, max_completion_tokens=5)
            async with anthropic_of(one) as client:
                second = await client.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}]
                )
            return first, second

    first, second = asyncio.run(main())
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("hello", "length")
    assert (second.content[0].text, second.stop_reason) == ("hello", "max_tokens")


def test_a_text_is_continued_from_its_tokens(tokenizer):
    async def main():
        async with served(tokenizer, ["thought: look\nobs", "done"]) as one, openai_of(one) as client:
            first = await client.completions.create(model="m", prompt="q: 1+1\n", stop="\nobs", max_tokens=80)
            prompt = f"q: 1+1\n{first.choices[0].text}\nobs: 2\n"
            stream = await client.completions.create(model="m", prompt=prompt, stream=True)
            second = [chunk async for chunk in stream]
            return first, second, one.samples()

    first, second, samples = asyncio.run(main())
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("thought: look", "stop")
    assert "".join(chunk.choices[0].text for chunk in second) == "done"
    (sample,) = samples
    assert shown(tokenizer, sample) == [
        (False, "q: 1+1\n"),
        (True, "thought: look\nobs"),
        (False, ": 2\n"),
        (True, "done<eos>"),
    ]


def test_clients_can_list_models_and_count_tokens(tokenizer):
    async def main():
        async with served(tokenizer, []) as one:
            async with openai_of(one) as client:
                names = [model.id async for model in client.models.list()]
            async with anthropic_of(one) as client:
                count = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "four"}])
            return names, count.input_tokens

    assert asyncio.run(main()) == (["policy"], 4 + 3)


def test_the_api_key_alone_names_a_session(tokenizer):
    async def main():
        async with served(tokenizer, ["one", "two"]) as one:
            root = one.url.rpartition("/")[0]
            async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=one.key) as client:
                first = await client.chat.completions.create(model="m", messages=ASKED)
            async with anthropic.AsyncAnthropic(base_url=root, api_key=one.key) as client:
                second = await client.messages.create(model="m", max_tokens=9, messages=ASKED)
            return first.choices[0].message.content, second.content[0].text

    assert asyncio.run(main()) == ("one", "two")


def test_one_call_is_returned_if_parallel_calls_are_disabled(tokenizer):
    async def main():
        async with served(tokenizer, [CALL + CALL, CALL + CALL], settings=make_settings()) as one:
            async with openai_of(one) as client:
                ask = {"model": "m", "messages": ASKED, "tools": [TOOL]}
                both = await client.chat.completions.create(**ask)
                single = await client.chat.completions.create(**ask, parallel_tool_calls=False)
            return [reply.choices[0].message.tool_calls for reply in (both, single)]

    both, single = asyncio.run(main())
    assert len(both) == 2 and both[0].id != both[1].id
    assert len(single) == 1


def test_channels_of_harmony_become_reasoning_text_and_calls(tokenizer):
    analysis, commentary = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant<|channel|>commentary"
    call = ' to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>'
    script = [f"{analysis}{commentary}{call}", f"{analysis}<|start|>assistant<|channel|>final<|message|>yes"]
    settings = make_settings(reasoning="harmony", tool_calls="harmony")

    async def main():
        async with served(tokenizer, script, settings=settings) as one, openai_of(one) as client:
            ask = {"model": "m", "messages": ASKED, "tools": [{"type": "function", "function": WEATHER}]}
            replies = [await client.chat.completions.create(**ask) for _ in script]
        return [reply.choices[0].message for reply in replies]

    first, second = asyncio.run(main())
    assert first.reasoning_content == "hm" and not first.content
    assert [(made.function.name, made.function.arguments) for made in first.tool_calls] == [
        ("weather", '{"city": "Bonn"}')
    ]
    assert (second.reasoning_content, second.content, second.tool_calls) == ("hm", "yes", None)


def test_reasoning_is_separated_from_text_if_configured(tokenizer):
    script = ["<think>hm</think>\n\nyes", f"<think>hm {CALL}</think>{CALL}", "still</think>no"]
    ask = {"model": "m", "messages": ASKED}
    tool = {"name": "weather", "input_schema": WEATHER["parameters"]}

    async def main():
        async with served(tokenizer, script, settings=make_settings(reasoning="think")) as one:
            async with openai_of(one) as client:
                first = await client.chat.completions.create(**ask)
            async with anthropic_of(one) as client:
                second = await client.messages.create(**ask, max_tokens=200, tools=[tool])
                async with client.messages.stream(**ask, max_tokens=50) as stream:
                    third = await stream.get_final_message()
                history = [*ASKED, {"role": "assistant", "content": third.content}, {"role": "user", "content": "so?"}]
                count = await client.messages.count_tokens(model="m", messages=history)
        return first.choices[0].message, second.content, third.content, count.input_tokens, one.samples()

    first, second, third, count, samples = asyncio.run(main())
    assert (first.reasoning_content, first.content) == ("hm", "yes")
    assert [(block.type, getattr(block, "thinking", "")) for block in second] == [
        ("thinking", f"hm {CALL}"),
        ("tool_use", ""),
    ]
    assert [(block.type, getattr(block, "thinking", "")) for block in third] == [("thinking", "still"), ("text", "")]
    # the reply is known again without its reasoning, and continues with it
    assert count == len("weather?" + "still</think>no" + "so?") + 7
    assert len(samples) == 3
