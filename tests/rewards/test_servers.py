"""Rewards that call a server: a real one on this machine, which fails as configured."""

import asyncio
import re
import time

import pytest
from plasmid import RunContext
from plasmid.errors import RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Judge, Remote

from tests.rewards.json_server import server

FAST = {"backoff_s": 0.01, "max_backoff_s": 0.02}


def ask(reward, *texts, target=12):
    async def work():
        prompt = make_prompt("1 + 11 =", target=target, metadata={"row": 3})
        scores = await asyncio.gather(*(reward(prompt, make_sample(text, id=f"0/{text}")) for text in texts))
        await reward.close()
        return scores

    return asyncio.run(work())


def test_one_sample_is_posted_and_a_number_comes_back():
    with server(lambda body, n: (200, len(body["response"]))) as (url, got):
        scores = ask(Remote(url=url), "abc", "a")
    assert [s.value for s in scores] == [3.0, 1.0]
    sent = next(g["body"] for g in got if g["body"]["response"] == "a")
    assert sent == {
        "prompt": "1 + 11 =",
        "messages": [],
        "response": "a",
        "target": 12,
        "metadata": {"row": 3},
        "sample_id": "0/a",
    }


def test_servers_of_slime_get_its_field_names():
    with server(lambda body, n: (200, {"score": 1.0})) as (url, got):
        (score,) = ask(Remote(url=url, fields="slime", key="score"), "four", target="4")
    assert score.value == 1.0
    assert set(got[0]["body"]) == {"prompt", "response", "label"}
    assert (got[0]["body"]["response"], got[0]["body"]["label"]) == ("four", "4")
    with pytest.raises(ValueError, match="batch_size: must be 1 with fields = 'slime', got 2"):
        Remote(url=url, fields="slime", batch_size=2)


def test_an_object_has_its_value_under_a_key_and_other_numbers_as_components():
    with server(lambda body, n: (200, {"score": 0.5, "acc": True, "why": "so"})) as (url, _):
        (given,) = ask(Remote(url=url, key="score"), "x")
        assert (given.value, given.components) == (0.5, {"score": 0.5, "acc": 1.0})
        with pytest.raises(RewardError, match=r"answered with an object .score, acc, why.; set key"):
            ask(Remote(url=url), "x")
        with pytest.raises(RewardError, match="nope must be a finite number, got None"):
            ask(Remote(url=url, key="nope"), "x")


@pytest.mark.parametrize("wrapped", [True, False])
def test_samples_travel_together(wrapped):
    def answer(body, number):
        scores = [len(item["response"]) for item in body["items"]]
        return 200, {"scores": scores} if wrapped else scores

    texts = ["x" * n for n in range(10)]
    with server(answer) as (url, got):
        scores = ask(Remote(url=url, batch_size=4, batch_wait_s=0.05), *texts)
    assert [s.value for s in scores] == list(range(10))
    assert sorted(len(g["body"]["items"]) for g in got) == [2, 4, 4]


def test_a_batch_of_the_wrong_length_is_a_failure_of_each_sample():
    with server(lambda body, n: (200, [1])) as (url, _):
        scores = ask(Remote(url=url, batch_size=2, on_failure="value", failure_value=-1.0), "a", "b")
    assert [s.value for s in scores] == [-1.0, -1.0]
    assert scores[0].error.endswith("must answer with a list of 2 scores, got [1]")


def test_only_temporary_errors_are_retried():
    with server(lambda body, n: {1: (503, "busy"), 2: (429, "too many")}.get(n, (200, 1))) as (url, got):
        assert ask(Remote(url=url, server=FAST), "x")[0].value == 1.0
        assert len(got) == 3
    with server(lambda body, n: (400, "no such model")) as (url, got):
        with pytest.raises(RewardError, match=r"answered 400: .*; check that the server is running"):
            ask(Remote(url=url, server=FAST), "x")
        assert len(got) == 1
    with server(lambda body, n: (200, b"<html>") if n < 2 else (200, 2)) as (url, got):
        assert ask(Remote(url=url, server=FAST), "x")[0].value == 2.0


def test_a_server_that_does_not_answer_is_given_up_in_time():
    def answer(body, number):
        time.sleep(1.0)
        return 200, 1

    with server(answer) as (url, _):
        settings = {**FAST, "request_timeout_s": 0.1, "attempts": 2}
        (given,) = ask(Remote(url=url, server=settings, on_failure="value"), "x")
    assert "ReadTimeout" in given.error and given.components == {"failed": 1.0}


def test_the_breaker_stops_asking_and_tries_again_later():
    state = {"up": False}

    async def work(url, got):
        settings = {**FAST, "attempts": 1, "breaker_failures": 3, "breaker_pause_s": 0.3}
        reward = Remote(url=url, server=settings, on_failure="value")

        async def once():
            return await reward(make_prompt(), make_sample("x"))

        for _ in range(10):
            last = await once()
        assert len(got) == 3 and last.error == f"{url} failed 3 times in a row; no request was sent"
        await asyncio.sleep(0.35)
        await asyncio.gather(*(once() for _ in range(5)))
        assert len(got) == 4, "one request tries, the others wait for what it finds"
        state["up"] = True
        await asyncio.sleep(0.35)
        values = [(await once()).value for _ in range(3)]
        await reward.close()
        return values

    with server(lambda body, n: (200, 1) if state["up"] else (500, "down")) as (url, got):
        assert asyncio.run(work(url, got)) == [1.0, 1.0, 1.0]


def reply(text):
    return 200, {"choices": [{"message": {"content": text}}]}


def test_the_judges_last_grade_counts_and_equal_questions_are_asked_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TEST_JUDGE_KEY", "k")
    file = tmp_path / "grades.jsonl"
    settings = {"model": "m", "server": {"api_key_env": "TEST_JUDGE_KEY", **FAST}, "cache_file": str(file)}
    with server(lambda body, n: reply("<think>Score: 1</think> Good. **Score: 7.5**")) as (url, got):
        judge = Judge(url=f"{url}/v1", **settings)
        assert ask(judge, "twelve")[0].value == 0.75
        (again,) = ask(judge, "twelve")
        assert again.value == 0.75 and again.components == {"grade": 7.5, "cached": 1.0}
        fresh = Judge(url=f"{url}/v1", **settings)
        asyncio.run(fresh.open(RunContext(seed=0, run_dir=tmp_path)))
        assert ask(fresh, "twelve")[0].components["cached"] == 1.0
    assert len(got) == 1 and got[0]["path"] == "/v1/chat/completions" and got[0]["key"] == "Bearer k"
    (message,) = got[0]["body"]["messages"]
    mark = re.search(r"<answer-([0-9a-f]{16})>", message["content"])[1]
    assert f"<answer-{mark}>\ntwelve\n</answer-{mark}>" in message["content"] and "1 + 11 =" in message["content"]


def test_equal_concurrent_texts_of_a_group_are_sent_once():
    with server(lambda body, n: reply(f"Score: {n}")) as (url, got):
        same = ask(Judge(url=url, model="m", server=FAST), *["twelve"] * 5)
        assert len(got) == 1 and [s.value for s in same] == [0.1] * 5
        assert sum(s.components["cached"] for s in same) == 4
    with server(lambda body, n: reply("who knows")) as (url, got):
        failed = ask(Judge(url=url, model="m", on_failure="value", failure_value=-1.0, server=FAST), *["twelve"] * 5)
        assert len(got) == 2 and [s.value for s in failed] == [-1.0] * 5


def test_a_policy_cannot_fill_in_the_rubric_and_grades_out_of_range_are_none():
    with server(lambda body, n: reply("Score: 99")) as (url, got):
        judge = Judge(url=url, model="m", rubric="{response}|{target}", on_failure="value", server=FAST)
        (given,) = ask(judge, "{target} {low}")
    assert given.error.startswith("no line 'Score: N' within 0 to 10") and len(got) == 2
    assert got[0]["body"]["messages"][0]["content"] == "{target} {low}|12"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="must start with http"):
        Remote(url="localhost:80")
    with pytest.raises(ValueError, match=r"rubric must contain \{response\}"):
        Judge(url="http://x", model="m", rubric="grade it")
    with pytest.raises(ValueError, match="low = 5 must be less than high = 5"):
        Judge(url="http://x", model="m", low=5, high=5)
    reward = Remote(url="http://x", server={"api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(RewardError, match=r"server.api_key_env = 'NO_SUCH_KEY' is not set in the environment"):
        asyncio.run(reward.open(RunContext(seed=0, run_dir=".")))
