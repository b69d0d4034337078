"""Many concurrent sessions, clients that disconnect, and processes that an agent leaves behind."""

import asyncio
import json

import httpx
import pytest
from agent_cases import ScriptedEngine, make_rollout, make_settings, served, shown
from plasmid.testing.rewards import make_prompt
from plasmid_agents.server import AgentServer
from plasmid_agents.session import Session

from tests.lazy_module import LazyModule

anthropic = LazyModule("anthropic")
openai = LazyModule("openai")

ASKED = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": ASKED, "max_tokens": 9}


async def until(condition):
    """Wait until a condition holds; otherwise the test's own time limit ends the wait."""
    while not condition():
        await asyncio.sleep(0.01)


def test_parallel_sessions_of_one_server_do_not_mix(tokenizer):
    async def talk(url, number):
        history = []
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            for turn in range(4):
                history.append({"role": "user", "content": f"{number}.{turn}"})
                reply = await client.chat.completions.create(model="m", messages=history)
                history.append({"role": "assistant", "content": reply.choices[0].message.content})

    async def main():
        server = AgentServer(host="127.0.0.1", advertised="127.0.0.1")
        await server.start()
        echo = ScriptedEngine(tokenizer, lambda text: text[-20:].upper())
        rollouts = [make_rollout(tokenizer, echo, name=f"5/{i}") for i in range(8)]
        sessions = [Session(rollout, make_settings()) for rollout in rollouts]
        contexts = [server.serve_session(session) for session in sessions]
        urls = [context.__enter__()[0] for context in contexts]
        await asyncio.gather(*(talk(url, number) for number, url in enumerate(urls)))
        for context in contexts:
            context.__exit__(None, None, None)
        await server.close()
        return [session.samples(make_prompt("unused"), answer=None, metadata={}) for session in sessions]

    made = asyncio.run(main())
    for number, samples in enumerate(made):
        (sample,) = samples
        assert sample.rollout_id == f"5/{number}"
        told = [text for learns, text in shown(tokenizer, sample) if not learns]
        assert [text.rpartition("<user>")[2] for text in told] == [f"{number}.{t}<eos><assistant>" for t in range(4)]


def test_parallel_requests_of_one_session_are_branches(tokenizer):
    async def main():
        async with served(tokenizer, lambda text: text.upper()) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
                asked = [[{"role": "user", "content": f"part {i}"}] for i in range(5)]
                replies = await asyncio.gather(
                    *(client.chat.completions.create(model="m", messages=messages) for messages in asked)
                )
            return [reply.choices[0].message.content for reply in replies], one.samples()

    texts, samples = asyncio.run(main())
    assert texts == [f"PART {i}" for i in range(5)]
    assert sorted(shown(tokenizer, sample)[1][1] for sample in samples) == [f"PART {i}<eos>" for i in range(5)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_the_request_of_a_disconnected_client_is_aborted(tokenizer, path, stream):
    async def main():
        engine = ScriptedEngine(tokenizer, ["unheard", "heard"])
        engine.hold.clear()
        async with served(tokenizer, engine) as one, httpx.AsyncClient() as client:
            url = f"{one.url}/v1/{path}"
            request = asyncio.create_task(client.post(url, json={**BODY, "stream": stream}))
            await until(lambda: engine.requests)
            request.cancel()
            await until(lambda: engine.aborted)
            engine.hold.set()
            await client.post(url, json=BODY)
            return engine, one.samples()

    engine, samples = asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.aborted == ["5/0#0"]
    assert len(samples) == 1


def test_a_silent_stream_shows_signs_of_life(tokenizer):
    async def main():
        engine = ScriptedEngine(tokenizer, ["yes"] * 3)
        engine.hold.clear()
        async with served(tokenizer, engine, keep_alive_s=0.01) as one, httpx.AsyncClient() as client:
            url = f"{one.url}/v1/chat/completions"
            async with client.stream("POST", url, json={**BODY, "stream": True}) as response:
                lines = response.aiter_lines()
                first = await anext(lines)
                engine.hold.set()
                rest = [line async for line in lines]
            # clients know such lines and read over them
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as patient:
                stream = await patient.chat.completions.create(model="m", messages=ASKED, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            async with (
                anthropic.AsyncAnthropic(base_url=one.url, api_key="x", max_retries=0) as patient,
                patient.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream,
            ):
                message = await stream.get_final_message()
        return first, rest, text, message.content[0].text

    first, rest, text, message = asyncio.run(asyncio.wait_for(main(), 60))
    assert first == ": waiting for the policy"
    assert rest[-2] == "data: [DONE]"
    assert json.loads(next(line for line in rest if line.startswith("data: "))[6:])["choices"][0]["delta"]
    assert (text, message) == ("yes", "yes")


def test_ending_a_session_aborts_open_requests(tokenizer):
    async def main():
        engine = ScriptedEngine(tokenizer, ["late"])
        engine.hold.clear()
        async with served(tokenizer, engine) as one:
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
                request = asyncio.create_task(client.chat.completions.create(model="m", messages=ASKED))
                await until(lambda: engine.requests)
                await one.session.close()
                with pytest.raises(openai.AuthenticationError, match="the rollout has ended"):
                    await request
            return engine.aborted, one.session.num_turns, one.session.error

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (["5/0#0"], 0, None)
