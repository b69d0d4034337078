"""Sessions as trees: which requests continue a conversation, which ones branch, and that every sampled token is
trained on exactly once."""

import asyncio
import json

import numpy as np
import pytest
from agent_cases import CALL, FORGETS, WEATHER, ScriptedEngine, make_chat_tokenizer, make_settings, served, shown
from plasmid.types import StopReason
from plasmid_models.tokenization.tokenizer import Tokenizer

from tests.lazy_module import LazyModule

openai = LazyModule("openai")

TOOL = {"type": "function", "function": WEATHER}


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def converse(tokenizer, script, conversations, *, tools=(), **options):
    """Request one turn for each list of messages; return the texts of the replies, and the samples."""

    async def main():
        async with served(tokenizer, script, **options) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
                texts = []
                for index, messages in enumerate(conversations):
                    given = {"tools": [TOOL]} if index in tools else {}
                    reply = await client.chat.completions.create(model="m", messages=messages, **given)
                    texts.append(reply.choices[0].message.content)
            return texts, one.samples(), one.engine

    return asyncio.run(main())


def trained(tokenizer, samples):
    """Return the tokens that each sample trains on."""
    return [[text for learns, text in shown(tokenizer, sample) if learns] for sample in samples]


def test_a_conversation_is_one_sample_whose_history_is_never_tokenised_again(tokenizer):
    # the reply ends with spaces that the client does not send back
    texts, samples, engine = converse(tokenizer, ["one  ", "two"], [[user("a")], [user("a"), bot("one"), user("b")]])
    assert texts == ["one  ", "two"]
    (sample,) = samples
    assert shown(tokenizer, sample) == [
        (False, "<user>a<eos><assistant>"),
        (True, "one  <eos>"),
        (False, "<user>b<eos><assistant>"),
        (True, "two<eos>"),
    ]
    assert np.array_equal(engine.requests[1].token_ids, sample.token_ids[: len(engine.requests[1].token_ids)])
    assert sample.num_generated == int(sample.loss_mask.sum())


def test_a_turn_with_two_continuations_is_trained_once(tokenizer):
    first = [user("a")]
    _, samples, engine = converse(
        tokenizer,
        ["one", "left", "right"],
        [first, [*first, bot("one"), user("b")], [*first, bot("one"), user("c")]],
    )
    assert trained(tokenizer, samples) == [["one<eos>", "left<eos>"], ["right<eos>"]]
    assert {sample.rollout_id for sample in samples} == {"5/0"}
    assert len({sample.id for sample in samples}) == 2
    left, right = samples
    assert np.array_equal(left.token_ids[:9], right.token_ids[:9])
    assert right.versions[0].start > left.versions[0].start
    assert sum(sample.num_generated for sample in samples) == sum(len(t) + 1 for t in ("one", "left", "right"))
    assert np.array_equal(engine.requests[2].token_ids, right.token_ids[: len(engine.requests[2].token_ids)])


def test_an_edited_history_branches_at_the_last_unchanged_turn(tokenizer):
    start = [user("a"), bot("one"), user("b")]
    _, samples, _ = converse(
        tokenizer,
        ["one", "two", "three", "four"],
        [start[:1], start, [*start, bot("two"), user("c")], [*start, bot("TWO"), user("c")]],
    )
    assert trained(tokenizer, samples) == [["one<eos>", "two<eos>", "three<eos>"], ["four<eos>"]]
    assert shown(tokenizer, samples[1])[0] == (
        False,
        "<user>a<eos><assistant>one<eos><user>b<eos><assistant>TWO<eos><user>c<eos><assistant>",
    )


def test_a_sub_agent_is_a_separate_branch(tokenizer):
    main = [user("plan")]
    _, samples, _ = converse(
        tokenizer,
        ["ask help", "helped", "done"],
        [main, [{"role": "system", "content": "helper"}, user("help")], [*main, bot("ask help"), user("helped")]],
    )
    assert trained(tokenizer, samples) == [["helped<eos>"], ["ask help<eos>", "done<eos>"]]
    assert [sample.metadata["branch"] for sample in samples] == [0, 1]
    assert [sample.text for sample in samples] == ["done", "done"]


def test_other_tools_are_another_conversation(tokenizer):
    start = [user("a")]
    _, samples, _ = converse(tokenizer, ["one", "two"], [start, [*start, bot("one"), user("b")]], tools=[1])
    assert trained(tokenizer, samples) == [["one<eos>"], ["two<eos>"]]
    assert "weather" in shown(tokenizer, samples[1])[0][1]


def test_examples_in_the_prompt_are_not_trained_on(tokenizer):
    _, samples, _ = converse(tokenizer, ["4"], [[user("1+1"), bot("2"), user("2+2")]])
    assert trained(tokenizer, samples) == [["4<eos>"]]


def test_a_template_that_drops_reasoning_starts_a_new_sample(tmp_path):
    forgetful = tmp_path / "forgets.jinja"
    forgetful.write_text(FORGETS)
    tokenizer = Tokenizer(make_chat_tokenizer(tmp_path / "tokenizer"), chat_template=str(forgetful))
    script = ["<think>long/think>one", "two"]
    asked = [[user("a")], [user("a"), bot(script[0]), user("b")]]
    _, samples, engine = converse(tokenizer, script, asked)
    assert trained(tokenizer, samples) == [["<think>long/think>one<eos>"], ["two<eos>"]]
    seen = tokenizer.decode(engine.requests[1].token_ids, keep_special=True)
    assert seen == "<user>a<eos><assistant>one<eos><user>b<eos><assistant>"
    _, samples, _ = converse(tokenizer, script, asked, settings=make_settings(keep_past=True))
    assert trained(tokenizer, samples) == [["<think>long/think>one<eos>", "two<eos>"]]


def test_calls_that_cannot_be_read_stay_text(tokenizer):
    broken = CALL.replace("}}<", "}<")
    texts, samples, _ = converse(tokenizer, [broken], [[user("a")]], tools=[0])
    assert texts == [broken]
    assert trained(tokenizer, samples) == [[f"{broken}<eos>"]]


def test_a_turn_that_was_cut_off_is_ended_by_tokens_that_are_not_trained_on(tokenizer):
    _, samples, _ = converse(
        tokenizer,
        ["hello there", "two"],
        [[user("a")], [user("a"), bot("hello"), user("b")]],
        sampling={"max_new_tokens": 5},
    )
    assert shown(tokenizer, samples[0])[1:3] == [(True, "hello"), (False, "<eos><user>b<eos><assistant>")]


def test_a_weight_sync_in_the_middle_of_a_turn_is_not_noticed_by_the_agent(tokenizer):
    engine = ScriptedEngine(tokenizer, ["hello there", "two"])
    engine.cut_at = [5, 2]
    texts, samples, _ = converse(tokenizer, engine, [[user("a")], [user("a"), bot("hello there"), user("b")]])
    assert texts == ["hello there", "two"]
    (sample,) = samples
    assert [(s.version, s.end - s.start) for s in sample.versions] == [(0, 5), (1, 2), (2, 5), (2, 4)]
    assert sample.oldest_version == 0
    start = sample.versions[0].start
    assert sample.rollout_logprobs[start : start + 12] == pytest.approx([-1.0 - i - 0.01 for i in range(12)], abs=1e-4)
    assert [len(request.token_ids) - request.num_generated for request in engine.requests[:3]] == [start] * 3


def test_a_spent_budget_ends_the_rollout_as_cut_off(tokenizer):
    async def main():
        async with served(tokenizer, ["one", "two", "three"], settings=make_settings(max_turns=2)) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x") as client:
                for text in "ab":
                    await client.chat.completions.create(model="m", messages=[user(text)])
                with pytest.raises(openai.RateLimitError) as error:
                    await client.chat.completions.create(model="m", messages=[user("c")])
            return error.value, one.samples(), len(one.engine.requests)

    error, samples, requests = asyncio.run(main())
    assert error.body["message"] == "this rollout has used up its budget, workflow.max_turns = 2"
    assert error.body["code"] == "insufficient_quota"
    assert requests == 2
    assert {sample.stop_reason for sample in samples} == {StopReason.LENGTH}


def test_the_budget_of_tokens_shortens_the_last_turn(tokenizer):
    async def main():
        async with served(tokenizer, ["hello there", "you"], settings=make_settings(max_tokens=14)) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x") as client:
                for text in "ab":
                    last = await client.chat.completions.create(model="m", messages=[user(text)])
                with pytest.raises(openai.RateLimitError, match=r"workflow\.max_tokens = 14"):
                    await client.chat.completions.create(model="m", messages=[user("c")])
            return last.choices[0]

    choice = asyncio.run(main())
    assert (choice.message.content, choice.finish_reason) == ("yo", "length")


def test_calls_between_special_tokens_are_found(tmp_path):
    file = make_chat_tokenizer(tmp_path) / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["vocab"] |= {"<tool_call>": 200, "</tool_call>": 201}
    template = data["added_tokens"][0]
    data["added_tokens"] += [{**template, "id": i, "content": c} for c, i in list(data["model"]["vocab"].items())[-2:]]
    file.write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path)
    assert "<tool_call>" not in tokenizer.decode(tokenizer.encode(CALL))

    async def main():
        async with served(tokenizer, [f"look {CALL}", "rain"]) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
                ask = {"model": "m", "tools": [TOOL]}
                first = (await client.chat.completions.create(messages=[user("a")], **ask)).choices[0].message
                result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
                await client.chat.completions.create(messages=[user("a"), first.model_dump(), result], **ask)
            return first, one.samples()

    first, samples = asyncio.run(main())
    assert first.content == "look"
    assert first.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert trained(tokenizer, samples) == [[f"look {CALL}<eos>", "rain<eos>"]]
