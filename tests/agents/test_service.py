"""Agents as a service: one program for many rollouts, and the reward that it returns."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from agent_cases import ScriptedEngine, make_rollout
from plasmid.errors import ConfigError, PluginError
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.types import StopReason
from plasmid_agents import Agent
from plasmid_agents.environments import workflows
from plasmid_agents.environments.workflows import OpenEnv, Verifiers
from plasmid_agents.reported import Reported
from plasmid_workflows.execution import execute

SERVICE = """
import asyncio, json, os, sys, time, urllib.request

def ask(task, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(task["base_url"] + "/chat/completions", body)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

async def work(number, task):
    said = await asyncio.to_thread(ask, task, task["prompt"])
    if "die" in task["prompt"]:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if "garbage" in task["prompt"]:
        print("not json", flush=True)
    if "infinite" in task["prompt"]:
        print('{"id": %d, "result": {"reward": NaN}}' % number, flush=True)
    if "flood" in task["prompt"]:
        print("x" * 300000, flush=True)
    if "hang" in task["prompt"]:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            open("cancelled", "w").close()
            raise
    line = {"error": "no\\nluck"} if "fail" in task["prompt"] else {
        "result": {"answer": said.upper(), "reward": 0.5, "pid": os.getpid(), "level": task["metadata"]["level"]}}
    print(json.dumps({"id": number, **line}), flush=True)

async def main():
    tasks = {}
    if sys.argv[1:] == ["silent"]:
        time.sleep(60)
    if sys.argv[1:] == ["broken"]:
        sys.exit("no such environment")
    print('{"ready": true}', flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        message = json.loads(line)
        if "cancel" in message:
            tasks[message["cancel"]].cancel()
        else:
            tasks[message["id"]] = asyncio.create_task(work(message["id"], message["task"]))

asyncio.run(main())
"""


@pytest.fixture
def service(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    return [sys.executable, str(path)]


def roll_out(tokenizer, settings, prompts, *, kind=Agent, together=True):
    """Return one sample of each prompt, created as by the rollout worker."""

    async def main():
        workflow = validate(kind, settings)
        engine = ScriptedEngine(tokenizer, lambda _: "hello")
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            runs = []
            for index, prompt in enumerate(prompts):
                given = replace(make_prompt(prompt), text=prompt, messages=(), metadata={"level": index})
                run = execute(workflow, make_rollout(tokenizer, engine, name=f"5/{index}"), given, 60.0)
                runs.append(run if together else await run)
            made = await asyncio.gather(*runs) if together else runs
            return [sample for ((sample),) in made]
        finally:
            await workflow.close()

    return asyncio.run(main())


def test_one_program_serves_all_rollouts(tokenizer, service):
    samples = roll_out(tokenizer, {"kind": "agent", "service": service}, ["a", "b", "c"])
    assert [sample.text for sample in samples] == ["HELLO"] * 3
    assert [sample.metadata["level"] for sample in samples] == [0, 1, 2]
    assert len({sample.metadata["pid"] for sample in samples}) == 1
    assert asyncio.run(Reported()(make_prompt(), samples[0])).value == 0.5


def test_a_program_that_died_is_started_anew(tokenizer, service):
    settings = {"kind": "agent", "service": service}
    first, failed, last = roll_out(tokenizer, settings, ["a", "die", "b"], together=False)
    assert "its process died: out of luck" in failed.error
    assert last.text == "HELLO" and last.metadata["pid"] != first.metadata["pid"]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("fail", "the agent failed: no luck"),
        ("garbage", "cannot read its output"),
        ("flood", "cannot read its output"),
        ("infinite", "NaN is not valid JSON"),
    ],
)
def test_a_failed_request_to_the_service_is_recorded_in_the_sample(tokenizer, service, prompt, error, monkeypatch):
    monkeypatch.setattr("plasmid_agents.launch.service.MAX_LINE_BYTES", 4096)
    (sample,) = roll_out(tokenizer, {"kind": "agent", "service": service}, [prompt])
    assert error in sample.error
    assert sample.stop_reason is StopReason.ERROR


def test_a_rollout_that_takes_too_long_is_cancelled_alone(tokenizer, service, tmp_path):
    settings = {"kind": "agent", "service": service, "timeout_s": 1.0}
    slow, quick, _ = roll_out(tokenizer, settings, ["hang", "a", "b"], together=False)
    assert "took longer than workflow.timeout_s = 1" in slow.error
    assert quick.text == "HELLO"
    assert (tmp_path / "cancelled").exists()


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("silent", "was not ready within workflow.start_timeout_s = 0.5"),
        ("broken", "its process died: no such environment"),
    ],
)
def test_a_service_that_does_not_start_ends_the_run(tokenizer, service, argument, error):
    settings = {"kind": "agent", "service": [*service, argument]}
    if argument == "silent":
        settings["start_timeout_s"] = 0.5
    with pytest.raises(PluginError, match=error):
        roll_out(tokenizer, settings, ["a"])


@pytest.mark.parametrize("value", [None, "1", True, float("inf")])
def test_a_reward_that_is_no_number_is_the_failure_value_with_a_reason(value):
    sample = replace(make_sample(), metadata={} if value is None else {"reward": value})
    score = asyncio.run(Reported(missing=-1.0)(make_prompt(), sample))
    assert score.value == -1.0
    assert score.error is not None and "a finite number as 'reward'" in score.error


def test_metrics_of_an_agent_become_parts_of_its_reward():
    metrics = {"steps": 3, "won": True, "name": "x", "bad": float("nan"), **{f"m{i}": i for i in range(100)}}
    sample = replace(make_sample(), metadata={"points": 2, "metrics": metrics})
    score = asyncio.run(Reported(key="points")(make_prompt(), sample))
    assert score.value == 2.0
    assert score.components["steps"] == 3.0 and not {"won", "name", "bad"} & set(score.components)
    assert len(score.components) <= 32


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        (
            Verifiers,
            {"python": "nowhere/python", "env": {"taskset": {"id": "x"}}},
            "python: no such program",
        ),
        (Verifiers, {"python": sys.executable, "env": {}}, "env must contain a taskset"),
        (OpenEnv, {"python": sys.executable, "url": "localhost:1"}, "url must begin with http://"),
    ],
)
def test_settings_of_environments_are_checked(kind, settings, error):
    with pytest.raises(ConfigError, match=error):
        validate(kind, settings)


def test_a_library_that_is_missing_is_named(tokenizer, monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(workflows.PROGRAM.read_text().replace('"verifiers.v1"', '"no_such_library"'))
    monkeypatch.setattr(workflows, "PROGRAM", program)
    settings = {"kind": "verifiers", "python": sys.executable, "env": {"taskset": {"id": "x"}}}
    with pytest.raises(PluginError, match="No module named 'no_such_library'"):
        roll_out(tokenizer, settings, ["a"], kind=Verifiers)
    with pytest.raises(PluginError, match="No module named 'no_such_library'"):
        validate(Verifiers, settings).list_tasks()
