"""Rewards that call servers keep grades and failures across a resume."""

import json

from plasmid.testing.rewards import score_text
from plasmid_rewards import Judge, Product, Random, Remote

NOWHERE = "http://127.0.0.1:9"
SERVER = {"attempts": 1, "breaker_failures": 1, "breaker_pause_s": 600.0}


def judge(**settings):
    return Judge(url=NOWHERE, model="m", server=SERVER, **settings)


def as_json(state):
    return json.loads(json.dumps(state))


def test_a_restored_judge_does_not_ask_again():
    first, second = judge(), judge()
    first._remember("one", 5.0)
    first._remember("two", 7.0)
    second.restore(as_json(first.state()))
    assert second._cache == first._cache
    assert judge(cache_size=0).state() == {}


def test_grades_in_a_file_are_not_kept_twice(tmp_path):
    kept = judge(cache_file=str(tmp_path / "grades.jsonl"))
    kept._remember("one", 5.0)
    assert kept.state() == {}


def test_a_breaker_that_had_opened_is_open_after_a_resume():
    settings = {"url": NOWHERE, "server": SERVER, "on_failure": "value"}
    down = Remote(**settings)
    assert "ConnectError" in score_text(down).error
    state = as_json(down.state())
    assert state["breaker"]["failures"] == 1 and 0 < state["breaker"]["pause_s"] <= 600
    resumed = Remote(**settings)
    resumed.restore(state)
    assert "failed 1 times in a row; no request was sent" in score_text(resumed).error


def test_states_of_several_processes_are_merged():
    left, right = {"cache": {"a": 1.0}}, {"cache": {"b": 2.0}, "breaker": {"failures": 3, "pause_s": 9.0}}
    assert judge().merge([left, right]) == {"cache": {"a": 1.0, "b": 2.0}, "breaker": {"failures": 3, "pause_s": 9.0}}
    both = Product(rewards=(judge(), Random()))
    assert both.merge([{"0": left, "1": {}}, {"0": right, "1": {}}]) == {"0": judge().merge([left, right]), "1": {}}
    both.restore({"0": left, "1": {}})
    assert both.state()["0"] == left
