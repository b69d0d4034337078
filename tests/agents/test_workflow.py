"""The workflow: agents as functions and programs, their inputs, their results, and their failures."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from agent_cases import ScriptedEngine, make_rollout, shown
from plasmid.errors import ConfigError, PluginError
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.types import StopReason
from plasmid_agents import Agent
from plasmid_agents.reported import Reported
from plasmid_agents.workflow import Format
from plasmid_sandbox.confinement import landlock
from plasmid_workflows.execution import execute
from plasmid_workflows.testing import check_workflow
from plasmid_workflows.tools.tool_calls import PARSERS

AGENTS = """
import os, random, subprocess, sys, time, json, urllib.request

def ask(text, base_url=None):
    url = (base_url or os.environ["OPENAI_BASE_URL"]) + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def plain(prompt):
    ask(prompt)

def answers(prompt, messages, metadata, base_url, api_key, seed):
    assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == api_key
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] == base_url
    assert messages == [{"role": "user", "content": prompt}]
    said = ask(prompt, base_url)
    return {"answer": said.upper(), "level": metadata["level"], "draw": random.random()}

async def coroutine(prompt):
    return ask(prompt) + "!"

def silent(prompt):
    return "I know it all"

def raises(prompt):
    ask(prompt)
    raise KeyError("no such thing")

def exits(prompt):
    sys.exit("enough")

def dies(prompt):
    os.abort()

def sleeps(prompt):
    ask(prompt)
    child = subprocess.Popen(["sleep", "600"])
    with open(metadata_file(), "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def metadata_file():
    return os.environ["PID_FILE"]

def greedy(prompt):
    for turn in range(10):
        ask(f"{prompt} {turn}")

def plays(prompt):
    # two turns of one conversation, and a turn of another one between them
    messages = [{"role": "user", "content": prompt}]
    for text in ("go on", ""):
        body = json.dumps({"messages": messages}).encode()
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body)) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
        messages.append({"role": "user", "content": text})
        if text:
            ask("help")
    return {"reward": 1.75, "turn_rewards": [0.5, -1.0, 2.0]}

def returns_a_number(prompt):
    ask(prompt)
    return 5

NOT_A_FUNCTION = 1
"""
PROGRAM = """
import json, os, sys, urllib.request
prompt = sys.stdin.read()
assert open(os.environ["PLASMID_PROMPT_FILE"]).read() == prompt
assert json.load(open(os.environ["PLASMID_TASK_FILE"]))["messages"][0]["content"] == prompt
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
said = json.load(urllib.request.urlopen(urllib.request.Request(url, body)))["choices"][0]["message"]["content"]
print("thinking", file=sys.stderr)
print("answer:", said)
if "fail" in prompt:
    sys.exit("it failed")
"""


@pytest.fixture
def agents(tmp_path) -> Path:
    path = tmp_path / "some_agents.py"
    path.write_text(AGENTS)
    return path


@pytest.fixture
def program(tmp_path) -> tuple[str, str]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return sys.executable, str(path)


def roll_out(tokenizer, settings, *, script=("hello",), prompt="hi", rollouts=1):
    """Return the samples of each rollout of one prompt, created as by the rollout worker, and the engine."""
    given = make_prompt(prompt)
    given = replace(given, text=prompt, messages=(), metadata={"level": 3})

    async def main():
        workflow = validate(Agent, {"kind": "agent", **settings})
        engine = ScriptedEngine(tokenizer, script if callable(script) else list(script) * rollouts)
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            runs = [make_rollout(tokenizer, engine, name=f"5/{i}") for i in range(rollouts)]
            return await asyncio.gather(*(execute(workflow, run, given, 60.0) for run in runs)), engine
        finally:
            await workflow.close()

    return asyncio.run(main())


def one(tokenizer, settings, **options):
    """Return the only sample of one rollout."""
    ((sample,),), _ = roll_out(tokenizer, settings, **options)
    return sample


def test_a_function_is_an_agent(tokenizer, agents):
    sample = one(tokenizer, {"function": f"{agents}:plain"})
    assert shown(tokenizer, sample) == [(False, "<user>hi<eos><assistant>"), (True, "hello<eos>")]
    assert (sample.text, sample.stop_reason, sample.prompt_id) == ("hello", StopReason.STOP, "test:1")
    assert sample.metadata == {"branch": 0, "branches": 1, "turns": 1}


def test_rewards_receive_the_return_value_of_a_function(tokenizer, agents):
    sample = one(tokenizer, {"function": f"{agents}:answers"})
    assert sample.text == "HELLO"
    assert sample.metadata["level"] == 3
    assert one(tokenizer, {"function": f"{agents}:coroutine"}).text == "hello!"


def test_rewards_of_turns_belong_to_the_last_tokens_of_the_turns(tokenizer, agents):
    ((helped, played),), _ = roll_out(tokenizer, {"function": f"{agents}:plays"}, script=("one", "two", "three"))
    for sample, expected in ((helped, {"two<eos>": -1.0}), (played, {"one<eos>": 0.5, "three<eos>": 2.0})):
        score = asyncio.run(Reported()(make_prompt(), sample))
        assert (score.value, score.error) == (1.75, None)
        turns = {turn: position for turn, position in zip(expected, sorted(score.token_rewards), strict=True)}
        assert {turn: score.token_rewards[position] for turn, position in turns.items()} == expected
        for turn, position in turns.items():
            before = tokenizer.decode(sample.token_ids[: position + 1], keep_special=True)
            assert before.endswith(f"<assistant>{turn}")
            assert sample.loss_mask[position]


@pytest.mark.parametrize("turns", [[0.5], [0.5, 1.0, 1.0], [0.5, None], [0.5, float("nan")], {"0": 0.5, "1": 1.0}, 3])
def test_rewards_that_are_not_one_number_per_turn_are_the_failure_value_with_a_reason(turns):
    metadata = {"reward": 1.5, "turn_rewards": turns, "turn_ends": [3, 7]}
    score = asyncio.run(Reported(missing=-1.0)(make_prompt(), make_sample(num_generated=8, metadata=metadata)))
    assert (score.value, score.token_rewards) == (-1.0, {})
    assert score.error == (f"the agent must return 2 finite numbers as 'turn_rewards', one per turn, got {turns!r}")


def test_rollouts_draw_differently_and_repeat_themselves(tokenizer, agents):
    settings = {"function": f"{agents}:answers"}
    first, second = (
        [sample.metadata["draw"] for (sample,) in roll_out(tokenizer, settings, rollouts=3)[0]] for _ in range(2)
    )
    assert len(set(first)) == 3
    assert first == second


def test_a_program_is_an_agent_and_prints_its_answer(tokenizer, program):
    sample = one(tokenizer, {"command": program})
    assert sample.text == "answer: hello"
    assert shown(tokenizer, sample)[1] == (True, "hello<eos>")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("raises", "the agent failed: KeyError: 'no such thing'"),
        ("exits", "the agent failed: SystemExit: enough"),
        ("dies", "the agent failed: its process died"),
        (
            "returns_a_number",
            "the agent failed: TypeError: agents must return a string, a dict with an 'answer' or None, got int",
        ),
        ("silent", "the agent sent no request to the policy; check that it uses the given base URL"),
    ],
)
def test_an_agent_that_fails_is_a_sample_with_an_error(tokenizer, agents, function, error):
    sample = one(tokenizer, {"function": f"{agents}:{function}"})
    assert sample.stop_reason is StopReason.ERROR
    assert sample.error == error


def test_a_failed_sample_contains_the_conversation_until_the_error(tokenizer, agents):
    sample = one(tokenizer, {"function": f"{agents}:raises"})
    assert shown(tokenizer, sample)[1] == (True, "hello<eos>")


def test_a_program_that_fails_is_a_sample_with_an_error(tokenizer, program):
    sample = one(tokenizer, {"command": program}, prompt="please fail")
    assert sample.error == f"the agent failed: {sys.executable} exited with code 1: it failed"


def test_an_agent_past_the_time_limit_is_killed_with_child_processes(tokenizer, agents, tmp_path, monkeypatch):
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))
    sample = one(tokenizer, {"function": f"{agents}:sleeps", "timeout_s": 6.0, "environment": ["PID_FILE"]})
    assert sample.error == "the agent took longer than workflow.timeout_s = 6"
    assert shown(tokenizer, sample)[1] == (True, "hello<eos>")
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):
            os.kill(int(file.read_text()), 0)
            if "\nState:\tZ" in Path(f"/proc/{file.read_text()}/status").read_text():
                raise ProcessLookupError  # dead, and nobody of this test asks for its end
            signal.sigtimedwait([], 0.01)


def test_a_program_that_takes_too_long_is_killed(tokenizer):
    sample = one(tokenizer, {"command": ("sleep", "600"), "timeout_s": 0.5})
    assert sample.error == "the agent took longer than workflow.timeout_s = 0.5"


def test_a_spent_budget_is_no_failure_of_the_agent(tokenizer, agents):
    (samples,), engine = roll_out(tokenizer, {"function": f"{agents}:greedy", "max_turns": 3}, script=["a", "b", "c"])
    assert len(engine.requests) == 3
    assert [sample.stop_reason for sample in samples] == [StopReason.LENGTH] * 3
    assert {sample.rollout_id for sample in samples} == {"5/0"}
    assert [sample.error for sample in samples] == [None] * 3


def test_many_agents_run_at_once(tokenizer, agents):
    made, _ = roll_out(tokenizer, {"function": f"{agents}:plain"}, script=lambda text: text.upper(), rollouts=24)
    assert sorted(sample.rollout_id for (sample,) in made) == sorted(f"5/{i}" for i in range(24))
    assert all(np.array_equal(sample.token_ids, made[0][0].token_ids) for (sample,) in made)


def test_agents_end_with_the_run(tokenizer, agents, tmp_path, monkeypatch):
    file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(file))

    async def main():
        workflow = Agent(function=f"{agents}:sleeps", environment=("PID_FILE",))
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        rollout = make_rollout(tokenizer, ["hello"])
        running = asyncio.create_task(execute(workflow, rollout, make_prompt("hi"), 60.0))
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        await workflow.close()
        return await running

    (sample,) = asyncio.run(asyncio.wait_for(main(), 120))
    assert sample.error == "the agent failed: its process died"


def test_every_format_of_calls_can_be_chosen():
    assert set(get_args(Format)) == {*PARSERS, "auto"}


def test_the_workflow_keeps_what_workflows_promise(agents, program):
    asyncio.run(check_workflow(validate(Agent, {"kind": "agent", "function": f"{agents}:greedy", "max_turns": 2})))
    asyncio.run(check_workflow(validate(Agent, {"kind": "agent", "command": program})))


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({}, 'set one of function = "file.py:name", command = ["program", "argument"] or service'),
        ({"function": "a"}, "function: must look like module:function or file.py:function, got 'a'"),
        ({"function": "gone.py:run"}, "function: no such file: gone.py"),
        (
            {"function": "no_such_module:run"},
            "function: no module 'no_such_module' is installed or in the current folder; "
            "for a file, use path/to/file.py:function",
        ),
        ({"function": "FILE:plane"}, "function: FILE has no 'plane'; it defines "),
        ({"command": ["no-such-program"]}, "command: no such program: no-such-program"),
        ({"command": ["sleep"], "max_tokens": 0}, "max_tokens must be 'all' or at least 1, got 0"),
        ({"command": ["sleep"], "tool_calls": "xml"}, "tool_calls: must be "),
    ],
)
def test_mistakes_are_found_before_anything_starts(agents, settings, mistake):
    given = {key: value.replace("FILE", str(agents)) if key == "function" else value for key, value in settings.items()}
    with pytest.raises(ConfigError) as error:
        validate(Agent, {"kind": "agent", **given})
    assert str(error.value).startswith(mistake.replace("FILE", str(agents)))


def test_an_agent_that_cannot_be_imported_ends_the_run_at_its_start(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_thing\n\ndef run(prompt):\n    pass\n")
    workflow = Agent(function=f"{tmp_path / 'broken.py'}:run")
    with pytest.raises(PluginError) as error:
        asyncio.run(workflow.open(RunContext(seed=1, run_dir=Path())))
    assert str(error.value) == (
        f"workflow.function: {tmp_path / 'broken.py'}:run cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_thing'"
    )


def test_listing_the_workflow_imports_no_server_and_no_backend():
    heavy = "{'torch', 'ray', 'transformers', 'aiohttp'}"
    code = f"import plasmid_agents.plugin, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("version", "said"),
    [(0, "read the memory and environment of and signal"), (2, "agents can signal other"), (6, None)],
)
def test_a_kernel_that_cannot_confine_agents_is_announced(tokenizer, program, monkeypatch, caplog, version, said):
    monkeypatch.setattr(landlock, "version", lambda: version)
    roll_out(tokenizer, {"command": program})
    roll_out(tokenizer, {"command": program, "confined": False})
    warnings = [record.getMessage() for record in caplog.records if "workflow.confined" in record.getMessage()]
    assert len(warnings) == (said is not None)
    assert all(said in warning for warning in warnings)
