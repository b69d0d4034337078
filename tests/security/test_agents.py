"""Programs and functions as agents: no keys of the run, no forged results, no full disk."""

import asyncio
import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt
from plasmid.types import StopReason
from plasmid_agents import Agent
from plasmid_workflows.execution import execute

from tests.security.agent_cases import cases

KEYS = ("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "MY_SEARCH_KEY")
AGENT = """
import json, os, sys, urllib.request

def tell_environment(prompt=""):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).read()
    return json.dumps(sorted(os.environ))

def spoil_output(path, *, device):
    for name in ("out", "err"):  # under these names output has once been kept
        try:
            os.remove(os.path.join(path, name))
        except FileNotFoundError:
            pass
        if device:
            os.symlink("/dev/zero", os.path.join(path, name))
        else:
            os.mkfifo(os.path.join(path, name))

def fill_disk(prompt):
    with open("large", "wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))

def forge(prompt):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"[[[ no result\\n")
        except OSError:
            pass
    os._exit(0)

if __name__ == "__main__":
    tell_environment()
    if sys.argv[1:] == ["output"]:
        while True:
            os.write(1, b"x" * (1 << 20))
    if len(sys.argv) > 1:
        spoil_output(os.path.dirname(os.environ["PLASMID_PROMPT_FILE"]), device=sys.argv[1] == "device")
    print(json.dumps(sorted(os.environ)))
"""


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "some_agent.py"
    path.write_text(AGENT)
    return path


def sample_of(tokenizer, settings):
    """The sample of one rollout by an agent."""

    async def main():
        workflow = validate(Agent, {"kind": "agent", **settings})
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            rollout = cases.make_rollout(tokenizer, cases.ScriptedEngine(tokenizer, ["hello"]))
            (sample,) = await execute(workflow, rollout, replace(make_prompt("hi"), messages=()), 60.0)
            return sample
        finally:
            await workflow.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["function", "command"])
def test_agents_get_no_keys_of_the_run(tokenizer, agent, monkeypatch, kind):
    for key in KEYS:
        monkeypatch.setenv(key, "secret")
    how = {"function": f"{agent}:tell_environment"} if kind == "function" else {"command": ["python", str(agent)]}
    names = json.loads(sample_of(tokenizer, how).text)
    assert not set(KEYS) & set(names)
    assert {"PATH", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "PLASMID_SEED"} <= set(names)
    named = json.loads(sample_of(tokenizer, {**how, "environment": ["MY_SEARCH_KEY"]}).text)
    assert set(KEYS) & set(named) == {"MY_SEARCH_KEY"}


def test_a_variable_that_is_named_and_not_set_is_an_error(tokenizer, agent, monkeypatch):
    monkeypatch.delenv("MY_SEARCH_KEY", raising=False)
    with pytest.raises(PluginError, match=r"workflow\.environment: MY_SEARCH_KEY is not set where the run was started"):
        sample_of(tokenizer, {"function": f"{agent}:tell_environment", "environment": ["MY_SEARCH_KEY"]})


def test_a_forged_result_is_the_error_of_one_sample(tokenizer, agent):
    sample = sample_of(tokenizer, {"function": f"{agent}:forge"})
    assert sample.error.startswith("the agent failed: its result cannot be read: JSONDecodeError")


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_an_agent_that_replaces_its_output_holds_up_no_rollout(tokenizer, agent, what):
    """Who opened the pipe would wait forever, with all rollouts; who read the device would take all memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), limit[1]))
    signal.alarm(60)
    try:
        sample = sample_of(tokenizer, {"command": ["python", str(agent), what]})
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert sample.error is None and "OPENAI_BASE_URL" in json.loads(sample.text)


@pytest.mark.parametrize("how", ["program", "function", "shell"])
def test_no_file_of_an_agent_grows_beyond_its_limit(tokenizer, agent, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    settings = {
        "program": {"command": ["python", str(agent), "output"]},
        "function": {"function": f"{agent}:fill_disk"},
        "shell": {"command": ["sh", "-c", "cat /dev/zero > large; true"]},
    }
    sample = sample_of(tokenizer, {**settings[how], "max_file_bytes": 1 << 20, "timeout_s": 60})
    assert sample.stop_reason is StopReason.ERROR and "no end within" not in sample.error
    errors = {"program": "File too large", "function": "File too large", "shell": "never asked"}
    assert errors[how] in sample.error or "workflow.max_file_bytes = 1048576" in sample.error
    assert how == "program" or (tmp_path / "large").stat().st_size == 1 << 20
