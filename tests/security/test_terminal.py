"""Names and texts of files, recipes and samples cannot command the terminal that shows them."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import numpy as np
import pytest
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid_models.testing import make_hollow_model
from plasmid_runtime.observe.sample_store import write_samples

EVIL = "a\x1b]52;c;b3duZWRz\x07\x1b]8;;http://x\x1b\\\u202e\u200b\x9b2J\x1b[6n\r\x08z[bold]y[/bold]"
"""Writes the clipboard, opens a link, reverses and hides text, clears the screen, makes the terminal type."""
RL = [sys.executable, "-c", "from plasmid_cli.main import app; app()"]
COMMANDS = ("\x1b]", "\x1b[6n", "\x07", "\x9b", "\x08", "\u202e", "\u200b")
OURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
RECIPE = """
model.path = "model"
data.path = "prompts.jsonl"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
"""


def in_terminal(folder, *argv, tty=True):
    """Exit code and output of `rl`, with standard output and standard error a terminal, or a pipe."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "400", "LINES": "50"}
    if not tty:
        done = subprocess.run(
            [*RL, *argv], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        return done.returncode, done.stdout.decode()
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*RL, *argv], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ready = select.select([ours], [], [], 1.0)[0]
            output += os.read(ours, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(10), output.decode().replace("\r\n", "\n")


def assert_harmless(text):
    assert "a\\x1b]52;c;b3duZWRz" in text, text
    for command in COMMANDS:
        assert command not in text, (command, text)
    rest = OURS.sub("", text)
    assert "\x1b" not in rest
    assert "\r" not in rest.replace("\r\n", "\n"), rest


@pytest.fixture
def folder(tmp_path):
    make_hollow_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 1", "target": 1}\n')
    return tmp_path


@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipe"])
def test_keys_and_file_names_in_errors_cannot_command_a_terminal(folder, tty):
    name = EVIL.replace("/", "") + ".jsonl"
    (folder / name).write_text(json.dumps({EVIL: 1}) + "\n")
    code, text = in_terminal(folder, "train", "recipe.toml", f"data.path={name}", "--dry-run", tty=tty)
    assert code == 2 and "no key 'prompt'" in text
    assert len(re.findall("error:", text)) == 1
    assert_harmless(text)


def test_values_of_a_recipe_in_a_dry_run_cannot_command_a_terminal(folder):
    (folder / "evil.toml").write_text(
        f"recipe = {json.dumps(EVIL.replace('/', ''))}\nsampling.stop = [{json.dumps(EVIL)}]\n"
    )
    code, text = in_terminal(folder, "train", "recipe.toml", "evil.toml", "run.batches=1", "--dry-run")
    assert code == 0, text
    shown = text.replace("\\u001b", "\\x1b")  # TOML's own way to write it
    assert_harmless(OURS.sub("", shown))


def test_an_unknown_setting_of_a_command_line_cannot_command_a_terminal(folder):
    code, text = in_terminal(folder, "train", "recipe.toml", f"{EVIL}=1", f"run.dir={EVIL}", "--dry-run")
    assert code == 2
    assert_harmless(text)


def test_prompts_and_columns_in_rl_sample_cannot_command_a_terminal(folder):
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": EVIL, "target": EVIL, EVIL: [EVIL]}) + "\n")
    code, text = in_terminal(folder, "sample", "recipe.toml", "--dry")
    assert code == 0, text
    assert_harmless(text)


def test_given_texts_in_rl_reward_cannot_command_a_terminal(folder):
    (folder / "given.jsonl").write_text(json.dumps({"prompt": EVIL, "response": EVIL, "target": 1}) + "\n")
    code, text = in_terminal(folder, "reward", "recipe.toml", "--data", "given.jsonl")
    assert code == 0, text
    assert_harmless(text)


def write_run(folder):
    metrics = {"reward/mean": 0.5, EVIL: 1.0, f"reward/{EVIL}": 0.5}
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": metrics}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    held_out = {f"eval/{EVIL}/reward": 0.5, f"eval/{EVIL}/{EVIL}": 1.0, f"eval/{EVIL}/x={EVIL}/reward": 1.0}
    (folder / "evaluations.jsonl").write_text(
        json.dumps({"step": 1, "time": 1.0, "name": EVIL, "metrics": held_out}) + "\n"
    )
    (folder / "config.json").write_text(json.dumps({"recipe": EVIL + "$\\frac$", "model": {"path": EVIL}}))
    ids = np.array([1, 2], np.int32)
    prompt = Prompt(id=EVIL, token_ids=ids[:1], text=EVIL, messages=(), target=EVIL)
    sample = Sample(
        id=EVIL,
        rollout_id=EVIL,
        group_id=0,
        prompt_id=EVIL,
        token_ids=ids,
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        versions=(VersionSpan(version=0, start=1, end=2),),
        sampling=SamplingParams(),
        text=EVIL + "</script><script>document.title='owned'</script>",
        stop_reason=StopReason.STOP,
        score=Score(value=1.0, components={EVIL: 1.0}, error=EVIL),
        error=EVIL,
    )
    (folder / "samples").mkdir()
    group = PromptGroup(id=0, prompt=prompt, samples=(sample,))
    write_samples(folder / "samples" / "batch-000001.parquet", [group], step=1, dropped_by={0: EVIL})


def test_a_run_folder_of_others_cannot_command_the_terminal_of_rl_view(tmp_path):
    write_run(tmp_path)
    code, text = in_terminal(tmp_path, "view", ".")
    assert code == 0, text
    assert_harmless(text)
    page = (tmp_path / "report.html").read_text()
    assert "<script>document.title" not in page and page.count("</script>") == 2


def test_an_error_that_nobody_handles_cannot_command_a_terminal(folder):
    (folder / "evil.py").write_text(f"raise ValueError({EVIL!r})\n")
    code, text = in_terminal(folder, "--traceback", "train", "recipe.toml", "--plugin", "evil.py", "--dry-run")
    assert code == 1 and "Traceback" in text
    assert_harmless(text)


def test_what_libraries_write_during_a_command_cannot_command_a_terminal(folder):
    (folder / "evil.py").write_text(
        f"import logging, sys, warnings\nlogging.getLogger('x').warning({EVIL!r})\nwarnings.warn({EVIL!r})\n"
        f"print({EVIL!r})\nprint({EVIL!r}, file=sys.stderr)\n"
    )
    code, text = in_terminal(folder, "train", "recipe.toml", "--plugin", "evil.py", "--dry-run")
    assert code == 2 and text.count("a\\x1b]52;c;b3duZWRz") >= 4, text
    assert_harmless(text)
