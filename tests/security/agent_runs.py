"""Runs of `rl sample` with an agent, whose policy is a server in the test, so that its turns can be counted and
read."""

import contextlib
import json
import os
import signal
import subprocess
import time

from tests.forked_rl import start_rl
from tests.security.hostile_servers import saying, serving
from tests.security.model_files import SPECIAL, make_tokenizer
from tests.security.rl_command import RL

END = SPECIAL.index("<eos>")
"""The token that ends a message."""
TEMPLATE = (
    "{% if tools %}{{ '<system>' + (tools | tojson) + '<eos>' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
RECIPE = """
model.path = "model"
data.path = "rows.jsonl"
rewards = [{{ kind = "exact-match" }}]
trainer.kind = "fsdp"
algorithm.kind = "grpo"
sampling.max_new_tokens = 64
[rollout]
kind = "server"
url = "http://127.0.0.1:{port}"
api = "openai"
model = "m"
[workflow]
kind = "agent"
{workflow}
"""
WITHOUT_RAY = "rl in threads"
"""A fork that runs the command with a thread as rollout worker: for tests that do not depend on processes of a run.

What /proc shows of its environment is that of the server that forks.
"""
WAITING = """
import os, pathlib, time, urllib.request

def wait(prompt, base_url):
    name = pathlib.Path("base_url").with_suffix("." + prompt)
    unfinished = name.with_name(name.name + ".new")
    unfinished.write_text(base_url)
    os.rename(unfinished, name)
    while not (os.path.exists("end") or os.path.exists("end." + prompt)):
        time.sleep(0.1)
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    return urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body)).read().decode()
"""
"""Program that prints the address of the policy, and leaves the rest of its rollout to the test."""


class Policy:
    """A completion server that always gives the same answer."""

    def __init__(self, port, bodies):
        self.port, self.bodies = port, bodies

    def prompts(self):
        """Return the token ids of the prompts, in the order of the requests."""
        return [json.loads(body)["prompt"] for body in self.bodies if body]


@contextlib.contextmanager
def make_policy(folder, text="hello"):
    """Create the server, and write the model's tokenizer."""
    make_tokenizer(folder / "model", TEMPLATE)
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    vocabulary = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [*(vocabulary[character] for character in text), END]
    choice = {
        "text": text,
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
    }
    with serving(saying({"choices": [choice], "data": [{"id": "m"}]}, headers=b"Connection: close\r\n")) as server:
        yield Policy(*server)


def write_job(folder, policy, workflow, prompts):
    """Write a recipe, and rows with these prompts."""
    (folder / "recipe.toml").write_text(RECIPE.format(port=policy.port, workflow=workflow))
    rows = [json.dumps({"prompt": prompt, "target": ""}) + "\n" for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(rows))


def start(folder, policy, workflow, prompts, *, rl=RL, **environment):
    """Start `rl sample` with one rollout of each prompt, as a process. Only one may run at a time `WITHOUT_RAY`."""
    write_job(folder, policy, workflow, prompts)
    arguments = ["sample", "recipe.toml", "-n", str(len(prompts)), "--out", "samples.jsonl"]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
    with (folder / "output").open("w") as output:
        if rl == WITHOUT_RAY:
            return start_rl(*arguments, program=rl, cwd=folder, env=environment, stdout=output, stderr=output)
        return subprocess.Popen(
            [*rl, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def finish(folder, process, timeout_s=120):
    """Return the sample of each prompt, and the output of the run."""
    try:
        process.wait(timeout_s)
    finally:
        process.kill()
    said = (folder / "output").read_text()
    assert process.returncode == 0, said
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return {row["prompt"]: row for row in rows}, said


def sample(folder, workflow, prompts, **environment):
    """Return samples by prompt, and the output of the run."""
    with make_policy(folder) as policy:
        return finish(folder, start(folder, policy, workflow, prompts, **environment))


class Waiting:
    """A run whose agents wait while the test attacks their server."""

    def __init__(self, folder, policy, names, *, rl=RL):
        self.folder, self.policy = folder, policy
        (folder / "waiting.py").write_text(WAITING)
        settings = 'function = "waiting.py:wait"\ntimeout_s = 900\nmax_turns = 1000'
        self.process = start(folder, policy, settings, names, rl=rl)
        until = time.monotonic() + 240
        files = [folder / f"base_url.{name}" for name in names]
        while not all(file.exists() for file in files):
            if self.process.poll() is not None or time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process.pid, signal.SIGABRT)  # faulthandler prints the stacks of all threads
                self.process.wait(20)
                raise AssertionError((folder / "output").read_text())
            time.sleep(0.1)
        urls = [file.read_text() for file in files]
        self.port = int(urls[0].split(":")[2].partition("/")[0])
        self.keys = [url.split("/")[3] for url in urls]

    def end(self):
        """Return samples by prompt, and the output of the run."""
        (self.folder / "end").touch()
        return finish(self.folder, self.process)
